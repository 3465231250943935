package vanward

// #include "calls.h"
// #cgo noescape tree_prepare
// #cgo nocallback tree_prepare
// #cgo noescape verify_tree
// #cgo nocallback verify_tree
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

// VerifyTreeArgs are the arguments of Session.VerifyTree; vwd_verify_tree documents them.
//
//	Verification of a draft tree: the path of nodes that the target agrees with, and the token that follows it.
//
//	The walk begins at the root. At a node v it goes on to the child of lowest index whose token is the target's token at v. Where
//	there is none, the walk ends and the target's token is the next one. A negative draft token never matches.
//
//	tokens       [B, N]     int32 or int64, N from 1 to 1024. The token of each node; the root's is not read.
//	parents      [B, N]     int32, as in `vwd_tree_prepare`, which makes them of other forms.
//	node_counts  [B]        int32, optional (absent: N). Clamped to 0 … N. A padding row, of count 0, gives accepted 0,
//	                        next_token −1, and −1 in path and committed.
//	target       [B, N]     dtype of tokens: the target's token after each node. Given, or else logits.
//	logits       [B, N, V]  float32, float16 or bfloat16, V up to 2^31 − 1: the target's token is the largest, of equal
//	                        ones the lowest. NaN counts as −∞. On CUDA the call takes scratch,
//	                        8 bytes for each node and up to 32 parts of its row.
//	accepted     [B]        int32, out: the number of nodes on the path, without the root.
//	path         [B, M]     int32, out, M at least 1: the nodes of the path, root first, then −1. The hidden state of
//	                        path[accepted] is the one that next_token follows. At most M − 1 nodes are accepted.
//	next_token   [B]        dtype of tokens, out: the target's token at the end of the path.
//	committed    [B, M]     dtype of tokens, out, optional: the tokens of the path without the root's, the next token, then
//	                        −1.
//	status       [B]        uint32, out, optional: VWD_TREE_* bits, of the whole walk.
//	stop, ignore_stop, remaining, min_remaining, committed_len, finish
//	                        Optional, as in `vwd_verify`: what is committed is cut after the first stop token and at remaining
//	                        tokens. Nodes whose tokens are cut off leave accepted and path; where the next token is cut
//	                        off it is −1. With nothing remaining path is −1 throughout.
//
//	Enqueues on stream and returns; on a CPU session the result is there on return. Does not synchronise, nor allocate once
//	its scratch is there; may be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed
//	until the stream passes this point; inputs are not written.
//	Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_SCRATCH (CUDA), UNSUPPORTED (CUDA: 2^31 nodes or
//	more), DRIVER, INTERNAL.
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
}

// VerifyTree finds the path of nodes that the target agrees with, and the token that follows it.
func (s *Session) VerifyTree(args VerifyTreeArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.verify_tree(h, &c, stream.c()) })
}

func (args VerifyTreeArgs) lower(l *lowering) C.vwd_verify_tree_args {
	return C.vwd_verify_tree_args{
		struct_size:   C.sizeof_vwd_verify_tree_args,
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
}

// NewCompactor creates a compactor over a set of caches. Caches in Go's memory stay pinned until Close.
func (s *Session) NewCompactor(options CompactorOptions) (*Compactor, error) {
	compactor := &Compactor{}
	c := options.lower(&compactor.caches)
	err := s.run(&compactor.caches, func(h *C.vwd_session) C.outcome {
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
