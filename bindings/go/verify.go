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
//
//	Greedy verification of draft tokens (Leviathan et al. 2023, batched).
//
//	For each sequence i, finds k_i, the number of leading draft tokens that equal the target's, and the token that follows
//	them, target[i, k_i]. A negative draft token never matches.
//
//	draft       [B, γ]    int32 or int64. Row i holds draft_lens[i] valid tokens.
//	target      [B, γ+1]  dtype of draft. The target's token at each position; position γ is the bonus token.
//	draft_lens  [B]       int32, optional (absent: every row is γ long). Values outside 0 … γ are clamped.
//	accepted    [B]       int32, out: k_i.
//	next_token  [B]       dtype of draft, out: target[i, k_i].
//	mismatch    [B]       int32, uint8 or bool, out, optional: 1 where a draft token was refused, else 0.
//	committed   [B, γ+1]  dtype of draft, out, optional: accepted tokens, the next token, then −1.
//
//	Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
//	be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
//	this point; inputs are not written.
//	Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED (CUDA: 2^29 sequences or 2^31
//	tokens or more), DRIVER, INTERNAL.
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
//
//	Packs the accepted rows of every sequence into one contiguous run, for several tensors at once.
//
//	offsets[i] = Σ_{j<i} accepted[j]; row t < accepted[i] of sequence i becomes row offsets[i] + t of packed. K and V of
//	every layer can go in one call.
//
//	tensor_count          Number of tensors to pack, 1 … 256.
//	rows      [n]         Host array of tensors [B, γ, …] of any dtype and strides. May differ in trailing shape.
//	packed    [n]         Host array of tensors [cap, …], out; dtype and trailing shape of the same entry of rows.
//	                      Rows at or past cap are not written.
//	accepted  [B]         int32. Values outside 0 … γ are clamped.
//	offsets   [B+1]       int32 or int64, out. offsets[B] is the number of accepted rows, even where it exceeds cap.
//
//	Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
//	be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
//	this point; the arrays rows and packed only during the call. packed must not overlap rows.
//	Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED (CUDA: 2^31 rows or more), DRIVER, INTERNAL.
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
//
//	`vwd_verify`, and `vwd_pack` of the rows that it accepts, in one call.
//
//	Arguments, results, blocking, thread safety and errors are those of the two calls; accepted is an output here.
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
