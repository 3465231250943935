package vanward

// #include "calls.h"
// #cgo noescape gather_blocks
// #cgo nocallback gather_blocks
import "C"

// GatherBlocksArgs are the arguments of Session.GatherBlocks; vwd_gather_blocks documents them.
type GatherBlocksArgs struct {
	Engine    GatherEngine
	Source    Tensor
	Target    Tensor
	SourceIDs Tensor
	TargetIDs Tensor
	Count     Tensor
}

// GatherBlocks copies listed blocks.
func (s *Session) GatherBlocks(args GatherBlocksArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.gather_blocks(h, &c, stream.c()) })
}

func (args GatherBlocksArgs) lower(l *lowering) C.vwd_gather_blocks_args {
	return C.vwd_gather_blocks_args{
		struct_size: C.sizeof_vwd_gather_blocks_args,
		engine:      C.uint32_t(args.Engine),
		source:      l.tensor("source", args.Source),
		target:      l.tensor("target", args.Target),
		source_ids:  l.tensor("source_ids", args.SourceIDs),
		target_ids:  l.tensor("target_ids", args.TargetIDs),
		count:       l.tensor("count", args.Count),
	}
}
