package vanward

// #include "calls.h"
// #cgo noescape verify_sample
// #cgo nocallback verify_sample
// #cgo noescape verify_sample_scratch
// #cgo nocallback verify_sample_scratch
import "C"

// Acceptance says which rule accepts draft tokens.
type Acceptance uint32

const (
	// AcceptAuto is AcceptRejection where DraftRows are given, else AcceptCoupled.
	AcceptAuto Acceptance = C.VWD_ACCEPT_AUTO
	// AcceptCoupled commits the token that plain sampling draws.
	AcceptCoupled Acceptance = C.VWD_ACCEPT_COUPLED
	// AcceptRejection is rejection sampling.
	AcceptRejection Acceptance = C.VWD_ACCEPT_REJECTION
	// AcceptGreedy takes the likeliest token of every row.
	AcceptGreedy Acceptance = C.VWD_ACCEPT_GREEDY
)

// VerifySampleArgs are the arguments of Session.VerifySample; vwd_verify_sample documents them.
//
//	Samples one token of each request, after verifying the tokens that a drafter guessed for it.
//
//	Row r of request i is what the target says of its token at position positions[i] + r; rows 0 … γ follow the draft tokens. Rows
//	decide in order. A row that accepts draft token r hands over to row r + 1; the first that refuses, or has no draft token,
//	gives the next token. With γ = 0 this is plain sampling.
//
//	Greedy rows (temperature below 10^−5, negative or NaN, or VWD_ACCEPT_GREEDY) take the lowest token of the largest logit and use no
//	random number. VWD_ACCEPT_COUPLED draws what plain sampling with this seed draws at this position, whatever was drafted: drafts change
//	the time that a text takes and not the text, as in Daliri et al. 2024. There Gumbel noise of each token couples draft and target; here
//	each position has one random number. VWD_ACCEPT_REJECTION accepts token x iff u·q(x) < p(x), and else draws from max(p − q, 0)
//	(Leviathan et al. 2023, Chen et al. 2023); without draft_rows q is 1 at the draft token.
//
//	p is made of a row in this order: stop tokens that min_remaining forbids are dropped; temperature; min_p keeps tokens at least min_p
//	times as likely as the likeliest (Nguyen et al. 2024); top_k keeps the k likeliest (Fan et al. 2018); top_p keeps the fewest likeliest
//	that have top_p of the mass that is left (Holtzman et al. 2020). Ties at a bound stay, and at least one token does. +inf logits share
//	all mass. NaN cannot be drawn. A row from which no token can be drawn ends the request: acceptance stops before it, and there is no next
//	token.
//
//	Random numbers are Philox4x32-10 (Salmon et al. 2011) of (seed, position, purpose): nothing depends on the request's place in the batch,
//	the size of the batch, the number of draft tokens or the device. A draw is defined to the bit (docs/verify-sample.md), so the CPU and
//	CUDA commit the same tokens for rows of the same bits; only logprobs may differ, by 10^−6·(1 + |ln p|).
//
//	Committed are the accepted draft tokens and the next token, cut after the first stop token and at remaining tokens. A
//	stop token within the budget gives VWD_FINISH_STOP, a cut at the budget VWD_FINISH_LENGTH. Where the cut drops the next token
//	it is −1.
//
//	rule                      A VWD_ACCEPT_* value.
//	draft         [B, γ]      int32 or int64, optional (absent: γ = 0); γ ≤ 64. Tokens of the target's vocabulary, also where draft_map
//	                          is given; one outside 0 … V−1 ends its draft.
//	draft_lens    [B]         int32, optional (absent: every draft is γ long). Values outside 0 … γ are clamped.
//	target        [B, γ+1, V] float32, float16 or bfloat16; 1 ≤ V ≤ 2^20. Or [N, V]: rows of all requests one after the other;
//	                          rows past a request's draft_lens are not read, so requests may have as many as they draft.
//	target_begin  [B]         int32 or int64, for target [N, V]: row 0 of each request. A row outside 0 … N−1 ends the request.
//	                          Without it, row i is that of request i, and γ = 0.
//	draft_rows    [B, γ, Vd]  float32, float16 or bfloat16, optional; Vd ≤ 2^20, and Vd ≤ V without draft_map. What each draft token was
//	                          drawn from: q is made of it as p is, by the request's temperature and filters, but keeps stop tokens; with
//	                          VWD_SAMPLE_DRAFT_PROBABILITIES it is what the row holds, scaled to sum to 1. Only VWD_ACCEPT_REJECTION reads it.
//	draft_map     [Vd]        int32, ascending, optional: the target's token for each column of draft_rows; absent: the same number.
//	                          Columns with numbers outside 0 … V−1 stand for no token, and keep their part of q. Not read without draft_rows.
//	temperature   [B]         float32, optional (absent: 1). Probabilities have had theirs: it tells only which are greedy.
//	top_k         [B]         int32, optional. 0 or below, and V or above: off.
//	top_p         [B]         float32, optional. 1 or above, or NaN: off; 0 or below keeps the likeliest.
//	min_p         [B]         float32, optional. 0 or below, or NaN: off; 1 or above keeps the likeliest.
//	seeds         [B]         uint64 or int64. Not read by VWD_ACCEPT_GREEDY, for which it may be absent; positions likewise.
//	positions     [B]         int32 or int64: the position of the token that row 0 decides.
//	stop          [S] or [B, S] int32 or int64, optional: stop tokens of all requests or of each. Negative ones match nothing.
//	ignore_stop   [B]         uint8 or bool, optional: not 0 where stop tokens are tokens like others.
//	remaining     [B]         int32, optional: the most tokens to commit. 0 or below: nothing is decided, as for a finished request or
//	                          a row of padding.
//	min_remaining [B]         int32, optional: so many rows cannot commit stop tokens.
//	next_token    [B]         int32 or int64, the dtype of draft if it is given, out; −1: none.
//	accepted      [B]         int32, out, optional: accepted draft tokens that are committed.
//	committed     [B, γ+1]    dtype of next_token, out, optional; −1 past the end.
//	committed_len [B]         int32, out, optional.
//	finish        [B]         uint8, out, optional: a VWD_FINISH_* value.
//	status        [B]         uint32 or int32, out, optional: bits VWD_SAMPLE_NAN, VWD_SAMPLE_NO_TOKEN, VWD_SAMPLE_NO_RESIDUAL,
//	                          VWD_SAMPLE_NO_ROW, of the rows that committed, and of the one that could not; 0 with
//	                          nothing remaining.
//	logprobs      [B, γ+1]    float32, out, optional: ln p of each committed token at temperature 1 and without filters, where p
//	                          leaves out forbidden stop tokens; 0 past the end.
//
//	Enqueues on stream and returns; on a CPU session the result is there on return. Does not synchronise, nor allocate
//	once its scratch is there; may be captured: seeds, positions and all else are read when the graph runs. Thread-safe; calls on one
//	stream are ordered by the caller. Tensors are borrowed until the stream passes this point; inputs are not written.
//	Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_MEMORY, OUT_OF_SCRATCH, UNSUPPORTED (CUDA: 2^24 rows or more),
//	DRIVER, INTERNAL.
type VerifySampleArgs struct {
	Rule                Acceptance
	TargetProbabilities bool // target holds probabilities instead of logits
	DraftProbabilities  bool // draft_rows holds probabilities instead of logits
	TemperatureLast     bool // filters are computed at temperature 1
	Draft               Tensor
	DraftLens           Tensor
	Target              Tensor
	TargetBegin         Tensor
	DraftRows           Tensor
	DraftMap            Tensor
	Temperature         Tensor
	TopK                Tensor
	TopP                Tensor
	MinP                Tensor
	Seeds               Tensor
	Positions           Tensor
	Stop                Tensor
	IgnoreStop          Tensor
	Remaining           Tensor
	MinRemaining        Tensor
	NextToken           Tensor
	Accepted            Tensor
	Committed           Tensor
	CommittedLen        Tensor
	Finish              Tensor
	Status              Tensor
	Logprobs            Tensor
}

// VerifySample samples one token of each request, after verifying its draft tokens.
func (s *Session) VerifySample(args VerifySampleArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.verify_sample(h, &c, stream.c()) })
}

// VerifySampleScratch tells how many bytes of scratch VerifySample needs in its stream's arena.
func (s *Session) VerifySampleScratch(args VerifySampleArgs) (uint64, error) {
	var l lowering
	defer l.release()
	var bytes C.uint64_t
	c := args.lower(&l)
	err := s.run(&l, func(h *C.vwd_session) C.outcome { return C.verify_sample_scratch(h, &c, &bytes) })
	return uint64(bytes), err
}

func sampleFlags(targetProbabilities, draftProbabilities, temperatureLast bool) C.uint32_t {
	var flags C.uint32_t
	if targetProbabilities {
		flags |= C.VWD_SAMPLE_TARGET_PROBABILITIES
	}
	if draftProbabilities {
		flags |= C.VWD_SAMPLE_DRAFT_PROBABILITIES
	}
	if temperatureLast {
		flags |= C.VWD_SAMPLE_TEMPERATURE_LAST
	}
	return flags
}

func (args VerifySampleArgs) lower(l *lowering) C.vwd_verify_sample_args {
	return C.vwd_verify_sample_args{
		struct_size:   C.sizeof_vwd_verify_sample_args,
		flags:         sampleFlags(args.TargetProbabilities, args.DraftProbabilities, args.TemperatureLast),
		rule:          C.uint32_t(args.Rule),
		draft:         l.tensor("draft", args.Draft),
		draft_lens:    l.tensor("draft_lens", args.DraftLens),
		target:        l.tensor("target", args.Target),
		target_begin:  l.tensor("target_begin", args.TargetBegin),
		draft_rows:    l.tensor("draft_rows", args.DraftRows),
		draft_map:     l.tensor("draft_map", args.DraftMap),
		temperature:   l.tensor("temperature", args.Temperature),
		top_k:         l.tensor("top_k", args.TopK),
		top_p:         l.tensor("top_p", args.TopP),
		min_p:         l.tensor("min_p", args.MinP),
		seeds:         l.tensor("seeds", args.Seeds),
		positions:     l.tensor("positions", args.Positions),
		stop:          l.tensor("stop", args.Stop),
		ignore_stop:   l.tensor("ignore_stop", args.IgnoreStop),
		remaining:     l.tensor("remaining", args.Remaining),
		min_remaining: l.tensor("min_remaining", args.MinRemaining),
		next_token:    l.tensor("next_token", args.NextToken),
		accepted:      l.tensor("accepted", args.Accepted),
		committed:     l.tensor("committed", args.Committed),
		committed_len: l.tensor("committed_len", args.CommittedLen),
		finish:        l.tensor("finish", args.Finish),
		status:        l.tensor("status", args.Status),
		logprobs:      l.tensor("logprobs", args.Logprobs),
	}
}
