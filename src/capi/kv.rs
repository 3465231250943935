//! Tiered KV cache: all KV in host memory, what is being read in slots on the device.

use super::boundary::{Handle, boundary, computing, handle, out, release, versioned, write_versioned};
use super::session::vwd_session;
use crate::abi::{
    vwd_kv_cache_append_args, vwd_kv_cache_compact_args, vwd_kv_cache_layer, vwd_kv_cache_options,
    vwd_kv_cache_resolve_args, vwd_kv_cache_share_args, vwd_kv_cache_sizes, vwd_kv_cache_stats, vwd_status, vwd_stream,
};
use crate::kv::{self, AppendRequest, CompactRequest, KvCache, ResolveRequest};
use crate::runtime::fork::Process;
use std::mem::MaybeUninit;
use std::sync::Arc;

/// A tiered KV cache of all layers of a model. Opaque.
///
/// The newest one or two blocks of each sequence lie in reserved slots, the sequence's tail, where tokens are appended. A block
/// that is full is written back to host memory. When it leaves the tail it is copied to other slots; once it has lost these, resolve
/// and fetch bring it back when a list names it. Forks share whole blocks, which never change.
///
/// With VWD_CODING_INT4 a full block is coded on its way to host memory, and lists name its codes once it has left the tail; with
/// VWD_SLOTS_DECODED they name what the codes stand for, rounded to the dtype. The first block of a sequence is not coded: it has a slot of
/// its own for each KV head, where it is always resident, and each fork has a copy.
pub struct vwd_kv_cache(pub(super) Arc<KvCache>, Process);

impl Handle for vwd_kv_cache {
    #[inline]
    fn maker(&self) -> Process {
        self.1
    }
}

/// Fills `sizes`, whose struct_size the caller has set, with the memory that a cache of these options takes. Allocates none of it.
///
/// Thread-safe.
/// Errors: INVALID_ARGUMENT (the message names the option).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_kv_cache_capacity(
    options: *const vwd_kv_cache_options,
    sizes: *mut vwd_kv_cache_sizes,
) -> vwd_status {
    boundary("vwd_kv_cache_capacity", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of the arguments.
        unsafe { write_versioned(sizes, &kv::capacity(versioned(options, "options", &mut buffer)?)?, "sizes") }
    })
}

/// Shares slots out to layers by the misses that each has had: the layers in which a slot saves more misses get more of them.
///
/// args->layers           Layers, at least 1.
/// args->least            Fewest slots of a layer, at least 1: hold times the largest selection that a resolve will name.
/// args->total            Slots to share out to all layers together: least · layers … 2^32 − 1.
/// args->slots   [layers] Host memory. Slots that each layer had while its misses were counted, at least 1 each.
/// args->misses  [layers] Host memory. Misses of each layer, as `vwd_kv_cache_layer_info` counts them, over the same steps.
/// args->shares  [layers] Host memory, out: slots of each layer, `total` together; layer_slots of `vwd_kv_cache_options`. It may be
///                        `slots`.
///
/// The method is water-filling by marginal misses. Misses of a layer are taken to fall as 1 / slots: m(s) = (m + 1) · slots / s, so one
/// more of s slots saves (m + 1) · slots / s². The sum of misses is least where one more slot saves equally many in each layer that has
/// more than `least`: s ∝ √((m + 1) · slots). Numbers are rounded down, and what is left goes where one more slot saves most, to the lower
/// layer if equal. As the curve is known at one point only, a layer counts at half of its part of `slots` at least. A cache with
/// the new shares has new counters: sharing by them again may come closer, and changes nothing once all layers have equal misses per slot.
///
/// Reads and writes host memory during the call. Thread-safe.
/// Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_MEMORY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_kv_cache_share_slots(args: *const vwd_kv_cache_share_args) -> vwd_status {
    computing("vwd_kv_cache_share_slots", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of args, its arrays among it.
        unsafe { kv::share_slots(versioned(args, "args", &mut buffer)?) }
    })
}

/// Creates a cache without sequences.
///
/// session  Kept alive by the cache; may be released first. Its pinned_limit counts host_bytes.
/// options  Required.
/// cache    Out. Release with `vwd_kv_cache_release`.
///
/// Blocks and allocates; not for capture. Thread-safe.
/// Errors: INVALID_ARGUMENT (the message names the option), UNSUPPORTED (CUDA: runs of 2^32 bytes, more than 2^30 slots),
/// OUT_OF_MEMORY, DRIVER, INTERNAL. After an error no memory stays allocated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_kv_cache_create(
    session: *const vwd_session,
    options: *const vwd_kv_cache_options,
    cache: *mut *mut vwd_kv_cache,
) -> vwd_status {
    computing("vwd_kv_cache_create", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of the arguments, those that options points to among them.
        unsafe {
            let (session, options) = (handle(session, "session")?, versioned(options, "options", &mut buffer)?);
            let cache = out(cache, "cache")?;
            let created = KvCache::create(&session.0, options)?;
            cache.write(Box::into_raw(Box::new(vwd_kv_cache(Arc::new(created), session.maker()))));
        }
        Ok(())
    })
}

/// Releases a cache and all its sequences; NULL is a no-op. No call on the cache may be in progress, and streams have passed
/// its last call; the release waits for the cache's own copies.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_kv_cache_release(cache: *mut vwd_kv_cache) {
    // SAFETY: the C contract of cache.
    unsafe { release(cache) }
}

/// Begins a sequence without tokens.
///
/// sequence  Out: its number, below max_sequences. Free with `vwd_kv_cache_free`.
///
/// Thread-safe. The caller orders calls on one cache that concern the same layer, and orders them on the device by one stream
/// or by events; the calls that change sequences concern every layer. Enqueues the update of the device's tables; not for
/// capture.
/// Errors: INVALID_ARGUMENT, OUT_OF_MEMORY (max_sequences are in use), DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_kv_cache_add(
    cache: *const vwd_kv_cache,
    sequence: *mut u32,
    stream: vwd_stream,
) -> vwd_status {
    boundary("vwd_kv_cache_add", || {
        // SAFETY: the C contract of the arguments.
        let (cache, sequence) = unsafe { (handle(cache, "cache")?, out(sequence, "sequence")?) };
        sequence.write(cache.0.add(stream)?);
        Ok(())
    })
}

/// Reserves blocks for `tokens` tokens of the sequence in all. If the sequence already has room for more, nothing changes.
///
/// Order, threads and capture as for `vwd_kv_cache_add`. Errors: INVALID_ARGUMENT (no such sequence; more than max_blocks),
/// OUT_OF_MEMORY (host_blocks are in use: every sequence stays as it is), DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_kv_cache_extend(
    cache: *const vwd_kv_cache,
    sequence: u32,
    tokens: u64,
    stream: vwd_stream,
) -> vwd_status {
    boundary("vwd_kv_cache_extend", || {
        // SAFETY: the C contract of cache.
        unsafe { handle(cache, "cache")? }.0.extend(sequence, tokens, stream)
    })
}

/// Begins a sequence with the first tokens of another sequence. Whole blocks are shared; the tokens of a last, partial block
/// are copied. With VWD_CODING_INT4 whole blocks are read as codes from then on, but the first, which is copied; tokens of a partial block
/// that is coded become what their codes stand for.
///
/// sequence  The parent, which stays as it is.
/// tokens    At most as many as were appended in every layer; the keys and values of further tokens would be undefined.
/// fork      Out: the new sequence's number.
///
/// Order, threads and capture as for `vwd_kv_cache_add`. Errors: INVALID_ARGUMENT (no such sequence; more tokens than it has
/// room for), OUT_OF_MEMORY (max_sequences or host_blocks are in use), DRIVER, INTERNAL. After an error every sequence is as it
/// was.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_kv_cache_fork(
    cache: *const vwd_kv_cache,
    sequence: u32,
    tokens: u64,
    fork: *mut u32,
    stream: vwd_stream,
) -> vwd_status {
    computing("vwd_kv_cache_fork", || {
        // SAFETY: the C contract of the arguments.
        let (cache, fork) = unsafe { (handle(cache, "cache")?, out(fork, "fork")?) };
        fork.write(cache.0.fork(sequence, tokens, stream)?);
        Ok(())
    })
}

/// Truncates a sequence to its first tokens, and frees the blocks after them. Rejected draft tokens need no call: the next
/// append overwrites them. Sequences that share blocks with it, such as its forks, stay as they are. With VWD_CODING_INT4 a cut in a block
/// that is coded leaves tokens that are what their codes stand for.
///
/// Order, threads and capture as for `vwd_kv_cache_add`. Errors: INVALID_ARGUMENT (no such sequence; more tokens than it has
/// room for), OUT_OF_MEMORY (the last block is shared, and no block is free to copy it to), DRIVER, INTERNAL. After an error
/// the sequence is as it was.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_kv_cache_truncate(
    cache: *const vwd_kv_cache,
    sequence: u32,
    tokens: u64,
    stream: vwd_stream,
) -> vwd_status {
    computing("vwd_kv_cache_truncate", || {
        // SAFETY: the C contract of cache.
        unsafe { handle(cache, "cache")? }.0.truncate(sequence, tokens, stream)
    })
}

/// Ends a sequence. Copies of its blocks that are under way do no harm. A later sequence may get its number.
///
/// Order, threads and capture as for `vwd_kv_cache_add`. Errors: INVALID_ARGUMENT (no such sequence), DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_kv_cache_free(
    cache: *const vwd_kv_cache,
    sequence: u32,
    stream: vwd_stream,
) -> vwd_status {
    boundary("vwd_kv_cache_free", || {
        // SAFETY: the C contract of cache.
        unsafe { handle(cache, "cache")? }.0.free(sequence, stream)
    })
}

/// Writes the keys and values of new tokens of one layer: token t of row i becomes token begin[i] + t of its sequence. A block
/// that gets its last token is written back to host memory.
///
/// args->layer                     0 … layers−1.
/// args->sequences  [B]            int32. At most max_sequences, distinct but for −1, an idle row.
/// args->begin      [B]            int32. The number of tokens that the sequence has, or fewer after drafts were rejected; not
///                                 below the beginning of its last two blocks, nor below the token where it was last forked
///                                 or truncated.
/// args->lens       [B]            int32, optional (absent: T). Clamped to 0 … T.
/// args->k          [B, T, Hk, D]  The cache's dtype.
/// args->v          [B, T, Hk, Dv] The cache's dtype.
/// args->k_scale    [B, T, Hk]     float32. Given with token_scales and only then.
/// args->v_scale    [B, T, Hk]     float32. Given with token_scales and only then.
///
/// Afterwards the layer has begin[i] + lens[i] tokens of the sequence; a row of 0 tokens changes nothing, wherever it begins. A token
/// has no place, and is dropped and counted, if no sequence has that number, as of an idle row, if `vwd_kv_cache_extend` has reserved no
/// block for it, or if tokens before it are missing: if the layer has fewer than begin[i] tokens. Lists that were resolved before stay
/// valid for up to S more tokens of a sequence. T may be any number; a prefill appends chunks of many blocks.
///
/// The block that leaves the tail is copied, on the device, to a slot for each KV head, where later resolves find it resident. It takes a
/// slot that none of the last `hold` resolves of the layer named and that waits for no copy. If it finds none, the block is
/// missed when it is next named. The next resolve may give the slot away, as if the block had been named `hold` resolves ago. Of an
/// append of several blocks, only the last one that leaves the tail gets slots. Blocks that leave the tail because of a fork or a truncation
/// get none.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may be
/// captured. Calls of one layer are ordered by the caller. Tensors are borrowed until the stream passes this point.
/// Errors: INVALID_ARGUMENT (the message names the argument), DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_kv_cache_append(
    cache: *const vwd_kv_cache,
    args: *const vwd_kv_cache_append_args,
    stream: vwd_stream,
) -> vwd_status {
    computing("vwd_kv_cache_append", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of cache and args.
        let (cache, args) = unsafe { (handle(cache, "cache")?, versioned(args, "args", &mut buffer)?) };
        cache.0.append(&AppendRequest::from_c(&cache.0, args)?, stream)
    })
}

/// Moves the tokens of accepted tree nodes to where a sequence's tokens follow each other, in all layers at once, and ends the sequence there.
///
/// Node n of a tree was appended as token bases[i] + n of its sequence. The token of path[i, j] moves to bases[i] + j, for j from 0 on as long
/// as path ascends and, where accepted is given, up to accepted[i]; what it finds is as `vwd_verify_tree` gives it. With m nodes on the path each
/// layer has bases[i] + m tokens of the sequence afterwards. With none, because path[i, 0] or accepted[i] is negative, nothing changes.
///
/// args->sequences  [B]     int32. At most max_sequences, distinct but for −1, an idle row.
/// args->bases      [B]     int32 or int64: the position of each root. It lies where the next append might begin: in one of the last two
///                          blocks, and not below the token where the sequence was last forked or truncated. A row with another one changes
///                          nothing. A path ends before a node that the layer does not have.
/// args->path       [B, M]  int32: nodes, ascending from 0 or above. A negative number, or one that does not ascend, ends it.
/// args->accepted   [B]     int32, optional (absent: path says itself where it ends).
///
/// A block that has all its tokens then, and had others when it was full, is written back to host memory again, with VWD_CODING_INT4 coded anew. That
/// is done on the stream. Summaries of moved tokens are made anew by `vwd_index_update` from bases[i] on. Where nothing was accepted but the root,
/// or the nodes of the path follow each other from the root on, no byte is moved.
///
/// Enqueues on stream and returns; on a CPU session the tokens are there on return. Does not allocate or synchronise; may be captured. Calls of
/// all layers are ordered with it by the caller. Tensors are borrowed until the stream passes this point; the arguments are not written.
/// Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED (CUDA: 2^31 rows of layers and KV heads or more), DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_kv_cache_compact(
    cache: *const vwd_kv_cache,
    args: *const vwd_kv_cache_compact_args,
    stream: vwd_stream,
) -> vwd_status {
    computing("vwd_kv_cache_compact", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of cache and args.
        let (cache, args) = unsafe { (handle(cache, "cache")?, versioned(args, "args", &mut buffer)?) };
        cache.0.compact(&CompactRequest::from_c(&cache.0, args)?, stream)
    })
}

/// Gives each wanted block a slot. Blocks that are resident can be read at once; for the missed blocks the call asks for copies,
/// which `vwd_kv_cache_fetch` makes. A block that several sequences share has one slot and one copy.
///
/// args->layer                         0 … layers−1.
/// args->sequences        [B]          int32. At most max_sequences of them.
/// args->wanted.ids       [B, Hk, cap] or [B, Q, Hk, cap]  int32. Blocks of the sequence, as selected. All entries together are
///                                     at most slots / hold, of the layer's slots: all elements of ids, whatever the counts and
///                                     wherever the blocks lie. Less beside a decoder: `vwd_decoder_create_on_cache`.
/// args->wanted.counts    [B, Hk] or [B, Q, Hk]  int32. Clamped to 0 … cap.
/// args->wanted.slots     Shape of ids; out. The slot in which each block lies once its copy has arrived, −1 for a block that
///                        the sequence does not have. Columns past the count are not written.
/// args->resident         Out, optional (all three or none): the entries of wanted whose blocks are resident, in the same order.
///                        Shapes of wanted.
/// args->missed_counts    Shape of counts; out, optional: number of entries whose blocks are not resident yet.
///
/// A block that one of the last `hold` resolves of a layer named keeps its slot; the slot of a block that has not been named for
/// long is given away first. Attention and repair take these lists with the layer's views: attention reads `resident` at once,
/// repair adds the missed blocks after `vwd_kv_cache_wait`. A prefetch is a resolve of a predicted list and a fetch; a wrong
/// prediction costs bandwidth.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may be
/// captured. Calls of one layer are ordered by the caller. Tensors are borrowed until the stream passes this point.
/// Errors: INVALID_ARGUMENT (the message names the argument), DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_kv_cache_resolve(
    cache: *const vwd_kv_cache,
    args: *const vwd_kv_cache_resolve_args,
    stream: vwd_stream,
) -> vwd_status {
    boundary("vwd_kv_cache_resolve", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of cache and args.
        let (cache, args) = unsafe { (handle(cache, "cache")?, versioned(args, "args", &mut buffer)?) };
        cache.0.resolve(&ResolveRequest::from_c(&cache.0, args)?, stream)
    })
}

/// Makes the copies that resolves of the layer have asked for. They run on a side stream, after the work that the stream holds
/// now. A copy whose slot has since been given to another block has no effect.
///
/// layer  0 … layers−1.
///
/// Returns at once; on a CPU session the blocks are there on return. Does not allocate or synchronise; may be captured. Calls of
/// one layer are ordered by the caller.
/// Errors: INVALID_ARGUMENT, DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_kv_cache_fetch(cache: *const vwd_kv_cache, layer: u32, stream: vwd_stream) -> vwd_status {
    computing("vwd_kv_cache_fetch", || {
        // SAFETY: the C contract of cache.
        unsafe { handle(cache, "cache")? }.0.fetch(layer, stream)
    })
}

/// Makes the stream wait for the layer's copies. Copies that no fetch has begun begin now.
///
/// layer  0 … layers−1.
///
/// Returns at once: the device waits. On a CPU session the blocks are there on return. May be captured; the stream that launches
/// the graph must itself wait for copies that began outside the graph. Calls of one layer are ordered by the caller.
/// Errors: INVALID_ARGUMENT, DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_kv_cache_wait(cache: *const vwd_kv_cache, layer: u32, stream: vwd_stream) -> vwd_status {
    computing("vwd_kv_cache_wait", || {
        // SAFETY: the C contract of cache.
        unsafe { handle(cache, "cache")? }.0.wait(layer, stream)
    })
}

/// Fills `view`, whose struct_size the caller has set, with views of the slots of a layer, 0 … layers−1. Enqueues nothing. Thread-safe.
/// Errors: INVALID_ARGUMENT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_kv_cache_view(
    cache: *const vwd_kv_cache,
    layer: u32,
    view: *mut vwd_kv_cache_layer,
) -> vwd_status {
    boundary("vwd_kv_cache_view", || {
        // SAFETY: the C contract of the arguments.
        unsafe { write_versioned(view, &handle(cache, "cache")?.0.view(layer)?, "view") }
    })
}

/// Fills `stats`, whose struct_size the caller has set, with the cache's counters. Waits for no work: on a CUDA session it
/// copies the numbers that the device has counted so far. Thread-safe.
/// Errors: INVALID_ARGUMENT, OUT_OF_MEMORY, DRIVER.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_kv_cache_info(cache: *const vwd_kv_cache, stats: *mut vwd_kv_cache_stats) -> vwd_status {
    boundary("vwd_kv_cache_info", || {
        // SAFETY: the C contract of the arguments.
        unsafe { write_versioned(stats, &handle(cache, "cache")?.0.stats(None)?, "stats") }
    })
}

/// `vwd_kv_cache_info` of one layer: its counters, and the bytes of its runs in host memory and of its slots and their bookkeeping on the
/// device. Sequences and blocks are those of the cache.
///
/// Waits for no work. Thread-safe. Errors: INVALID_ARGUMENT, OUT_OF_MEMORY, DRIVER.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_kv_cache_layer_info(
    cache: *const vwd_kv_cache,
    layer: u32,
    stats: *mut vwd_kv_cache_stats,
) -> vwd_status {
    boundary("vwd_kv_cache_layer_info", || {
        // SAFETY: the C contract of the arguments.
        unsafe { write_versioned(stats, &handle(cache, "cache")?.0.stats(Some(layer))?, "stats") }
    })
}
