//! Draft trees: their form, their verification, and the compaction of the rows that were accepted.

use super::boundary::{Handle, boundary, computing, handle, out, release, versioned};
use super::session::vwd_session;
use crate::abi::{
    vwd_compact_args, vwd_compactor_options, vwd_status, vwd_stream, vwd_tree_prepare_args, vwd_verify_tree_args,
};
use crate::ops::compact::{self, Compactor};
use crate::ops::{tree, verify_tree};
use crate::runtime::fork::Process;
use std::mem::MaybeUninit;

/// Makes of a draft tree what attention, positions and verification take.
///
/// A tree of sequence i has node_counts[i] nodes, of which node 0 is the root: a token that is committed already. Its other
/// nodes are drafts. A node's parent has a lower index than the node, and siblings ascend. A node whose link breaks these rules
/// is ignored with its descendants, and so are nodes at or past the count.
///
/// args->parents       [B, N]            int32, N from 1 to 1024. The parent of each node; the root's is not read. Absent where
///                                       first_child and next_sibling are given.
/// args->first_child   [B, N]            int32 or int64, in place of parents: the lowest child of each node; negative: none.
/// args->next_sibling  [B, N]            dtype of first_child: the next higher child of the node's parent; negative: none.
/// args->node_counts   [B]               int32, optional (absent: N). Clamped to 0 … N; 0 for a padding row.
/// args->bases         [B]               int32 or int64; given with positions and only then: the root's position.
/// args->tree_parents  [B, N]            int32, out, optional: the parent of each node; −1 for the root and for ignored nodes.
/// args->depths        [B, N]            int32, out, optional: 0 for the root; −1 for ignored nodes.
/// args->positions     [B, N]            dtype of bases, out, optional: the root's position plus the depth, of ignored nodes the
///                                       root's.
/// args->ranks         [B, N]            int32, out, optional: how many siblings of lower index a node has; −1 for ignored nodes.
/// args->mask          [B, N, ⌈N/32⌉]    uint32, out, optional: bit j mod 32 of word j / 32 of row i is set where node j is i or
///                                       an ancestor of i. An ignored node has its own bit alone.
/// args->status        [B]               uint32, out, optional: VWD_TREE_* bits.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
/// be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
/// this point; inputs are not written. At least one output is given.
/// Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED (CUDA: 2^31 sequences or more), DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_tree_prepare(
    session: *const vwd_session,
    args: *const vwd_tree_prepare_args,
    stream: vwd_stream,
) -> vwd_status {
    boundary("vwd_tree_prepare", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of session and args.
        let (session, args) = unsafe { (handle(session, "session")?, versioned(args, "args", &mut buffer)?) };
        tree::run(session, &tree::Request::from_c(session, args)?, stream)
    })
}

/// Verification of a draft tree: the path of nodes that the target agrees with, and the token that follows it.
///
/// The walk begins at the root. At a node v it goes on to the child of lowest index whose token is the target's token at v. Where
/// there is none, the walk ends and the target's token is the next one. A negative draft token never matches.
///
/// args->walk says what the target's token is. VWD_WALK_GREEDY takes target, or the likeliest token of logits. The other walks sample from
/// logits as `vwd_verify_sample` does: temperature, filters, seeds and random numbers are the same, and so is what a greedy request,
/// NaN or an infinite logit means. The row of a node decides the token at positions[i] + the node's depth. What is committed is
/// distributed as the target's tokens are, whatever was drafted:
/// - VWD_WALK_COUPLED draws what plain sampling with this seed draws at this position, so that the text does not depend on the drafts.
/// - VWD_WALK_INDEPENDENT tries the children of a node in turn. It takes them as drawn independently from the node's row of draft_rows, q.
///   Child c is accepted iff u·q(c) < r(c), where r is the target's distribution at first, and norm(max(r − q, 0)) after each refusal.
///   Where no child is accepted the next token is drawn from r, and the walk ends (Miao et al. 2024, SpecInfer).
/// - VWD_WALK_DISTINCT takes them as drawn without replacement, in ascending order: after a refusal q is norm(q without c), too
///   (Jeon et al. 2024, recursive speculative decoding).
///
/// Without draft_rows a child's q is 1 at its token, which is exact for children that were not drawn at random. The last two pass
/// over children whose token is outside 0 … V−1. For a tree that is a chain every walk commits, bit for bit, what `vwd_verify_sample` commits.
///
/// By every walk, a row of logits of a node whose depth is below min_remaining gives no stop token: it is taken without them, as
/// `vwd_verify_sample` takes its rows. Rows of draft_rows keep them: children were drawn without regard to min_remaining.
///
/// args->tokens       [B, N]     int32 or int64, N from 1 to 1024. The token of each node; the root's is not read.
/// args->parents      [B, N]     int32, as in `vwd_tree_prepare`, which makes them of other forms.
/// args->node_counts  [B]        int32, optional (absent: N). Clamped to 0 … N. A padding row, of count 0, gives accepted 0,
///                               next_token −1, and −1 in path and committed.
/// args->target       [B, N]     dtype of tokens: the target's token after each node. Given, or else logits; for VWD_WALK_GREEDY alone. The
///                               caller keeps what min_remaining forbids out of it.
/// args->logits       [B, N, V]  float32, float16 or bfloat16, V up to 2^31 − 1, and to 2^20 for walks that sample. Greedily the target's
///                               token is the largest, of equal ones the lowest; NaN counts as −∞. On CUDA the call takes scratch: greedily
///                               8 bytes for each node and up to 32 parts of its row; else 32 bytes for each 4096 tokens of each row, up
///                               to 12 MB where those of one sequence are no more. `vwd_verify_tree_scratch` tells how much.
/// args->accepted     [B]        int32, out: the number of nodes on the path, without the root.
/// args->path         [B, M]     int32, out, M at least 1: the nodes of the path, root first, then −1. The hidden state of
///                               path[accepted] is the one that next_token follows. At most M − 1 nodes are accepted.
/// args->next_token   [B]        dtype of tokens, out: the target's token at the end of the path.
/// args->committed    [B, M]     dtype of tokens, out, optional: the tokens of the path without the root's, the next token, then
///                               −1.
/// args->status       [B]        uint32, out, optional: VWD_TREE_* bits, and of the rows of logits on the path VWD_SAMPLE_NAN and, where the walk
///                               samples, VWD_SAMPLE_NO_RESIDUAL; of the whole path, before any of it is cut off.
/// args->stop, ignore_stop, remaining, min_remaining, committed_len, finish
///                               Optional, as in `vwd_verify`: what is committed is cut after the first stop token and at remaining
///                               tokens. Nodes whose tokens are cut off leave accepted and path; where the next token is cut
///                               off it is −1. With nothing remaining path is −1 throughout.
/// args->walk                    A VWD_WALK_* value; 0 is VWD_WALK_GREEDY.
/// args->draft_rows   [B, N, Vd] float32, float16 or bfloat16, optional; Vd ≤ 2^20, and Vd ≤ V without draft_map. Row v is what the
///                               children of node v were drawn from, logits or probabilities as in `vwd_verify_sample`; rows of
///                               nodes without children are not read. Only VWD_WALK_INDEPENDENT and VWD_WALK_DISTINCT read it.
/// args->draft_map    [Vd]       int32, ascending, optional: the target's token for each column of draft_rows; absent: the same number.
///                               Not read without draft_rows; tokens are those of the target in any case.
/// args->temperature  [B]        float32, optional (absent: 1). This and what follows is as in `vwd_verify_sample`, and not read by
///                               VWD_WALK_GREEDY.
/// args->top_k        [B]        int32, optional. 0 or below, and V or above: off.
/// args->top_p        [B]        float32, optional. 1 or above, or NaN: off; 0 or below keeps the likeliest.
/// args->min_p        [B]        float32, optional. 0 or below, or NaN: off; 1 or above keeps the likeliest.
/// args->seeds        [B]        uint64 or int64.
/// args->positions    [B]        int32 or int64: the position of the token that follows the root.
///
/// Enqueues on stream and returns; on a CPU session the result is there on return. Does not synchronise, nor allocate once
/// its scratch is there; may be captured: seeds, positions and all else are read when the graph runs. Thread-safe; calls on one stream are
/// ordered by the caller. Tensors are borrowed until the stream passes this point; inputs are not written.
/// Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_MEMORY, OUT_OF_SCRATCH (CUDA), UNSUPPORTED (CUDA: 2^31 nodes or
/// more, 2^24 rows of logits and drafts or more where the walk samples), DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_verify_tree(
    session: *const vwd_session,
    args: *const vwd_verify_tree_args,
    stream: vwd_stream,
) -> vwd_status {
    computing("vwd_verify_tree", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of session and args.
        let (session, args) = unsafe { (handle(session, "session")?, versioned(args, "args", &mut buffer)?) };
        verify_tree::run(session, &verify_tree::Request::from_c(session, args)?, stream)
    })
}

/// Tells how many bytes of scratch `vwd_verify_tree` with these arguments needs in its stream's arena: 0 on a CPU session, and where target is
/// given.
///
/// Call it for `vwd_session_reserve`, before a graph is captured. The number follows from shapes, dtypes and scalars, never from the
/// contents of tensors, which need not be written yet. The arguments are checked as in the call.
///
/// bytes  Out.
///
/// Enqueues nothing. Thread-safe. Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_verify_tree_scratch(
    session: *const vwd_session,
    args: *const vwd_verify_tree_args,
    bytes: *mut u64,
) -> vwd_status {
    computing("vwd_verify_tree_scratch", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of session, args and bytes.
        let (session, args, bytes) =
            unsafe { (handle(session, "session")?, versioned(args, "args", &mut buffer)?, out(bytes, "bytes")?) };
        bytes.write(verify_tree::scratch(session, &verify_tree::Request::from_c(session, args)?)?);
        Ok(())
    })
}

/// A compactor: the paged caches of all layers, whose rows `vwd_compact` moves. Opaque.
pub struct vwd_compactor(Compactor, Process);

impl Handle for vwd_compactor {
    #[inline]
    fn maker(&self) -> Process {
        self.1
    }
}

/// Creates a compactor over a set of caches.
///
/// session    Kept alive by the compactor; may be released first.
/// options    Required. The descriptions of the caches are copied; their memory is the caller's, and stays where it is as long as
///            calls, or graphs that hold them, move rows in it. Caches do not overlap; views that interleave, such as keys and
///            values of one buffer, are apart.
/// compactor  Out. Release with `vwd_compactor_release`.
///
/// Blocks and allocates; not for capture. Thread-safe.
/// Errors: INVALID_ARGUMENT (the message names the option), UNSUPPORTED (CUDA: 2^31 units of a row or more, a unit being the
/// 1 to 16 bytes that are copied at once), OUT_OF_MEMORY, DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_compactor_create(
    session: *const vwd_session,
    options: *const vwd_compactor_options,
    compactor: *mut *mut vwd_compactor,
) -> vwd_status {
    boundary("vwd_compactor_create", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of the arguments, the array of caches among them.
        let (session, created, compactor) = unsafe {
            let (session, options) = (handle(session, "session")?, versioned(options, "options", &mut buffer)?);
            let compactor = out(compactor, "compactor")?;
            (session, Compactor::create(&session.0, options)?, compactor)
        };
        compactor.write(Box::into_raw(Box::new(vwd_compactor(created, session.maker()))));
        Ok(())
    })
}

/// Releases a compactor; NULL is a no-op. No call on it may be in progress; on a CUDA session streams have passed its calls,
/// and no graph that holds one runs again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_compactor_release(compactor: *mut vwd_compactor) {
    // SAFETY: the C contract of compactor.
    unsafe { release(compactor) }
}

/// Moves the rows of accepted tree nodes to where a sequence's tokens follow each other, in place and in all caches at once.
///
/// Node n of a tree was written at token position bases[i] + n of sequence i. The row of path[i, j] moves to position
/// bases[i] + j, for j from 0 on as long as path ascends and, where accepted is given, up to accepted[i]. Rows with
/// path[i, j] = j stay. A row is neither read nor written where the page table names no page for one of the two positions. All
/// other rows stay as they are.
///
/// args->page_table  [B, max_pages]  int32, optional. Page p of sequence i is page_table[i, p]. Absent: sequence i has page i and
///                                   no other.
/// args->bases       [B]             int32 or int64: the token position of each root. A sequence with a negative one moves nothing.
/// args->path        [B, M]          int32: nodes, ascending from 0 or above. A negative number, or one that does not ascend,
///                                   ends it.
/// args->accepted    [B]             int32, optional (absent: path says itself where it ends).
///
/// Rows from bases[i] on belong to sequence i alone: pages that sequences share lie before it. Summaries of moved tokens are
/// made anew by `vwd_index_update` from bases[i] on.
///
/// Enqueues on stream and returns; on a CPU session the rows are there on return. Does not allocate or synchronise; may be
/// captured. Thread-safe; calls that move the same rows are ordered by the caller. Tensors are borrowed until the stream passes
/// this point; the arguments are not written.
/// Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED (CUDA: 2^31 CTAs or more), DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_compact(
    compactor: *const vwd_compactor,
    args: *const vwd_compact_args,
    stream: vwd_stream,
) -> vwd_status {
    boundary("vwd_compact", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of the arguments.
        let (compactor, args) = unsafe { (handle(compactor, "compactor")?, versioned(args, "args", &mut buffer)?) };
        compactor.0.run(&compact::Request::from_c(&compactor.0, args)?, stream)
    })
}
