//! Summaries of keys, from which blocks and tokens are selected.

use super::boundary::{computing, handle, versioned};
use super::session::vwd_session;
use crate::abi::{vwd_channel_importance_args, vwd_index_update_args, vwd_status, vwd_stream};
use crate::core::array::require_array;
use crate::core::status::Error;
use crate::ops::index::{self, MOST_UPDATES};
use std::mem::MaybeUninit;

/// Builds or extends the summaries of tokens begin[i] … seq_lens[i]−1 of each sequence from their post-RoPE keys.
///
/// MINMAX: every block that holds a token of the range is summarised from all its tokens below seq_lens[i]; a zero is +0.
/// The extremes of FP8 keys are rounded to the dtype of key_max.
/// MEAN: every window that ends inside the range: the float32 sum of its keys in the order of the tokens, times 1/window,
/// rounded to the dtype of means.
/// LABEL: every token of the range. From lo (a zero is +0) and hi, the smallest and largest of its r channels x, in float32:
///   label_min = float16(lo), label_scale = float16((hi − lo) / 15), both clamped to ±65504, the scale also to 0 or above;
///   code = clamp(rne((x − label_min) / label_scale), 0, 15) against the stored values, and 0 where label_scale is 0.
/// AXIS: every block as for MINMAX, from its n tokens k_t. With μ their mean, x_t = k_t − μ and W_c = axis_weights_c²:
///   z = W∘x_t of the token whose Σ_c W_c·x_tc² is the largest (ties to the lower); three times u_t = x_t·z,
///   b = Σ_t u_t·x_t and z = W∘b / |u|. Stored are μ − axis_centre and r·b / |u| with
///   r = max(1.15 / √n, 0.6·max_t |u_t| / |u|), all 0 where |u| is 0.
///   In INT4 each group of 32 channels has the scale, minimum and codes that a label of those channels would have; a group
///   that holds a number that is not finite has scale 0 and minimum NaN. Sums are in float32, with fused products, in an
///   order that depends on nothing but D and S: tokens are summed in eight sums, which are then added up.
/// All rounding is to nearest, ties to even. NaN is ignored in maxima and minima and has code 0; without any number max is
/// −inf, min +inf, label_min NaN and label_scale 0. A channel outside 0 … D−1 reads as 0. A token without a page is
/// left out of maxima and minima, and makes means, labels and AXIS NaN: such summaries are selected last.
/// Extending token by token gives the same bits as building at once, also after tokens were removed and replaced.
///
/// An FP8 key is summarised as its stored value times its scale, rounded to float32.
///
/// args->k           [pages, P, Hk, D]  float32, float16, bfloat16, float8_e4m3fn or float8_e5m2; D a multiple of 8, 16 … 576.
///                                      See vwd_paged_kv for pages and lengths.
/// args->k_scale     [1], [Hk] or [pages, P, Hk]  float32, optional (absent: 1), and only for keys in FP8.
/// args->page_table  [B, max_pages]     int32, optional.
/// args->seq_lens    [B]                int32. End of the range.
/// args->begin       [B]                int32, optional (absent: 0). Clamped to 0 … seq_lens[i]. A session that checks
///                                      contents refuses a −1 page of tokens before it in its block.
/// args->index                          The summaries, out; table, channels, axis_weights and axis_centre are inputs. A
///                                      summary without a row is not stored.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
/// be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
/// this point.
/// Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED, DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_index_update(
    session: *const vwd_session,
    args: *const vwd_index_update_args,
    stream: vwd_stream,
) -> vwd_status {
    computing("vwd_index_update", || {
        let (mut buffer, mut index_room) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: the C contract of session and args.
        let (session, args) = unsafe { (handle(session, "session")?, versioned(args, "args", &mut buffer)?) };
        // SAFETY: the C contract of args->index.
        let index = unsafe { versioned(args.index, "index", &mut index_room)? };
        index::update(session, &index::UpdateRequest::from_c(session, args, index)?, stream)
    })
}

/// Updates the summaries of several layers: `vwd_index_update` for each of `updates`, with the same results.
///
/// On a GPU, up to 32 updates that follow each other share a launch where they differ in nothing but where keys, scales, summaries,
/// channels, weights and centres lie, as the layers of a model mostly do: the update of one token is little more than a launch.
///
/// Where each sequence's new tokens go to a block that has a summary, an engine may call this once at the end of the step and not in
/// each layer before blocks are selected: the newest blocks are selected whatever their summaries say (local_blocks of
/// `vwd_select_blocks`, 1 or more). A step that begins a block, or replaces tokens, updates before it selects. Lists by MINMAX are
/// the same then; by AXIS the newest block's older summary has its share in the scores of the others.
///
/// updates  [count]  Host array of arguments, each as for `vwd_index_update`. None may write what another one reads; two that
///                   write the same memory are refused.
/// count             0 … 256. With 0 updates nothing is done.
///
/// All updates are checked before the first is enqueued: a call that fails by its arguments changes nothing.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
/// be captured. Thread-safe; calls on one stream are ordered by the caller. The array and the structs are borrowed until the call
/// returns, tensors until the stream passes this point.
/// Errors: INVALID_ARGUMENT (the message names the argument, such as updates[3].k), UNSUPPORTED, DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_index_update_layers(
    session: *const vwd_session,
    updates: *const *const vwd_index_update_args,
    count: u32,
    stream: vwd_stream,
) -> vwd_status {
    computing("vwd_index_update_layers", || {
        let count = count as usize;
        // SAFETY: the C contract of session.
        let session = unsafe { handle(session, "session")? };
        if count > MOST_UPDATES {
            return Err(Error::argument("count", count, format!("0 to {MOST_UPDATES}")));
        }
        if count > 0 {
            require_array("updates", updates, count, "pointers")?;
        }
        let read = |n: usize, visit: &mut dyn FnMut(&index::UpdateRequest) -> _| {
            let (mut buffer, mut index_room) = (MaybeUninit::uninit(), MaybeUninit::uninit());
            // SAFETY: n is below count, the length of the array; the C contract of its structs and of their index.
            unsafe { versioned(*updates.add(n), "args", &mut buffer) }
                .and_then(|args| {
                    // SAFETY: as above.
                    let index = unsafe { versioned(args.index, "index", &mut index_room)? };
                    visit(&index::UpdateRequest::from_c(session, args, index)?)
                })
                .map_err(|error| error.of_member("updates", n))
        };
        index::update_layers(session, count, read, stream)
    })
}

/// Chooses the r key channels that decide the scores of each KV head (Double Sparsity: Yang et al. 2024, section 3.2), and
/// finds the channel weights and the centre of the keys for AXIS.
///
/// importance[h, c] = mean over the G query heads of h of max_t |q[t, ·, c]|, times max_t |k[t, h, c]|, in float32: the sum
/// in the order of the heads, divided by G, times the maximum of the keys. NaN is ignored in maxima. The r channels of largest
/// importance are chosen, ties to the lower channel.
///
/// weights[h, c] = mean over the tokens and the G query heads of h of |q[t, ·, c]|, centre[h, c] = mean over the tokens of
/// k[t, h, c], in float32, for AXIS, from any text or from the prompt. A NaN counts as 0, and so does a mean of no tokens.
///
/// args->q           [Tq, Hq, D]  float32, float16 or bfloat16; D a multiple of 8, 16 … 576. Sample of post-RoPE queries.
/// args->k           [Tk, Hk, D]  dtype of q. Sample of post-RoPE keys.
/// args->channels    [Hk, r]      int32, out, optional, ascending. r even, 2 … D.
/// args->importance  [Hk, D]      float32, out, optional.
/// args->weights     [Hk, D]      float32, out, optional.
/// args->centre      [Hk, D]      float32, out, optional.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
/// be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
/// this point.
/// Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED, DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_channel_importance(
    session: *const vwd_session,
    args: *const vwd_channel_importance_args,
    stream: vwd_stream,
) -> vwd_status {
    computing("vwd_channel_importance", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of session and args.
        let (session, args) = unsafe { (handle(session, "session")?, versioned(args, "args", &mut buffer)?) };
        index::importance(session, &index::ImportanceRequest::from_c(session, args)?, stream)
    })
}
