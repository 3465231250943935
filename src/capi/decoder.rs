//! Decoder: the attention of decode steps, layer by layer, on the engine's own paged keys and values.

use super::boundary::{
    Handle, boundary, computing, handle, optional_versioned, out, release, versioned, write_versioned,
};
use super::budget::costs;
use super::forecast::vwd_forecast;
use super::kv::vwd_kv_cache;
use super::session::vwd_session;
use crate::abi::{
    vwd_decoder_accept_args, vwd_decoder_attend_args, vwd_decoder_details, vwd_decoder_foresee_args,
    vwd_decoder_options, vwd_decoder_reset_args, vwd_decoder_step, vwd_status, vwd_stream,
};
use crate::decode::decoder::Decoder;
use crate::runtime::fork::Process;
use std::mem::MaybeUninit;

/// The attention of decode steps of one model. Opaque.
///
/// The engine keeps its keys and values, its page tables and its scheduler. The decoder keeps what sparse attention needs beside
/// them: summaries of blocks, lists, intermediate results, and what is known of each sequence's drafts and scores. Summaries lie by
/// page of the engine's cache, so that a sequence that joins, leaves, is preempted in place or shares the pages of a prefix needs no
/// call. A block of several pages has its summary in its first page: where blocks are larger than pages, sequences that share
/// pages share whole blocks of them.
///
/// Drafting with sparse attention and verifying with dense attention gives the text of dense attention: steps of one position in
/// mode VWD_DECODER_SPARSE draft, a step of γ + 1 positions in mode VWD_DECODER_DENSE computes the drafted tokens again, which
/// replaces their keys, values and summaries, and `vwd_decoder_accept` commits what agrees.
///
/// A layer's policy says by which strategy its sparse rows attend. SERIAL selects and then attends. PRR attends a predicted list on a
/// stream of the decoder's own while the selection runs, and repairs what was predicted wrong: its results are SERIAL's. FORESEEN
/// attends the list that `vwd_decoder_foresee` has made before the layer's queries were there. FORESEEN, or PRR with
/// VWD_PREDICT_FORESEEN, is SERIAL in a layer that was not foreseen in the step. With a budget (options->budget) both are SERIAL in
/// steps in which they do not pay.
///
/// A step of several positions (step->positions above 1) is SERIAL in every layer, whatever its strategy: it selects one list of k blocks
/// for all positions of a row, and attends it. Nothing is foreseen, predicted or repaired in it, and its scores are not remembered: the
/// next step of one position predicts from those before. Which rows are dense is as in the layer's other steps. So drafts that are
/// verified by sparse attention are verified by SERIAL.
pub struct vwd_decoder(Decoder, Process);

impl Handle for vwd_decoder {
    #[inline]
    fn maker(&self) -> Process {
        self.1
    }
}

/// Creates a decoder, with all memory that its calls use except for the scratch of their streams.
///
/// session  Kept alive by the decoder; may be released first.
/// options  Required; policies is read during the call.
/// decoder  Out. Release with `vwd_decoder_release`.
///
/// Blocks and allocates; not for capture. Thread-safe.
/// Errors: INVALID_ARGUMENT (the message names the option), OUT_OF_MEMORY, DRIVER, INTERNAL. After an error no memory stays
/// allocated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_decoder_create(
    session: *const vwd_session,
    options: *const vwd_decoder_options,
    decoder: *mut *mut vwd_decoder,
) -> vwd_status {
    computing("vwd_decoder_create", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of the arguments.
        unsafe {
            let (session, options) = (handle(session, "session")?, versioned(options, "options", &mut buffer)?);
            let (decoder, costs) = (out(decoder, "decoder")?, costs(options.budget, "options.budget")?);
            let created = Decoder::create(&session.0, options, None, costs)?;
            decoder.write(Box::into_raw(Box::new(vwd_decoder(created, session.maker()))));
        }
        Ok(())
    })
}

/// Creates a decoder whose keys and values are those of a tiered cache.
///
/// A row of a step is a sequence of the cache: step->sequences has their numbers. The decoder appends the new tokens to the cache,
/// keeps summaries by the cache's blocks, and resolves and fetches what its lists name. The engine adds, extends, forks, truncates and
/// frees sequences, and resolves nothing in these layers while it uses the decoder. A prompt is written in steps without q, of up to S
/// positions.
///
/// cache  Of the session. Kept alive by the decoder; may be released first.
/// The others are as in `vwd_decoder_create`. Options of the layers, heads, channels, dtype and blocks are those of the cache; page_size and
/// pages are 0, max_positions is at most S. Strategies are SERIAL, ASYNC_TLS, SPARDA and VANWARD.
///
/// What a step reads at once has slots: max_rows · Hk · entries ≤ slots of the cache, in the layer with the fewest, whatever the cache's hold. entries
/// is k for SERIAL, 2k + 1 for ASYNC_TLS, and ⌈ratio·k⌉ + 1 for SPARDA and VANWARD, or one less by scores; with the longest
/// selected list of all layers for k, forced blocks where they are more than a list's, and at least 2. A step may give away the slots of
/// lists that the caller resolved before it. A resolve of the caller's own, once there is such a decoder, may name no more entries than
/// slots − (hold − 1) · the longest of the decoder's lists, max_rows · Hk · its entries, where that is less than slots / hold.
///
/// Dense rows and dense layers read whole blocks in host memory, each once, and take slots for the newest two alone: what sparse steps
/// have in slots stays there. On CUDA such a row takes as long as its keys and values take over the bus. Drafts of sparse steps, verified by
/// a dense step of several positions, share that among the tokens that are accepted.
///
/// With VWD_CODING_INT4 of the cache every strategy, and every dense row, attends a sequence's first block and its tail as they were appended,
/// and the codes of the blocks between, or what these stand for with VWD_SLOTS_DECODED; its dense rows read codes in any case. VANWARD gives
/// the results of SERIAL over the same codes.
///
/// Blocks and allocates; not for capture. Thread-safe.
/// Errors: INVALID_ARGUMENT (the message names the option), OUT_OF_MEMORY, DRIVER, INTERNAL. After an error no memory stays
/// allocated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_decoder_create_on_cache(
    session: *const vwd_session,
    options: *const vwd_decoder_options,
    cache: *const vwd_kv_cache,
    decoder: *mut *mut vwd_decoder,
) -> vwd_status {
    computing("vwd_decoder_create_on_cache", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of the arguments.
        unsafe {
            let (session, options) = (handle(session, "session")?, versioned(options, "options", &mut buffer)?);
            let (cache, decoder) = (handle(cache, "cache")?, out(decoder, "decoder")?);
            let created = Decoder::create(&session.0, options, Some(&cache.0), None)?;
            decoder.write(Box::into_raw(Box::new(vwd_decoder(created, session.maker()))));
        }
        Ok(())
    })
}

/// Releases a decoder; NULL is a no-op. No call on it may be in progress, streams have passed its last call, and no graph that holds
/// one of its calls runs again.
///
/// Frees the decoder's memory, for which the driver may wait until the device is idle; not for capture. Any thread may call it, while others
/// use other handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_decoder_release(decoder: *mut vwd_decoder) {
    // SAFETY: the C contract of decoder.
    unsafe { release(decoder) }
}

/// Fills `details`, whose struct_size the caller has set, with the decoder's memory and views of what it keeps of each sequence.
///
/// decoder  Required.
/// details  Required. Out; its struct_size is set by the caller.
///
/// Enqueues nothing, does not block or allocate; may be called while a stream captures, and is not part of the capture. What the views show is
/// there once the stream has passed the call that wrote it. Thread-safe, beside other calls on the decoder, too.
/// Errors: INVALID_ARGUMENT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_decoder_info(
    decoder: *const vwd_decoder,
    details: *mut vwd_decoder_details,
) -> vwd_status {
    boundary("vwd_decoder_info", || {
        // SAFETY: the C contract of the arguments.
        unsafe { write_versioned(details, &handle(decoder, "decoder")?.0.details(), "details") }
    })
}

/// Begins a step: decides for each row of the batch how it attends in each layer.
///
/// A row takes part with the last q_lens[i] of its seq_lens[i] tokens. A sparse row becomes dense in a layer if it has fewer
/// tokens than the layer's dense_below, or no more blocks than the layer's lists have room for by k or by forced blocks: then its
/// result is that of dense attention bit for bit. In a layer whose strategy is FORESEEN these lists are the foreseen ones. All of
/// this is decided on the device, so that a captured step serves growing contexts and changing modes.
///
/// step->mode                        VWD_DECODER_SPARSE or VWD_DECODER_DENSE for all rows; 0 means SPARSE, and is required beside
///                                   modes. One mode for all rows saves the launches of the other.
/// step->positions                   Q, positions of a row; at most max_positions; 0 means 1. Above 1, every layer is SERIAL in the step.
/// step->shortest                    A promise: no sparse row has fewer tokens; 0: none. Where it exceeds what makes a row dense, all
///                                   rows of a SPARSE step are sparse, and the launches for dense rows are saved.
/// step->longest                     Tokens of the longest row, as far as the host knows; 0: those that page_table has room for. Read where
///                                   the decoder has a budget, and for nothing else.
/// step->page_table  [B, max_pages]  int32, optional (absent: row i has page i). A page outside 0 … pages−1 holds no tokens.
/// step->seq_lens    [B]             int32: tokens of each row, those of this step included. At most max_rows rows.
/// step->q_lens      [B]             int32, optional (absent: Q): tokens of each row in this step, clamped to 0 … Q.
/// step->begin       [B]             int32, optional: the first token that is new to the summaries, for tokens that the engine
///                                   wrote itself, such as a prompt's or those of pages that were copied or swapped in. The
///                                   decoder's own new tokens are always summarised, together with the earlier ones of their page.
/// step->modes       [B]             int32, optional: VWD_DECODER_* of each row; any other value skips the row.
/// step->sequences   [B]             int32, optional (absent: row i is sequence i): the sequence of each row, distinct. It is read where
///                                   scores are remembered, VWD_PREDICT_SCORES, and with options->remainder. Rows with a number outside
///                                   0 … max_sequences−1 have no past. A sequence that takes another's number is announced by
///                                   `vwd_decoder_reset`; without that more is predicted wrong, and repaired, and with options->remainder
///                                   the term is that of the other sequence.
///
/// step->tree  [B, Q, ⌈Q/32⌉]        uint32, optional (absent: chains), read where Q exceeds 1: the q_lens[i] tokens of row i in this step
///                                   are the nodes of a draft tree, as in `vwd_attention`. Node n is written as token
///                                   seq_lens[i] − q_lens[i] + n. The tree is verified by `vwd_verify_tree`, and what was accepted is
///                                   moved by `vwd_compact`, on a tiered cache by `vwd_kv_cache_compact`; in the row's next step `begin` is
///                                   the root's token, so that the summaries are made of what was accepted. With options->remainder in
///                                   steps of mode DENSE alone.
///
/// With a budget the call decides for each layer of PRR or FORESEEN, in steps of one position, whether it attends so or by SERIAL:
/// by its strategy if the budget's time of that, at `longest` tokens, B rows, the policy's ratio and options->coverage, is shorter than
/// SERIAL's by more than 2 %. A layer that falls back gives SERIAL's results, its list and its threshold of dense rows among them, bit
/// for bit: those of PRR are the same but for rounding, those of FORESEEN are of another list. Scores are not remembered in it. The
/// decision depends on these sizes alone, never on contents or timing. A captured step keeps the one that was made when it was
/// captured, in every replay: give the `longest` that its replays are for, and capture again where another strategy pays.
///
/// The tensors are read by this call and by those of `vwd_decoder_foresee` and `vwd_decoder_attend` until the next step: they must stay valid, and their
/// contents unchanged, until the stream has passed these.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may be
/// captured, together with the step's `vwd_decoder_foresee` and `vwd_decoder_attend`. Calls on one decoder are ordered by the caller, by one stream or by
/// events.
/// Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED, DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_decoder_begin(
    decoder: *const vwd_decoder,
    step: *const vwd_decoder_step,
    stream: vwd_stream,
) -> vwd_status {
    computing("vwd_decoder_begin", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of decoder and step.
        let (decoder, step) = unsafe { (handle(decoder, "decoder")?, versioned(step, "step", &mut buffer)?) };
        decoder.0.begin(step, stream)
    })
}

/// Selects for a layer of the step before its queries are there, such as the next layer where a layer begins.
///
/// The list has the best ⌈ratio·k⌉ blocks of the tokens before the step by the layer's own summaries, forced ones included, and always
/// the block of the step's own token; where that block is new the list is one longer. The queries that select are predicted: a
/// forecast makes them from the residual stream, rotated to the position of each row's token, or the caller gives them. For rows that
/// have tokens new to the summaries (step->begin) nothing is foreseen; they are SERIAL in the step, at the price of launches that a
/// step without begin saves.
///
/// The call does nothing, and gives VWD_OK, for a layer whose strategy does not foresee or falls back to SERIAL in the step, in a DENSE
/// step and in one of several positions, in which `vwd_decoder_attend` is SERIAL: an engine may call it for every layer.
///
/// forecast                             Optional. Kept by the caller as long as x, and as long as graphs that hold the call.
/// args->layer                          The layer that is foreseen. `vwd_decoder_attend` for it comes later in the step.
/// args->map                            The map of the forecast: l−1 to foresee layer l where each map forecasts the next layer.
/// args->rope                           The layer's rotary embedding, or NULL; as in `vwd_forecast_project`. With a forecast only.
/// args->x         [B, input_dim]       The residual stream that the map reads, float32, float16 or bfloat16. With a forecast only.
/// args->previous  [B, heads, D]        With a forecast that has memory: the layer's pre-RoPE queries at the token before.
/// args->q         [B, heads, D]        Without a forecast: predicted queries after the rotary embedding, float32, float16 or bfloat16.
///
/// Heads are the Hq query heads of the layer, or Hk: one vector for each KV head (SparDA: Fu et al. 2026). With options->remainder they are
/// Hq.
///
/// The selection runs on a stream of the decoder's own, for which `vwd_decoder_attend` of the layer waits. Given queries are read before the
/// caller's stream passes the call. A forecast projects on the decoder's stream, too: x, previous and the rope's inv_freq stay valid, and are not
/// written, until the caller's stream has passed the decoder's next call of `vwd_decoder_attend` (for any layer), `vwd_decoder_foresee` or
/// `vwd_decoder_begin`, which waits for the projection; `out` of that attention is other memory. A step that foresees the next layer
/// where a layer begins keeps them so long by itself: what enters a layer is needed after its attention, and the next layer's queries are made
/// later.
///
/// In a capture these calls belong to the same one: a capture that ends before `vwd_decoder_attend` of the layer is refused by the driver
/// as not joined. A layer that was foreseen in another capture, or outside, counts as not foreseen. Where a call of the step fails, its
/// stream waits for all that was foreseen, so that the step may be given up; else `vwd_decoder_begin` of the next step waits for it, and
/// sequences of a cache are changed after that.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not synchronise, nor allocate once its
/// scratch is there; may be captured. `vwd_decoder_attend_scratch` makes room for the selection on the decoder's stream, and this call for
/// the projection, unless an earlier call of the same capture has brought that stream into it: then a larger projection is OUT_OF_SCRATCH. Calls on
/// one decoder are ordered by the caller. Other tensors are borrowed until the stream passes this point.
/// Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_SCRATCH (CUDA), OUT_OF_MEMORY (scratch), UNSUPPORTED,
/// DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_decoder_foresee(
    decoder: *const vwd_decoder,
    forecast: *const vwd_forecast,
    args: *const vwd_decoder_foresee_args,
    stream: vwd_stream,
) -> vwd_status {
    computing("vwd_decoder_foresee", || {
        let (mut buffer, mut rope_buffer) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: the C contract of decoder, forecast and args.
        unsafe {
            let (decoder, args) = (handle(decoder, "decoder")?, versioned(args, "args", &mut buffer)?);
            let rope = optional_versioned(args.rope, "rope", &mut rope_buffer)?;
            let forecast = if forecast.is_null() { None } else { Some(&handle(forecast, "forecast")?.0) };
            decoder.0.foresee(forecast, args, rope, stream)
        }
    })
}

/// Attends in one layer of the step: writes the new keys and values to their pages, summarises the blocks that they touch, selects
/// blocks for sparse rows, and computes the attention of every row.
///
/// The result of a row is that of `vwd_attention` over all its tokens, if it is dense; otherwise over the blocks that
/// `vwd_select_blocks` selects by the layer's policy, one list for all positions of the row, or over those that were foreseen. Positions at or past q_lens and rows
/// that are skipped get out 0.
///
/// args->layer                             0 … layers−1, each once in a step.
/// args->k          [pages, P, Hk, D]      The layer's keys, in the options' dtype; in and out.
/// args->v          [pages, P, Hk, Dv]     The layer's values; in and out.
/// args->k_scale, v_scale                  As in `vwd_paged_kv`; the engine writes the scales of new tokens.
/// args->new_k      [B, Hk, D]             Keys of the step's tokens after the rotary embedding, in the options' dtype; optional:
///               or [B, Q, Hk, D]          absent if the engine has written them to their pages. Row r of sequence i is token
///                                         seq_lens[i] − q_lens[i] + r. A token without a page is dropped.
/// args->new_v      [B, Hk, Dv]            Values likewise; given with new_k.
///               or [B, Q, Hk, Dv]
/// args->q          [B, Hq, D]             float32, float16 or bfloat16; optional: absent, the call writes and summarises only.
///               or [B, Q, Hq, D]
/// args->sinks      [Hq]                   float32, optional; as in `vwd_attention`.
/// args->out        [B, Hq, Dv]            dtype of q, or float32; out.
///               or [B, Q, Hq, Dv]
/// Without a dimension for positions, Q of the step is 1.
///
/// With options->remainder the call extends the means and the covariance of each row's sequence as `vwd_remainder_update` does, by whole blocks
/// of the tokens before the step without the newest max_draft ones: `begin` of the step, and its first token, say what was replaced. The
/// attention of a sparse row is then joined by the term of `vwd_attention`'s remainder, with the log_mass of the selection that made the list: of
/// the layer's queries, or of those that were foreseen. On a tiered cache a block is counted while it lies in its sequence's tail. Sums that are to be made anew
/// begin there with the first block that the tail still has, and blocks that have left it are passed over, as if they had been like those before.
///
/// Rows that write tokens in a step share no page in which they write.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not synchronise, nor allocate once its
/// scratch is there; may be captured. Calls on one decoder are ordered by the caller. Tensors are borrowed until the stream passes
/// this point.
/// Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_SCRATCH (CUDA), OUT_OF_MEMORY (scratch), UNSUPPORTED,
/// DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_decoder_attend(
    decoder: *const vwd_decoder,
    args: *const vwd_decoder_attend_args,
    stream: vwd_stream,
) -> vwd_status {
    computing("vwd_decoder_attend", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of decoder and args.
        let (decoder, args) = unsafe { (handle(decoder, "decoder")?, versioned(args, "args", &mut buffer)?) };
        decoder.0.attend(args, stream)
    })
}

/// Tells how many bytes of scratch `vwd_decoder_attend` with these arguments needs in its stream's arena: 0 on a CPU session. On a
/// CUDA session it also makes the arenas of the decoder's own streams as large as the layer's strategy needs.
///
/// With a budget both are enough for the strategy and for SERIAL, whatever this step or a later one decides.
///
/// Call it after `vwd_decoder_begin`, for `vwd_session_reserve`, before a graph is captured. The number follows from shapes,
/// strides, dtypes and scalars, never from the contents of tensors. The arguments are checked as in the call.
///
/// bytes  Out.
///
/// Enqueues nothing. Where an arena of the decoder's own has to grow, blocks until its stream has passed what it holds, and allocates;
/// not for capture. Calls on one decoder are ordered by the caller.
/// Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED, OUT_OF_MEMORY, DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_decoder_attend_scratch(
    decoder: *const vwd_decoder,
    args: *const vwd_decoder_attend_args,
    bytes: *mut u64,
) -> vwd_status {
    computing("vwd_decoder_attend_scratch", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of decoder, args and bytes.
        let (decoder, args, bytes) =
            unsafe { (handle(decoder, "decoder")?, versioned(args, "args", &mut buffer)?, out(bytes, "bytes")?) };
        bytes.write(decoder.0.attend_scratch(args)?);
        Ok(())
    })
}

/// Verifies drafted tokens as `vwd_verify` does, and keeps what was accepted of each sequence's drafts.
///
/// With a and n the numbers of accepted tokens and of trials (the accepted ones, and the rejected one if there is one), both
/// multiplied by 0.9 before each verification, acceptance is p = (a + 1.6) / (n + 2). Recommended is the γ of 0 … max_draft that
/// gives most tokens in the time, Σ_{j=0…γ} p^j / (1 + γ·draft_cost); ties go to fewer drafts. A row that drafted nothing forgets
/// slowly, so that drafting is tried again.
///
/// args->draft, target, draft_lens, accepted, next_token, committed  As in `vwd_verify`. Drafts may come from anywhere.
/// args->sequences  [B]  int32, optional (absent: row i is sequence i): the sequence of each row, distinct, below
///                       max_sequences; a row with −1 is verified and not counted.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may be
/// captured. Calls on one decoder are ordered by the caller. Tensors are borrowed until the stream passes this point; inputs are
/// not written.
/// Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED, DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_decoder_accept(
    decoder: *const vwd_decoder,
    args: *const vwd_decoder_accept_args,
    stream: vwd_stream,
) -> vwd_status {
    computing("vwd_decoder_accept", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of decoder and args.
        let (decoder, args) = unsafe { (handle(decoder, "decoder")?, versioned(args, "args", &mut buffer)?) };
        decoder.0.accept(args, stream)
    })
}

/// Forgets what is known of the drafts and scores of some sequences, and the sums of options->remainder, for numbers that new sequences get, forks
/// among them.
///
/// args->sequences  [n]  int32, optional (absent: all). Numbers outside 0 … max_sequences−1 are skipped.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may be
/// captured. Calls on one decoder are ordered by the caller. Tensors are borrowed until the stream passes this point.
/// Errors: INVALID_ARGUMENT (the message names the argument), DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_decoder_reset(
    decoder: *const vwd_decoder,
    args: *const vwd_decoder_reset_args,
    stream: vwd_stream,
) -> vwd_status {
    computing("vwd_decoder_reset", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of decoder and args.
        let (decoder, args) = unsafe { (handle(decoder, "decoder")?, versioned(args, "args", &mut buffer)?) };
        decoder.0.reset(args, stream)
    })
}
