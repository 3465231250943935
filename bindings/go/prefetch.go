package vanward

// #include "calls.h"
// #cgo noescape gather_blocks
// #cgo nocallback gather_blocks
import "C"

// GatherBlocksArgs are the arguments of Session.GatherBlocks; vwd_gather_blocks documents them.
//
//	Copies listed blocks: target[target_ids[j]] = source[source_ids[j]] for j below count; with lists per KV head
//	target[target_ids[i, g, j]] = source[source_ids[i, g, j], g] for j below count[i, g].
//
//	An entry with an id outside its tensor (such as −1) is skipped. target_ids are distinct.
//
//	engine      One of VWD_GATHER_*. A CPU session copies with its threads, whatever the value.
//	source      [N, …] or, with lists per KV head, [N, Hk, …]. Any dtype. CPU session: CPU or pinned memory. CUDA
//	            session: pinned host memory (device_type 3) or the session's device.
//	target      [M, …]  Out; dtype of source and the shape of its blocks; on the session's device.
//	source_ids  [n] or [B, Hk, cap]  int32.
//	target_ids  Shape of source_ids; int32, optional (absent: 0 … n−1, counted over all lists in order).
//	count       [1] or [B, Hk]  int32, optional (absent: n, or cap). Clamped to 0 … n.
//
//	CUDA session: all lists lie on its device, and are read when the stream reaches the copy, or all lie in host memory
//	(device_type 1 or 3), and are read during the call; a captured call keeps the entries that they held then.
//	VWD_GATHER_COPY_ENGINE takes lists in host memory only.
//
//	Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
//	be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
//	this point. target must not overlap source.
//	Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED (CUDA: 2^30 pieces of 4 KiB or more), DRIVER, INTERNAL.
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
