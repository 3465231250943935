//! Fallback: with a budget, layers are SERIAL where their strategy does not pay, and what their policy says where it does. Times are forced:
//! a profile is measured, and its file rewritten.

use super::strategies::{FORESEEN, Foresight, PRR, PRR_FORESEEN, Run, SEQUENCES};
use super::*;
use crate::support::budget::{always, forced, never};

pub const CASES: &[Case] = cases![
    decoder_whose_strategies_never_pay_gives_the_bits_of_serial,
    decoder_whose_strategies_always_pay_gives_the_bits_of_the_strategy,
    decoder_decides_by_the_longest_row_the_batch_and_the_coverage,
    decoder_refuses_a_budget_of_another_shape_or_device,
];

/// A budget for layers of this policy: 100 and 300 tokens, one row and four.
fn budget_options(shape: &Shape, policy: &vwd_decoder_policy) -> vwd_budget_options {
    let mut options = vwd_budget_options {
        query_heads: shape.heads[0] as u32,
        kv_heads: shape.heads[1] as u32,
        key_dim: shape.dim as u32,
        value_dim: shape.value_dim as u32,
        dtype_code: shape.dtype.code as u32,
        dtype_bits: shape.dtype.bits as u32,
        page_size: shape.page as u32,
        block_size: shape.block as u32,
        method: policy.method,
        k: policy.k,
        init_blocks: policy.init_blocks,
        local_blocks: policy.local_blocks,
        max_draft: 1,
        samples: 1,
        ..args()
    };
    options.contexts[..2].copy_from_slice(&[100, 300]);
    options.batches[..2].copy_from_slice(&[1, 4]);
    options.ratios[..2].copy_from_slice(&[1.0, 2.0]);
    options
}

fn shape(rng: &mut Rng) -> Shape {
    Shape { dim: 64, value_dim: 64, ..super::strategies::shape(rng) }
}

fn options(shape: &Shape, policy: vwd_decoder_policy) -> vwd_decoder_options {
    vwd_decoder_options { max_sequences: SEQUENCES as u32, max_tokens: 320, ..shape.options(policy) }
}

fn create(backend: &Backend, shape: &Shape, policy: vwd_decoder_policy, budget: *const vwd_budget) -> Decoder {
    Decoder::create(backend, &vwd_decoder_options { budget, ..options(shape, policy) })
}

const STRATEGIES: [vwd_decoder_policy; 3] = [PRR, PRR_FORESEEN, FORESEEN];

/// Steps by every strategy with a budget, and by what `expected` makes of its policy without one.
fn compare(
    backend: &Backend,
    time: fn(&str, usize) -> Option<f32>,
    expected: fn(vwd_decoder_policy) -> vwd_decoder_policy,
    fallbacks: u64,
) {
    rounds(2, |rng| {
        let shape = shape(rng);
        let method = rng.pick(&[VWD_SELECT_MINMAX, VWD_SELECT_AXIS]);
        // Lists that are made ahead are twice as long: some rows are dense in a layer of FORESEEN, and sparse in one of SERIAL.
        let policies = STRATEGIES.map(|policy| vwd_decoder_policy { method, k: 3, ratio: 2.0, ..policy });
        let budget = forced(backend, &budget_options(&shape, &policies[0]), time);
        let pairs = policies.map(|policy| {
            [create(backend, &shape, policy, budget.0), create(backend, &shape, expected(policy), std::ptr::null())]
        });
        // Decoders keep it.
        drop(budget);
        let mut run = Run::new(backend, rng, shape, Foresight::Alternating);
        let all: Vec<&Decoder> = pairs.iter().flatten().collect();
        let steps = backend.times(40);
        for step in 0..steps {
            let ragged = run.ragged(rng, &all);
            for (n, [decoder, other]) in pairs.iter().enumerate() {
                let [found, expected] = [decoder, other].map(|decoder| {
                    decoder.begin(backend, &ragged.step());
                    ragged.foresee(&run, decoder, Foresight::Alternating);
                    ragged.attend(&run, decoder)
                });
                let about = format!("step {step}, strategy {n}, rows of {:?} tokens", ragged.tokens);
                assert_same(&about, &found, &expected.read_floats());
                assert_eq!(decoder.details().fallback_layers, fallbacks, "{about}");
                assert_eq!(other.details().fallback_layers, 0, "{about}");
            }
        }
        for [decoder, _] in &pairs {
            assert_eq!(decoder.details().fallbacks, fallbacks * steps as u64);
        }
    });
}

fn decoder_whose_strategies_never_pay_gives_the_bits_of_serial(backend: &Backend) {
    let serial = |policy: vwd_decoder_policy| vwd_decoder_policy { method: policy.method, k: policy.k, ..POLICY };
    compare(backend, never, serial, 1);
}

fn decoder_whose_strategies_always_pay_gives_the_bits_of_the_strategy(backend: &Backend) {
    compare(backend, always, |policy| policy, 0);
}

fn decoder_decides_by_the_longest_row_the_batch_and_the_coverage(backend: &Backend) {
    let shape = Shape { heads: [4, 2], dtype: F32, page: 16, block: 16, pages: 128, ..shape(&mut Rng::new(0)) };
    let shape = Shape { max_pages: 20, ..shape };
    let policies = [FORESEEN, PRR, PRR_FORESEEN, POLICY, FORESEEN];
    let policy = &policies[0];
    // SERIAL takes 100 µs at 100 tokens and 300 at 300. FORESEEN takes 200, and 400 for four rows; PRR 10 where nothing is missed and
    // 500 where everything is.
    let budget = forced(backend, &budget_options(&shape, policy), |name, n| match name {
        "serial" => Some(if n < 2 { 100.0 } else { 300.0 }),
        "foreseen" => Some(if (n / 2) % 2 == 0 { 200.0 } else { 400.0 }),
        "prr" | "prr_foreseen" => Some([10.0, 10.0, 10.0, 500.0][n % 4]),
        _ => None,
    });
    let decoder_of = |coverage| {
        let layers = policies.len() as u32;
        let options = options(&shape, POLICY);
        let (policies, policy_count) = (policies.as_ptr(), layers);
        Decoder::create(
            backend,
            &vwd_decoder_options { layers, policies, policy_count, budget: budget.0, coverage, ..options },
        )
    };
    let [blind, knowing] = [0.0, 0.95].map(decoder_of);
    let table = |rows: usize| Tensor::ints(backend, I32, &Array::from_fn(&[rows, 20], |_| 0), &Layout::default());
    let fallbacks = |decoder: &Decoder, rows: usize, change: &dyn Fn(&mut vwd_decoder_step)| {
        let (table, lens) = (table(rows), ints(backend, &vec![40; rows]));
        let mut step = vwd_decoder_step { page_table: table.c(), seq_lens: lens.c(), ..args() };
        change(&mut step);
        decoder.begin(backend, &step);
        decoder.details().fallback_layers
    };
    // Two layers of FORESEEN, two of PRR.
    assert_eq!(fallbacks(&blind, 1, &|step| step.longest = 100), 4);
    assert_eq!(fallbacks(&blind, 1, &|step| step.longest = 200), 4, "200 µs against 200");
    assert_eq!(fallbacks(&blind, 1, &|step| step.longest = 210), 2);
    assert_eq!(fallbacks(&blind, 1, &|_| ()), 2, "a table of 320 tokens");
    assert_eq!(fallbacks(&blind, 4, &|_| ()), 4, "four rows");
    assert_eq!(fallbacks(&blind, 4, &|step| step.mode = VWD_DECODER_DENSE), 0, "a step that has no sparse row");
    assert_eq!(blind.details().fallbacks, 16);
    assert_eq!(fallbacks(&knowing, 1, &|step| step.longest = 100), 2);
    assert_eq!(fallbacks(&knowing, 1, &|_| ()), 0);
    assert_eq!(knowing.details().fallbacks, 2);
}

/// Beside a GPU the other device is the CPU; beside the CPU it is one with more threads.
fn decoder_refuses_a_budget_of_another_shape_or_device(backend: &Backend) {
    let (cpu, two) = (Backend::cpu(1), Backend::cpu(2));
    let (one, name) = if backend.is_cuda() { (backend, "compute capability ") } else { (&two, "2 threads") };
    let shape = Shape { heads: [4, 2], dtype: F32, page: 16, block: 16, pages: 128, ..shape(&mut Rng::new(0)) };
    let [budget, of_cpu] = [one, &cpu].map(|on| forced(on, &budget_options(&shape, &FORESEEN), always));
    let refused_by = |backend: &Backend, change: &dyn Fn(&mut vwd_decoder_options), pieces: &[&str]| {
        let mut c = vwd_decoder_options { budget: budget.0, ..options(&shape, FORESEEN) };
        change(&mut c);
        let mut decoder = std::ptr::null_mut();
        // SAFETY: the arguments are valid.
        let status = unsafe { vwd_decoder_create(backend.session(), &c, &mut decoder) };
        assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, pieces);
    };
    let measured = ", with which options.budget was measured";
    refused_by(&cpu, &|_| (), &["options.budget: a budget of ", name, "; expected one of ", "1 threads"]);
    let refused = |change: &dyn Fn(&mut vwd_decoder_options), pieces: &[&str]| refused_by(one, change, pieces);
    let of_the_cpu = ["options.budget: a budget of ", "1 threads; expected one of ", name];
    refused(&|c| c.budget = of_cpu.0, &of_the_cpu);
    refused(&|c| c.query_heads = 8, &["options.query_heads: 8; expected 4", measured]);
    refused(&|c| c.key_dim = 32, &["options.key_dim: 32; expected 64", measured]);
    refused(&|c| c.dtype_bits = 16, &["options.dtype_code: float16; expected float32", measured]);
    refused(&|c| c.page_size = 32, &["options.page_size: 32; expected 16", measured]);
    refused(&|c| c.block_size = 32, &["options.block_size: 32; expected 16", measured]);
    refused(&|c| c.policy.k = 5, &["options.policy.k: 5; expected 4", measured]);
    refused(&|c| c.policy.method = VWD_SELECT_AXIS, &["options.policy.method: 5; expected 1", measured]);
    refused(&|c| c.policy.local_blocks = 0, &["options.policy.local_blocks: 0; expected 1", measured]);
    let policies = [vwd_decoder_policy { k: 7, ..POLICY }, vwd_decoder_policy { k: 7, ..PRR }];
    let own = |c: &mut vwd_decoder_options| (c.layers, c.policies, c.policy_count) = (2, policies.as_ptr(), 2);
    refused(&own, &["options.policies[1].k: 7; expected 4", measured]);
    refused(&|c| c.coverage = 1.5, &["options.coverage: 1.5; expected 0 to 1"]);
    refused(
        &|c| (c.budget, c.coverage) = (std::ptr::null(), 0.5),
        &["options.coverage: 0.5; expected 0 without a budget"],
    );
    refused(&|c| c.remainder = 2, &["options.remainder: 2; expected 0 or 1"]);
    // What has no strategy is of any shape.
    Decoder::create(
        one,
        &vwd_decoder_options { budget: budget.0, ..options(&shape, vwd_decoder_policy { k: 7, ..POLICY }) },
    );
}
