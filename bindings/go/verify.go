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
//	them, target[i, k_i]. A negative draft token never matches. The accepted tokens and the next token are committed.
//
//	With stop tokens or lengths what is committed is cut after the first stop token and at remaining tokens, as in
//	vwd_verify_sample: a stop token within the budget gives VWD_FINISH_STOP, a cut at the budget VWD_FINISH_LENGTH. Where
//	the cut drops the next token it is −1, and no draft token was refused.
//
//	Drafts of different lengths may lie one after the other: with draft_ends, draft i is tokens draft_ends[i−1] (0 for the
//	first) up to but without draft_ends[i] of draft and target, and bonus[i] follows where all of it is accepted. The first γ
//	tokens of each are looked at, where γ + 1 is the length of a row of committed; without committed all of them are.
//
//	draft         [B, γ]    int32 or int64. Row i holds draft_lens[i] valid tokens. [N] with draft_ends.
//	target        [B, γ+1]  dtype of draft. The target's token at each position; position γ is the bonus token. [N] with
//	                        draft_ends.
//	draft_lens    [B]       int32, optional (absent: every row is γ long). Values outside 0 … γ are clamped. Not with draft_ends.
//	accepted      [B]       int32, out: how many draft tokens are committed; k_i unless cut.
//	next_token    [B]       dtype of draft, out: target[i, k_i]; −1 where it is cut.
//	mismatch      [B]       int32, uint8 or bool, out, optional: 1 where a draft token was refused, else 0.
//	committed     [B, γ+1]  dtype of draft, out, optional: accepted tokens, the next token, then −1.
//	stop          [S] or [B, S] int32 or int64, optional: stop tokens of all requests or of each. Negative ones match nothing.
//	ignore_stop   [B]       uint8 or bool, optional: not 0 where stop tokens are tokens like others.
//	remaining     [B]       int32, optional: the most tokens to commit. 0 or below: nothing is committed.
//	min_remaining [B]       int32, optional: at so many positions stop tokens are tokens like others. The caller keeps
//	                        them out of target.
//	committed_len [B]       int32, out, optional: tokens that are committed.
//	finish        [B]       uint8, out, optional: a VWD_FINISH_* value.
//	draft_ends    [B]       int32, optional: never descending, up to N. Values outside 0 … N are clamped, and a draft that
//	                        would end before it begins is empty.
//	bonus         [B]       dtype of draft, with draft_ends alone: the target's token after the whole draft.
//
//	Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may
//	be captured. Thread-safe; calls on one stream are ordered by the caller. Tensors are borrowed until the stream passes
//	this point; inputs are not written.
//	Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED (CUDA: 2^29 sequences or 2^31
//	tokens or more), DRIVER, INTERNAL.
type VerifyArgs struct {
	Draft        Tensor
	Target       Tensor
	DraftLens    Tensor
	Accepted     Tensor
	NextToken    Tensor
	Mismatch     Tensor
	Committed    Tensor
	Stop         Tensor
	IgnoreStop   Tensor
	Remaining    Tensor
	MinRemaining Tensor
	CommittedLen Tensor
	Finish       Tensor
	DraftEnds    Tensor
	Bonus        Tensor
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
		struct_size:   C.sizeof_vwd_verify_args,
		draft:         l.tensor("draft", args.Draft),
		target:        l.tensor("target", args.Target),
		draft_lens:    l.tensor("draft_lens", args.DraftLens),
		accepted:      l.tensor("accepted", args.Accepted),
		next_token:    l.tensor("next_token", args.NextToken),
		mismatch:      l.tensor("mismatch", args.Mismatch),
		committed:     l.tensor("committed", args.Committed),
		stop:          l.tensor("stop", args.Stop),
		ignore_stop:   l.tensor("ignore_stop", args.IgnoreStop),
		remaining:     l.tensor("remaining", args.Remaining),
		min_remaining: l.tensor("min_remaining", args.MinRemaining),
		committed_len: l.tensor("committed_len", args.CommittedLen),
		finish:        l.tensor("finish", args.Finish),
		draft_ends:    l.tensor("draft_ends", args.DraftEnds),
		bonus:         l.tensor("bonus", args.Bonus),
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
//	Arguments, results, blocking, thread safety and errors are those of the two calls; accepted is an output here. Rows of
//	tokens that a stop token or a length cuts off are not packed. Drafts are rows here: draft_ends and bonus are of vwd_verify alone.
type VerifyPackArgs struct {
	Rows         []Tensor
	Packed       []Tensor
	Draft        Tensor
	Target       Tensor
	DraftLens    Tensor
	Accepted     Tensor
	NextToken    Tensor
	Offsets      Tensor
	Mismatch     Tensor
	Committed    Tensor
	Stop         Tensor
	IgnoreStop   Tensor
	Remaining    Tensor
	MinRemaining Tensor
	CommittedLen Tensor
	Finish       Tensor
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
		struct_size:   C.sizeof_vwd_verify_pack_args,
		tensor_count:  l.arrays("packed", len(args.Rows), len(args.Packed)),
		rows:          l.tensors("rows", args.Rows),
		packed:        l.tensors("packed", args.Packed),
		draft:         l.tensor("draft", args.Draft),
		target:        l.tensor("target", args.Target),
		draft_lens:    l.tensor("draft_lens", args.DraftLens),
		accepted:      l.tensor("accepted", args.Accepted),
		next_token:    l.tensor("next_token", args.NextToken),
		offsets:       l.tensor("offsets", args.Offsets),
		mismatch:      l.tensor("mismatch", args.Mismatch),
		committed:     l.tensor("committed", args.Committed),
		stop:          l.tensor("stop", args.Stop),
		ignore_stop:   l.tensor("ignore_stop", args.IgnoreStop),
		remaining:     l.tensor("remaining", args.Remaining),
		min_remaining: l.tensor("min_remaining", args.MinRemaining),
		committed_len: l.tensor("committed_len", args.CommittedLen),
		finish:        l.tensor("finish", args.Finish),
	}
}
