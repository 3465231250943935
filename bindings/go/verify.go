package vanward

// #include "calls.h"
// #cgo noescape verify
// #cgo nocallback verify
// #cgo noescape pack
// #cgo nocallback pack
// #cgo noescape verify_pack
// #cgo nocallback verify_pack
import "C"

// VerifyArgs are the arguments of Session.Verify; vwd_verify documents them.
type VerifyArgs struct {
	Draft     Tensor
	Target    Tensor
	DraftLens Tensor
	Accepted  Tensor
	NextToken Tensor
	Mismatch  Tensor
	Committed Tensor
}

// Verify accepts the leading draft tokens that the target agrees with.
func (s *Session) Verify(args VerifyArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.verify(h, &c, stream.c()) })
}

func (args VerifyArgs) lower(l *lowering) C.vwd_verify_args {
	return C.vwd_verify_args{
		struct_size: C.sizeof_vwd_verify_args,
		draft:       l.tensor("draft", args.Draft),
		target:      l.tensor("target", args.Target),
		draft_lens:  l.tensor("draft_lens", args.DraftLens),
		accepted:    l.tensor("accepted", args.Accepted),
		next_token:  l.tensor("next_token", args.NextToken),
		mismatch:    l.tensor("mismatch", args.Mismatch),
		committed:   l.tensor("committed", args.Committed),
	}
}

// PackArgs are the arguments of Session.Pack; vwd_pack documents them.
type PackArgs struct {
	Rows     []Tensor
	Packed   []Tensor
	Accepted Tensor
	Offsets  Tensor
}

// Pack packs the accepted rows of every sequence into one contiguous run.
func (s *Session) Pack(args PackArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.pack(h, &c, stream.c()) })
}

func (args PackArgs) lower(l *lowering) C.vwd_pack_args {
	return C.vwd_pack_args{
		struct_size:  C.sizeof_vwd_pack_args,
		tensor_count: l.arrays("packed", len(args.Rows), len(args.Packed)),
		rows:         l.tensors("rows", args.Rows),
		packed:       l.tensors("packed", args.Packed),
		accepted:     l.tensor("accepted", args.Accepted),
		offsets:      l.tensor("offsets", args.Offsets),
	}
}

// VerifyPackArgs are the arguments of Session.VerifyPack; vwd_verify_pack documents them.
type VerifyPackArgs struct {
	Rows      []Tensor
	Packed    []Tensor
	Draft     Tensor
	Target    Tensor
	DraftLens Tensor
	Accepted  Tensor
	NextToken Tensor
	Offsets   Tensor
	Mismatch  Tensor
	Committed Tensor
}

// VerifyPack is Verify, and Pack of what it accepted.
func (s *Session) VerifyPack(args VerifyPackArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.verify_pack(h, &c, stream.c()) })
}

func (args VerifyPackArgs) lower(l *lowering) C.vwd_verify_pack_args {
	return C.vwd_verify_pack_args{
		struct_size:  C.sizeof_vwd_verify_pack_args,
		tensor_count: l.arrays("packed", len(args.Rows), len(args.Packed)),
		rows:         l.tensors("rows", args.Rows),
		packed:       l.tensors("packed", args.Packed),
		draft:        l.tensor("draft", args.Draft),
		target:       l.tensor("target", args.Target),
		draft_lens:   l.tensor("draft_lens", args.DraftLens),
		accepted:     l.tensor("accepted", args.Accepted),
		next_token:   l.tensor("next_token", args.NextToken),
		offsets:      l.tensor("offsets", args.Offsets),
		mismatch:     l.tensor("mismatch", args.Mismatch),
		committed:    l.tensor("committed", args.Committed),
	}
}
