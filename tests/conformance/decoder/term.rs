//! The term for what lists leave out, in a decoder: its steps are selection with log_mass, and attention that the term joins, with sums that are made
//! anew for each step.

use super::strategies::{FORESEEN, Foresight, Run, assert_alike, shape};
use super::*;

pub const CASES: &[Case] = cases![
    decoder_with_the_remainder_equals_the_calls_that_it_is_composed_of,
    decoder_counts_no_draft_for_the_remainder_before_it_is_accepted,
    decoder_errors_of_the_remainder_name_the_argument,
];

const SEQUENCES: usize = 8;

fn options(shape: &Shape, policy: vwd_decoder_policy) -> vwd_decoder_options {
    vwd_decoder_options { max_sequences: SEQUENCES as u32, max_tokens: 320, remainder: 1, ..shape.options(policy) }
}

/// SERIAL and FORESEEN, while sequences join, leave, fork and lose their last tokens.
fn decoder_with_the_remainder_equals_the_calls_that_it_is_composed_of(backend: &Backend) {
    let steps = backend.times(24);
    let (mut joined, mut ahead_joined) = (0, 0);
    rounds(4, |rng| {
        // By AXIS what was taken back moves the weights of a group's heads in what is foreseen: groups of one there.
        let heads = rng.pick(&[[4, 2], [3, 3]]);
        let shape = Shape { heads, ..shape(rng) };
        let k = rng.size(2..=4) as u32;
        let serial = vwd_decoder_policy { method: VWD_SELECT_AXIS, k, ..POLICY };
        let ahead = vwd_decoder_policy { k, ..vwd_decoder_policy { method: VWD_SELECT_AXIS, ..FORESEEN } };
        let decoders = [serial, ahead].map(|policy| Decoder::create(backend, &options(&shape, policy)));
        let mut run = Run::new(backend, rng, shape, Foresight::Wrong);
        let longer = vwd_decoder_policy { k: (5 * k).div_ceil(4), local_blocks: 1, ..ahead };
        let covered = longer.k.max(longer.init_blocks + 1) as usize * shape.block;
        let late = vwd_decoder_policy { dense_below: covered as u32 + 1, ..serial };
        for step in 0..steps {
            let ragged = run.ragged(rng, &[&decoders[0], &decoders[1]]);
            decoders.iter().for_each(|decoder| decoder.begin(backend, &ragged.step()));
            let is_foreseen = !rng.one_in(4);
            if is_foreseen {
                ragged.foresee(&run, &decoders[1], Foresight::Wrong);
            }
            let found = decoders.each_ref().map(|decoder| ragged.attend(&run, decoder));
            let counted: Vec<usize> = ragged.tokens.iter().zip(&ragged.counts).map(|(n, count)| n - count).collect();
            let of = |policy, wanted, is_ahead, counted: Option<&[usize]>| {
                let tensors = [&ragged.table, &ragged.lens];
                let (modes, counts, tokens, q) = (&ragged.modes, &ragged.counts, &ragged.tokens, &ragged.q);
                compose(
                    backend,
                    &run.engine,
                    policy,
                    tensors,
                    modes,
                    counts,
                    tokens,
                    [wanted, q],
                    is_ahead,
                    counted,
                    F32,
                )
                .out
                .read_floats()
            };
            let (q, sums) = (&ragged.q, Some(&counted[..]));
            let about = |what: &str| {
                let (modes, tokens, is_new) = (&ragged.modes, &ragged.tokens, &ragged.is_new);
                format!("step {step}, {what}; modes {modes:?} of {tokens:?} tokens, new {is_new:?}")
            };
            let expected = of(&serial, q, false, sums);
            assert_alike(&about("SERIAL"), backend, &shape, &found[0], &expected);
            let without = of(&serial, q, false, None);
            joined += without.data.iter().zip(&expected.data).filter(|(x, y)| x != y).count();
            if heads[0] != heads[1] {
                continue;
            }
            let (ahead, late) = (of(&longer, &ragged.opposite, true, sums), of(&late, q, false, sums));
            let expected = Array::from_fn(&ahead.shape, |at| {
                let at: [usize; 4] = at.try_into().unwrap();
                if is_foreseen && !ragged.is_new[at[0]] { ahead[at] } else { late[at] }
            });
            assert_alike(&about(&format!("foreseen {is_foreseen}")), backend, &shape, &found[1], &expected);
            ahead_joined += is_foreseen as usize;
        }
    });
    assert!(joined > 0 && ahead_joined > 0, "the term changed {joined} channels; {ahead_joined} steps were foreseen");
}

/// Rounds of sparse drafts and a dense step, of which some drafts are rejected: sums are those of tokens that lie `max_draft` before the step.
fn decoder_counts_no_draft_for_the_remainder_before_it_is_accepted(backend: &Backend) {
    const DRAFTS: usize = 4;
    rounds(backend.times(6).max(2) as u64, |rng| {
        let shape =
            Shape { positions: DRAFTS + 1, rows: 2, block: 16, page: 16, pages: 64, max_pages: 20, ..shape(rng) };
        let policy = vwd_decoder_policy { method: VWD_SELECT_AXIS, k: 3, ..POLICY };
        let decoder = Decoder::create(backend, &options(&shape, policy));
        let one = Shape { positions: 1, ..shape };
        let mut engine = Engine::new(backend, rng, one);
        [100, 170].into_iter().for_each(|len| engine.join(len));
        let mut is_first = true;
        for round in 0..backend.times(12).max(4) {
            let committed = [0, 1].map(|n| engine.sequences[n].len);
            for draft in 0..=DRAFTS {
                let verifies = draft == DRAFTS;
                let count = if verifies { DRAFTS + 1 } else { 1 };
                let tokens = committed.map(|len| if verifies { len + DRAFTS + 1 } else { len + draft + 1 });
                if verifies {
                    engine.shape.positions = DRAFTS + 1;
                }
                (0..2).for_each(|n| assert!(engine.grow(n, tokens[n]), "room"));
                let random = |rng: &mut Rng, heads, dim| {
                    let values = rng.normals(&[2, count, heads, dim]).map(|&x| shape.dtype.round(x));
                    (Tensor::floats(backend, shape.dtype, &values, &Layout::default()), values)
                };
                let (new_k, keys) = random(rng, shape.heads[1], shape.dim);
                let (new_v, values) = random(rng, shape.heads[1], shape.value_dim);
                let (q, _) = random(rng, shape.heads[0], shape.dim);
                for (to, new) in [(&mut engine.keys, &keys), (&mut engine.values, &values)] {
                    for at in indices(&new.shape) {
                        let token = tokens[at[0]] - count + at[1];
                        let page = engine.sequences[at[0]].pages[token / shape.page];
                        to[[page, token % shape.page, at[2], at[3]]] = new[[at[0], at[1], at[2], at[3]]];
                    }
                }
                let table = Tensor::ints(backend, I32, &engine.table(&[0, 1]), &Layout::default());
                let (lens, begin) = (ints(backend, &tokens.map(|n| n as i64)), ints(backend, &[0, 0]));
                let mode = if verifies { VWD_DECODER_DENSE } else { VWD_DECODER_SPARSE };
                let mut step = vwd_decoder_step {
                    mode,
                    positions: count as u32,
                    page_table: table.c(),
                    seq_lens: lens.c(),
                    ..args()
                };
                if std::mem::take(&mut is_first) {
                    step.begin = begin.c();
                }
                decoder.begin(backend, &step);
                let out =
                    Tensor::poisoned(backend, F32, &[2, count, shape.heads[0], shape.value_dim], &Layout::default());
                let attend = vwd_decoder_attend_args {
                    k: engine.k.c(),
                    v: engine.v.c(),
                    new_k: new_k.c(),
                    new_v: new_v.c(),
                    q: q.c(),
                    out: out.c(),
                    ..args()
                };
                decoder.attend(backend, &attend);
                let counted = tokens.map(|n| n - count - DRAFTS);
                let (modes, counts) = ([mode; 2], [count; 2]);
                let tensors = [&table, &lens];
                let expected = compose(
                    backend,
                    &engine,
                    &policy,
                    tensors,
                    &modes,
                    &counts,
                    &tokens,
                    [&q, &q],
                    false,
                    Some(&counted),
                    F32,
                );
                engine.shape.positions = 1;
                let about = format!("round {round}, draft {draft} of {committed:?} tokens");
                assert_alike(&about, backend, &shape, &out, &expected.out.read_floats());
            }
            for sequence in &mut engine.sequences {
                sequence.len += rng.size(1..=DRAFTS + 1);
            }
        }
    });
}

fn decoder_errors_of_the_remainder_name_the_argument(backend: &Backend) {
    let shape = Shape { heads: [4, 2], dim: 16, value_dim: 16, dtype: F32, positions: 3, ..shape(&mut Rng::new(0)) };
    let axis = vwd_decoder_policy { method: VWD_SELECT_AXIS, ..POLICY };
    let good = options(&shape, axis);
    let refused = |options: vwd_decoder_options, pieces: &[&str]| {
        let mut decoder = std::ptr::null_mut();
        // SAFETY: the arguments are valid.
        let status = unsafe { vwd_decoder_create(backend.session(), &options, &mut decoder) };
        assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, pieces);
    };
    refused(vwd_decoder_options { remainder: 2, ..good }, &["options.remainder: 2", "0 or 1"]);
    refused(
        vwd_decoder_options { block_size: 8192, ..good },
        &["options.block_size: 8192", "4096 with options.remainder"],
    );
    refused(vwd_decoder_options { soft_cap: 3.0, ..good }, &["options.soft_cap: 3", "0 with options.remainder"]);
    let by = |policy: vwd_decoder_policy, pieces: &[&str]| refused(vwd_decoder_options { policy, ..good }, pieces);
    by(POLICY, &["options.policy.method: 1", "VWD_SELECT_AXIS"]);
    by(vwd_decoder_policy { window: 9, ..axis }, &["options.policy.window: 9", "0 with options.remainder"]);
    let prr = vwd_decoder_policy { strategy: VWD_STRATEGY_PRR, ..axis };
    by(prr, &["options.policy.strategy: 1", "VWD_STRATEGY_SERIAL or FORESEEN"]);
    let foreseen = vwd_decoder_policy { strategy: VWD_STRATEGY_FORESEEN, ..axis };
    let decoder = Decoder::create(backend, &options(&shape, foreseen));
    let lens = ints(backend, &[9, 2]);
    let tree = Tensor::ints(backend, U32, &Array::filled(&[2, 3, 1], 1), &Layout::default());
    let step = vwd_decoder_step { positions: 3, seq_lens: lens.c(), tree: tree.c(), ..args() };
    // SAFETY: the arguments are valid.
    let status = unsafe { vwd_decoder_begin(decoder.0, &step, backend.stream()) };
    assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, &["tree", "sparse rows", "VWD_DECODER_DENSE"]);
    decoder.begin(backend, &vwd_decoder_step { mode: VWD_DECODER_DENSE, ..step });
    decoder.begin(backend, &vwd_decoder_step { seq_lens: lens.c(), ..args() });
    let q = Tensor::floats(backend, F32, &Array::filled(&[2, 2, 16], 0.5), &Layout::default());
    let args = vwd_decoder_foresee_args { q: q.c(), ..args() };
    // SAFETY: as above.
    let status = unsafe { vwd_decoder_foresee(decoder.0, std::ptr::null(), &args, backend.stream()) };
    assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, &["q: 2 heads", "Hq=4 heads", "options.remainder"]);
}
