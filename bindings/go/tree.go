package vanward

// #include "calls.h"
// #cgo noescape tree_prepare
// #cgo nocallback tree_prepare
// #cgo noescape verify_tree
// #cgo nocallback verify_tree
// #cgo noescape verify_tree_scratch
// #cgo nocallback verify_tree_scratch
// #cgo noescape compact
// #cgo nocallback compact
import "C"

// TreeStatus are the bits of the status words of draft trees.
type TreeStatus = uint32

const (
	TreeBrokenLink TreeStatus = C.VWD_TREE_BROKEN_LINK // a link named no node that it may name; its nodes are ignored
	TreeClamped    TreeStatus = C.VWD_TREE_CLAMPED     // a count exceeded the nodes that there are
	TreeNoToken    TreeStatus = C.VWD_TREE_NO_TOKEN    // a node has no logit above −∞
)

// TreePrepareArgs are the arguments of Session.TreePrepare; vwd_tree_prepare documents them.
//
//	Makes of a draft tree what attention, positions and verification take.
//
//	A tree of sequence i has node_counts[i] nodes, of which node 0 is the root: a token that is committed already. Its other
//	nodes are drafts. A node's parent has a lower index than the node, and siblings ascend. A node whose link breaks these rules
//	is ignored with its descendants, and so are nodes at or past the count.
//
//	parents       [B, N]            int32, N from 1 to 1024. The parent of each node; the root's is not read. Absent where
//	                                first_child and next_sibling are given.
//	first_child   [B, N]            int32 or int64, in place of parents: the lowest child of each node; negative: none.
//	next_sibling  [B, N]            dtype of first_child: the next higher child of the node's parent; negative: none.
//	node_counts   [B]               int32, optional (absent: N). Clamped to 0 … N; 0 for a padding row.
//	bases         [B]               int32 or int64; given with positions and only then: the root's position.
//	tree_parents  [B, N]            int32, out, optional: the parent of each node; −1 for the root and for ignored nodes.
//	depths        [B, N]            int32, out, optional: 0 for the root; −1 for ignored nodes.
//	positions     [B, N]            dtype of bases, out, optional: the root's position plus the depth, of ignored nodes the
//	                                root's.
//	ranks         [B, N]            int32, out, optional: how many siblings of lower index a node has; −1 for ignored nodes.
//	mask          [B, N, ⌈N/32⌉]    uint32, out, optional: bit j mod 32 of word j / 32 of row i is set where node j is i or
//	                                an ancestor of i. An ignored node has its own bit alone.
//	status        [B]               uint32, out, optional: VWD_TREE_* bits.
//
//	Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
//	be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
//	this point; inputs are not written. At least one output is given.
//	Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED (CUDA: 2^31 sequences or more), DRIVER, INTERNAL.
type TreePrepareArgs struct {
	Parents     Tensor
	FirstChild  Tensor
	NextSibling Tensor
	NodeCounts  Tensor
	Bases       Tensor
	TreeParents Tensor
	Depths      Tensor
	Positions   Tensor
	Ranks       Tensor
	Mask        Tensor
	Status      Tensor
}

// TreePrepare makes of a draft tree what attention, positions and verification take.
func (s *Session) TreePrepare(args TreePrepareArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.tree_prepare(h, &c, stream.c()) })
}

func (args TreePrepareArgs) lower(l *lowering) C.vwd_tree_prepare_args {
	return C.vwd_tree_prepare_args{
		struct_size:  C.sizeof_vwd_tree_prepare_args,
		parents:      l.tensor("parents", args.Parents),
		first_child:  l.tensor("first_child", args.FirstChild),
		next_sibling: l.tensor("next_sibling", args.NextSibling),
		node_counts:  l.tensor("node_counts", args.NodeCounts),
		bases:        l.tensor("bases", args.Bases),
		tree_parents: l.tensor("tree_parents", args.TreeParents),
		depths:       l.tensor("depths", args.Depths),
		positions:    l.tensor("positions", args.Positions),
		ranks:        l.tensor("ranks", args.Ranks),
		mask:         l.tensor("mask", args.Mask),
		status:       l.tensor("status", args.Status),
	}
}

// Walk says how VerifyTree finds the next node.
type Walk uint32

const (
	// WalkGreedy follows the target's most likely tokens.
	WalkGreedy Walk = C.VWD_WALK_GREEDY
	// WalkCoupled follows the tokens that plain sampling draws.
	WalkCoupled Walk = C.VWD_WALK_COUPLED
	// WalkIndependent is rejection sampling of siblings that were drawn independently.
	WalkIndependent Walk = C.VWD_WALK_INDEPENDENT
	// WalkDistinct is rejection sampling of siblings that were drawn without replacement.
	WalkDistinct Walk = C.VWD_WALK_DISTINCT
)

// VerifyTreeArgs are the arguments of Session.VerifyTree; vwd_verify_tree documents them.
//
//	Verification of a draft tree: the path of nodes that the target agrees with, and the token that follows it.
//
//	The walk begins at the root. At a node v it goes on to the child of lowest index whose token is the target's token at v. Where
//	there is none, the walk ends and the target's token is the next one. A negative draft token never matches.
//
//	walk says what the target's token is. VWD_WALK_GREEDY takes target, or the likeliest token of logits. The other walks sample from
//	logits as `vwd_verify_sample` does: temperature, filters, seeds and random numbers are the same, and so is what a greedy request,
//	NaN or an infinite logit means. The row of a node decides the token at positions[i] + the node's depth. What is committed is
//	distributed as the target's tokens are, whatever was drafted:
//	- VWD_WALK_COUPLED draws what plain sampling with this seed draws at this position, so that the text does not depend on the drafts.
//	- VWD_WALK_INDEPENDENT tries the children of a node in turn. It takes them as drawn independently from the node's row of draft_rows, q.
//	  Child c is accepted iff u·q(c) < r(c), where r is the target's distribution at first, and norm(max(r − q, 0)) after each refusal.
//	  Where no child is accepted the next token is drawn from r, and the walk ends (Miao et al. 2024, SpecInfer).
//	- VWD_WALK_DISTINCT takes them as drawn without replacement, in ascending order: after a refusal q is norm(q without c), too
//	  (Jeon et al. 2024, recursive speculative decoding).
//
//	Without draft_rows a child's q is 1 at its token, which is exact for children that were not drawn at random. The last two pass
//	over children whose token is outside 0 … V−1. For a tree that is a chain every walk commits, bit for bit, what `vwd_verify_sample` commits.
//
//	By every walk, a row of logits of a node whose depth is below min_remaining gives no stop token: it is taken without them, as
//	`vwd_verify_sample` takes its rows. Rows of draft_rows keep them: children were drawn without regard to min_remaining.
//
//	tokens       [B, N]     int32 or int64, N from 1 to 1024. The token of each node; the root's is not read.
//	parents      [B, N]     int32, as in `vwd_tree_prepare`, which makes them of other forms.
//	node_counts  [B]        int32, optional (absent: N). Clamped to 0 … N. A padding row, of count 0, gives accepted 0,
//	                        next_token −1, and −1 in path and committed.
//	target       [B, N]     dtype of tokens: the target's token after each node. Given, or else logits; for VWD_WALK_GREEDY alone. The
//	                        caller keeps what min_remaining forbids out of it.
//	logits       [B, N, V]  float32, float16 or bfloat16, V up to 2^31 − 1, and to 2^20 for walks that sample. Greedily the target's
//	                        token is the largest, of equal ones the lowest; NaN counts as −∞. On CUDA the call takes scratch: greedily
//	                        8 bytes for each node and up to 32 parts of its row; else 32 bytes for each 4096 tokens of each row, up
//	                        to 12 MB where those of one sequence are no more. `vwd_verify_tree_scratch` tells how much.
//	accepted     [B]        int32, out: the number of nodes on the path, without the root.
//	path         [B, M]     int32, out, M at least 1: the nodes of the path, root first, then −1. The hidden state of
//	                        path[accepted] is the one that next_token follows. At most M − 1 nodes are accepted.
//	next_token   [B]        dtype of tokens, out: the target's token at the end of the path.
//	committed    [B, M]     dtype of tokens, out, optional: the tokens of the path without the root's, the next token, then
//	                        −1.
//	status       [B]        uint32, out, optional: VWD_TREE_* bits, and of the rows of logits on the path VWD_SAMPLE_NAN and, where the walk
//	                        samples, VWD_SAMPLE_NO_RESIDUAL; of the whole path, before any of it is cut off.
//	stop, ignore_stop, remaining, min_remaining, committed_len, finish
//	                        Optional, as in `vwd_verify`: what is committed is cut after the first stop token and at remaining
//	                        tokens. Nodes whose tokens are cut off leave accepted and path; where the next token is cut
//	                        off it is −1. With nothing remaining path is −1 throughout.
//	walk                    A VWD_WALK_* value; 0 is VWD_WALK_GREEDY.
//	draft_rows   [B, N, Vd] float32, float16 or bfloat16, optional; Vd ≤ 2^20, and Vd ≤ V without draft_map. Row v is what the
//	                        children of node v were drawn from, logits or probabilities as in `vwd_verify_sample`; rows of
//	                        nodes without children are not read. Only VWD_WALK_INDEPENDENT and VWD_WALK_DISTINCT read it.
//	draft_map    [Vd]       int32, ascending, optional: the target's token for each column of draft_rows; absent: the same number.
//	                        Not read without draft_rows; tokens are those of the target in any case.
//	temperature  [B]        float32, optional (absent: 1). This and what follows is as in `vwd_verify_sample`, and not read by
//	                        VWD_WALK_GREEDY.
//	top_k        [B]        int32, optional. 0 or below, and V or above: off.
//	top_p        [B]        float32, optional. 1 or above, or NaN: off; 0 or below keeps the likeliest.
//	min_p        [B]        float32, optional. 0 or below, or NaN: off; 1 or above keeps the likeliest.
//	seeds        [B]        uint64 or int64.
//	positions    [B]        int32 or int64: the position of the token that follows the root.
//
//	Enqueues on stream and returns; on a CPU session the result is there on return. Does not synchronise, nor allocate once
//	its scratch is there; may be captured: seeds, positions and all else are read when the graph runs. Thread-safe; calls on one stream are
//	ordered by the caller. Tensors are borrowed until the stream passes this point; inputs are not written.
//	Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_MEMORY, OUT_OF_SCRATCH (CUDA), UNSUPPORTED (CUDA: 2^31 nodes or
//	more, 2^24 rows of logits and drafts or more where the walk samples), DRIVER, INTERNAL.
type VerifyTreeArgs struct {
	Tokens       Tensor
	Parents      Tensor
	NodeCounts   Tensor
	Target       Tensor
	Logits       Tensor
	Accepted     Tensor
	Path         Tensor
	NextToken    Tensor
	Committed    Tensor
	Status       Tensor
	Stop         Tensor
	IgnoreStop   Tensor
	Remaining    Tensor
	MinRemaining Tensor
	CommittedLen Tensor
	Finish       Tensor

	Walk                Walk
	TargetProbabilities bool // logits holds probabilities instead of logits
	DraftProbabilities  bool // draft_rows holds probabilities instead of logits
	TemperatureLast     bool // filters are computed at temperature 1
	DraftRows           Tensor
	DraftMap            Tensor
	Temperature         Tensor
	TopK                Tensor
	TopP                Tensor
	MinP                Tensor
	Seeds               Tensor
	Positions           Tensor
}

// VerifyTree finds the path of nodes that the target agrees with, and the token that follows it.
func (s *Session) VerifyTree(args VerifyTreeArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.verify_tree(h, &c, stream.c()) })
}

// VerifyTreeScratch tells how many bytes of scratch VerifyTree needs in its stream's arena.
func (s *Session) VerifyTreeScratch(args VerifyTreeArgs) (uint64, error) {
	var l lowering
	defer l.release()
	var bytes C.uint64_t
	c := args.lower(&l)
	err := s.run(&l, func(h *C.vwd_session) C.outcome { return C.verify_tree_scratch(h, &c, &bytes) })
	return uint64(bytes), err
}

func (args VerifyTreeArgs) lower(l *lowering) C.vwd_verify_tree_args {
	return C.vwd_verify_tree_args{
		struct_size:   C.sizeof_vwd_verify_tree_args,
		flags:         sampleFlags(args.TargetProbabilities, args.DraftProbabilities, args.TemperatureLast),
		tokens:        l.tensor("tokens", args.Tokens),
		parents:       l.tensor("parents", args.Parents),
		node_counts:   l.tensor("node_counts", args.NodeCounts),
		target:        l.tensor("target", args.Target),
		logits:        l.tensor("logits", args.Logits),
		accepted:      l.tensor("accepted", args.Accepted),
		path:          l.tensor("path", args.Path),
		next_token:    l.tensor("next_token", args.NextToken),
		committed:     l.tensor("committed", args.Committed),
		status:        l.tensor("status", args.Status),
		stop:          l.tensor("stop", args.Stop),
		ignore_stop:   l.tensor("ignore_stop", args.IgnoreStop),
		remaining:     l.tensor("remaining", args.Remaining),
		min_remaining: l.tensor("min_remaining", args.MinRemaining),
		committed_len: l.tensor("committed_len", args.CommittedLen),
		finish:        l.tensor("finish", args.Finish),
		walk:          C.uint32_t(args.Walk),
		draft_rows:    l.tensor("draft_rows", args.DraftRows),
		draft_map:     l.tensor("draft_map", args.DraftMap),
		temperature:   l.tensor("temperature", args.Temperature),
		top_k:         l.tensor("top_k", args.TopK),
		top_p:         l.tensor("top_p", args.TopP),
		min_p:         l.tensor("min_p", args.MinP),
		seeds:         l.tensor("seeds", args.Seeds),
		positions:     l.tensor("positions", args.Positions),
	}
}

// CompactorOptions name the caches: [pages, P, …] each, of any dtype.
type CompactorOptions struct {
	Caches []Tensor // of every layer; their memory stays where it is as long as calls move rows in it
}

// Compactor moves rows of accepted tree nodes in the caches of all layers. It outlives its session.
type Compactor struct {
	handle handle[*C.vwd_compactor]
	caches lowering // pins caches in Go's memory
	log    *callback
}

// NewCompactor creates a compactor over a set of caches. Caches in Go's memory stay pinned until Close.
func (s *Session) NewCompactor(options CompactorOptions) (*Compactor, error) {
	compactor := &Compactor{}
	c := options.lower(&compactor.caches)
	err := s.create(&compactor.caches, &compactor.log, func(h *C.vwd_session) C.outcome {
		return C.compactor_create(h, &c, &compactor.handle.c)
	})
	if err != nil {
		compactor.caches.release()
		return nil, err
	}
	return compactor, nil
}

func (options CompactorOptions) lower(l *lowering) C.vwd_compactor_options {
	return C.vwd_compactor_options{
		struct_size: C.sizeof_vwd_compactor_options,
		cache_count: C.uint32_t(len(options.Caches)),
		caches:      l.tensors("options.caches", options.Caches),
	}
}

// Close releases the compactor once calls in progress have returned. Closing again does nothing; calls after it fail.
func (c *Compactor) Close() error {
	if c != nil {
		c.handle.close(func(h *C.vwd_compactor) {
			C.vwd_compactor_release(h)
			c.caches.release()
			c.log.free()
		})
	}
	return nil
}

// CompactArgs are the arguments of Compactor.Compact; vwd_compact documents them.
//
//	Moves the rows of accepted tree nodes to where a sequence's tokens follow each other, in place and in all caches at once.
//
//	Node n of a tree was written at token position bases[i] + n of sequence i. The row of path[i, j] moves to position
//	bases[i] + j, for j from 0 on as long as path ascends and, where accepted is given, up to accepted[i]. Rows with
//	path[i, j] = j stay. A row is neither read nor written where the page table names no page for one of the two positions. All
//	other rows stay as they are.
//
//	page_table  [B, max_pages]  int32, optional. Page p of sequence i is page_table[i, p]. Absent: sequence i has page i and
//	                            no other.
//	bases       [B]             int32 or int64: the token position of each root. A sequence with a negative one moves nothing.
//	path        [B, M]          int32: nodes, ascending from 0 or above. A negative number, or one that does not ascend,
//	                            ends it.
//	accepted    [B]             int32, optional (absent: path says itself where it ends).
//
//	Rows from bases[i] on belong to sequence i alone: pages that sequences share lie before it. Summaries of moved tokens are
//	made anew by `vwd_index_update` from bases[i] on.
//
//	Enqueues on stream and returns; on a CPU session the rows are there on return. Does not allocate or synchronise; may be
//	captured. Thread-safe; calls that move the same rows are ordered by the caller. Tensors are borrowed until the stream passes
//	this point; the arguments are not written.
//	Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED (CUDA: 2^31 CTAs or more), DRIVER, INTERNAL.
type CompactArgs struct {
	PageTable Tensor
	Bases     Tensor
	Path      Tensor
	Accepted  Tensor
}

// Compact moves the rows of accepted tree nodes to where a sequence's tokens follow each other, in all caches at once.
func (c *Compactor) Compact(args CompactArgs, stream Stream) error {
	var l lowering
	defer l.release()
	lowered := args.lower(&l)
	if l.err != nil {
		return l.err
	}
	if c == nil {
		return invalid("compactor", "nil")
	}
	return c.handle.use("compactor", func(h *C.vwd_compactor) C.outcome { return C.compact(h, &lowered, stream.c()) })
}

func (args CompactArgs) lower(l *lowering) C.vwd_compact_args {
	return C.vwd_compact_args{
		struct_size: C.sizeof_vwd_compact_args,
		page_table:  l.tensor("page_table", args.PageTable),
		bases:       l.tensor("bases", args.Bases),
		path:        l.tensor("path", args.Path),
		accepted:    l.tensor("accepted", args.Accepted),
	}
}
