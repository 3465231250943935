package vanward

// #include "calls.h"
// #cgo noescape index_update
// #cgo nocallback index_update
// #cgo noescape channel_importance
// #cgo nocallback channel_importance
// #cgo noescape select_blocks
// #cgo nocallback select_blocks
// #cgo noescape select_blocks_scratch
// #cgo nocallback select_blocks_scratch
// #cgo noescape select_tokens
// #cgo nocallback select_tokens
// #cgo noescape select_tokens_scratch
// #cgo nocallback select_tokens_scratch
import "C"

// IndexUpdateArgs are the arguments of Session.IndexUpdate; vwd_index_update documents them.
type IndexUpdateArgs struct {
	Index     Index
	K         Tensor
	KScale    Tensor
	PageTable Tensor
	SeqLens   Tensor
	Begin     Tensor
}

// IndexUpdate builds or extends the summaries of tokens Begin … SeqLens−1 of each sequence.
func (s *Session) IndexUpdate(args IndexUpdateArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c, index := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.index_update(h, &c, &index, stream.c()) })
}

func (args IndexUpdateArgs) lower(l *lowering) (C.vwd_index_update_args, C.vwd_index) {
	return C.vwd_index_update_args{
		struct_size: C.sizeof_vwd_index_update_args,
		k:           l.tensor("k", args.K),
		k_scale:     l.tensor("k_scale", args.KScale),
		page_table:  l.tensor("page_table", args.PageTable),
		seq_lens:    l.tensor("seq_lens", args.SeqLens),
		begin:       l.tensor("begin", args.Begin),
	}, l.index(args.Index)
}

// ChannelImportanceArgs are the arguments of Session.ChannelImportance; vwd_channel_importance documents them.
type ChannelImportanceArgs struct {
	Q          Tensor
	K          Tensor
	Channels   Tensor
	Importance Tensor
}

// ChannelImportance chooses the key channels that decide the scores of each KV head.
func (s *Session) ChannelImportance(args ChannelImportanceArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.channel_importance(h, &c, stream.c()) })
}

func (args ChannelImportanceArgs) lower(l *lowering) C.vwd_channel_importance_args {
	return C.vwd_channel_importance_args{
		struct_size: C.sizeof_vwd_channel_importance_args,
		q:           l.tensor("q", args.Q),
		k:           l.tensor("k", args.K),
		channels:    l.tensor("channels", args.Channels),
		importance:  l.tensor("importance", args.Importance),
	}
}

// SelectBlocksArgs are the arguments of Session.SelectBlocks; vwd_select_blocks documents them.
type SelectBlocksArgs struct {
	Method      SelectMethod
	BlockSize   int
	K           int
	InitBlocks  int
	LocalBlocks int
	Scale       float32
	Index       Index
	Q           Tensor
	QLens       Tensor
	SeqLens     Tensor
	Budgets     Tensor
	Candidates  BlockList
	Selected    BlockList
	Scores      Tensor
	Status      Tensor // uint32: see SelectStatus
}

// SelectBlocks scores the blocks of every sequence and selects the exact best.
func (s *Session) SelectBlocks(args SelectBlocksArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c, index := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.select_blocks(h, &c, &index, stream.c()) })
}

// SelectBlocksScratch is how many bytes of scratch the call takes on a stream; 0 on a CPU session.
func (s *Session) SelectBlocksScratch(args SelectBlocksArgs) (uint64, error) {
	var l lowering
	defer l.release()
	var bytes C.uint64_t
	c, index := args.lower(&l)
	err := s.run(&l, func(h *C.vwd_session) C.outcome { return C.select_blocks_scratch(h, &c, &index, &bytes) })
	return uint64(bytes), err
}

func (args SelectBlocksArgs) lower(l *lowering) (C.vwd_select_blocks_args, C.vwd_index) {
	return C.vwd_select_blocks_args{
		struct_size:  C.sizeof_vwd_select_blocks_args,
		method:       C.uint32_t(args.Method),
		block_size:   l.uint32("block_size", args.BlockSize),
		k:            l.uint32("k", args.K),
		init_blocks:  l.uint32("init_blocks", args.InitBlocks),
		local_blocks: l.uint32("local_blocks", args.LocalBlocks),
		scale:        C.float(args.Scale),
		q:            l.tensor("q", args.Q),
		q_lens:       l.tensor("q_lens", args.QLens),
		seq_lens:     l.tensor("seq_lens", args.SeqLens),
		budgets:      l.tensor("budgets", args.Budgets),
		candidates:   l.blockList("candidates.ids", "candidates.counts", "candidates.slots", args.Candidates),
		selected:     l.blockList("selected.ids", "selected.counts", "selected.slots", args.Selected),
		scores:       l.tensor("scores", args.Scores),
		status:       l.tensor("status", args.Status),
	}, l.index(args.Index)
}

// SelectTokensArgs are the arguments of Session.SelectTokens; vwd_select_tokens documents them.
type SelectTokensArgs struct {
	BlockSize   int
	K           int
	InitTokens  int
	LocalTokens int
	Scale       float32
	Index       Index
	Q           Tensor
	QLens       Tensor
	SeqLens     Tensor
	Budgets     Tensor
	Candidates  BlockList
	Selected    BlockList
	Scores      Tensor
	Status      Tensor // uint32: see SelectStatus
}

// SelectTokens selects the exact best tokens inside candidate blocks by their INT4 labels.
func (s *Session) SelectTokens(args SelectTokensArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c, index := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.select_tokens(h, &c, &index, stream.c()) })
}

// SelectTokensScratch is how many bytes of scratch the call takes on a stream; 0 on a CPU session.
func (s *Session) SelectTokensScratch(args SelectTokensArgs) (uint64, error) {
	var l lowering
	defer l.release()
	var bytes C.uint64_t
	c, index := args.lower(&l)
	err := s.run(&l, func(h *C.vwd_session) C.outcome { return C.select_tokens_scratch(h, &c, &index, &bytes) })
	return uint64(bytes), err
}

func (args SelectTokensArgs) lower(l *lowering) (C.vwd_select_tokens_args, C.vwd_index) {
	return C.vwd_select_tokens_args{
		struct_size:  C.sizeof_vwd_select_tokens_args,
		block_size:   l.uint32("block_size", args.BlockSize),
		k:            l.uint32("k", args.K),
		init_tokens:  l.uint32("init_tokens", args.InitTokens),
		local_tokens: l.uint32("local_tokens", args.LocalTokens),
		scale:        C.float(args.Scale),
		q:            l.tensor("q", args.Q),
		q_lens:       l.tensor("q_lens", args.QLens),
		seq_lens:     l.tensor("seq_lens", args.SeqLens),
		budgets:      l.tensor("budgets", args.Budgets),
		candidates:   l.blockList("candidates.ids", "candidates.counts", "candidates.slots", args.Candidates),
		selected:     l.blockList("selected.ids", "selected.counts", "selected.slots", args.Selected),
		scores:       l.tensor("scores", args.Scores),
		status:       l.tensor("status", args.Status),
	}, l.index(args.Index)
}
