package vanward

// #include "calls.h"
// #cgo noescape remainder_update
// #cgo nocallback remainder_update
import "C"

// RemainderUpdateArgs are the arguments of Session.RemainderUpdate; vwd_remainder_update documents them.
type RemainderUpdateArgs struct {
	BlockSize int
	KV        PagedKV
	Begin     Tensor
	Remainder *Remainder
}

// RemainderUpdate extends the means and the covariance of Remainder by the blocks of each sequence that became whole.
func (s *Session) RemainderUpdate(args RemainderUpdateArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c, kv := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.remainder_update(h, &c, &kv, stream.c()) })
}

func (args RemainderUpdateArgs) lower(l *lowering) (C.vwd_remainder_update_args, C.vwd_paged_kv) {
	return C.vwd_remainder_update_args{
		struct_size: C.sizeof_vwd_remainder_update_args,
		block_size:  l.uint32("block_size", args.BlockSize),
		begin:       l.tensor("begin", args.Begin),
		remainder:   l.remainder(args.Remainder),
	}, l.pagedKV(args.KV)
}
