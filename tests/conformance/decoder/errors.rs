//! What a decoder refuses, by the name of the argument.

use super::*;

pub const CASES: &[Case] = cases![decoder_errors_name_the_argument,];

fn decoder_errors_name_the_argument(backend: &Backend) {
    let shape = Shape {
        heads: [4, 2],
        dim: 16,
        value_dim: 16,
        dtype: F32,
        page: 8,
        block: 8,
        pages: 4,
        max_pages: 2,
        rows: 2,
        positions: 2,
    };
    let good = shape.options(POLICY);
    let create = |options: vwd_decoder_options, pieces: &[&str]| {
        let mut decoder = std::ptr::null_mut();
        // SAFETY: the arguments are valid.
        let status = unsafe { vwd_decoder_create(backend.session(), &options, &mut decoder) };
        assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, pieces);
    };
    create(vwd_decoder_options { layers: 0, ..good }, &["options.layers", "0", "at least 1"]);
    create(
        vwd_decoder_options { layers: u32::MAX, ..good },
        &["options.layers: 2 rows · 4294967295 layers; expected "],
    );
    let heads = [u32::MAX - 3, 2];
    create(
        vwd_decoder_options { query_heads: heads[0], kv_heads: heads[1], ..good },
        &[
            "options.max_positions: 2 rows · 2 positions · 4294967292 query heads; expected at most 268435456, multiplied",
        ],
    );
    create(vwd_decoder_options { pages: u32::MAX, ..good }, &["options.pages: 4294967295 pages; expected at most "]);
    create(vwd_decoder_options { block_size: 12, ..good }, &["options.block_size", "12", "page size 8"]);
    create(vwd_decoder_options { query_heads: 3, ..good }, &["options.query_heads", "3", "2 KV heads"]);
    create(vwd_decoder_options { max_draft: 2, ..good }, &["options.max_draft", "2", "max_positions, 2"]);
    create(vwd_decoder_options { policy_count: 3, ..good }, &["options.policy_count", "3", "1 layers"]);
    let policy = vwd_decoder_policy { method: VWD_SELECT_LABEL_MASS, ..POLICY };
    create(vwd_decoder_options { policy, ..good }, &["options.policy.method", "4"]);
    create(
        vwd_decoder_options { policy_count: 1, policies: &vwd_decoder_policy { k: 0, ..POLICY }, ..good },
        &["options.policies[0].k", "0"],
    );
    let misaligned = std::ptr::without_provenance::<vwd_decoder_policy>(0x1001);
    for (policies, found) in [(std::ptr::null(), "options.policies: NULL"), (misaligned, "is misaligned")] {
        let options = vwd_decoder_options { policy_count: 1, policies, ..good };
        create(options, &[found, "expected an array of 1 policies"]);
    }

    let policy = |policy: vwd_decoder_policy, pieces: &[&str]| create(vwd_decoder_options { policy, ..good }, pieces);
    let prr = vwd_decoder_policy { strategy: VWD_STRATEGY_PRR, ..POLICY };
    policy(vwd_decoder_policy { strategy: 6, ..POLICY }, &["options.policy.strategy", "6", "VWD_STRATEGY_*"]);
    policy(vwd_decoder_policy { predict: 2, ..prr }, &["options.policy.predict", "2", "VWD_PREDICT_*"]);
    policy(vwd_decoder_policy { predict: 1, ..POLICY }, &["options.policy.predict", "1", "0 without VWD_STRATEGY_PRR"]);
    policy(vwd_decoder_policy { ratio: 0.5, ..prr }, &["options.policy.ratio", "0.5", "from 1"]);
    policy(vwd_decoder_policy { ratio: 2.0, ..POLICY }, &["options.policy.ratio", "2", "0 for SERIAL"]);
    policy(vwd_decoder_policy { reserved: [0, 0, 7, 0], ..POLICY }, &["options.policy.reserved", "7", "zeros"]);
    policy(vwd_decoder_policy { method: 0, k: 0, ..prr }, &["options.policy.strategy", "dense layer"]);
    let holt = vwd_holt { alpha: 1.5, beta: 0.0, gamma: 0.0 };
    policy(vwd_decoder_policy { holt, ..prr }, &["options.policy.holt.alpha", "1.5", "0 to 1"]);
    policy(vwd_decoder_policy { holt, ..POLICY }, &["options.policy.holt", "1.5", "VWD_PREDICT_SCORES"]);
    create(
        vwd_decoder_options { page_size: 4, block_size: 4, policy: prr, ..good },
        &["options.block_size", "4", "at least 8 for VWD_STRATEGY_PRR"],
    );

    let decoder = Decoder::create(backend, &good);
    let rng = &mut Rng::new(1);
    let engine = Engine::new(backend, rng, shape);
    let floats = |extents: &[usize]| Tensor::floats(backend, F32, &Array::filled(extents, 0.5), &Layout::default());
    let (q, new, out) = (floats(&[2, 2, 4, 16]), floats(&[2, 2, 2, 16]), floats(&[2, 2, 4, 16]));
    let attend = vwd_decoder_attend_args {
        k: engine.k.c(),
        v: engine.v.c(),
        new_k: new.c(),
        new_v: new.c(),
        q: q.c(),
        out: out.c(),
        ..args()
    };
    let fails = |args: vwd_decoder_attend_args, pieces: &[&str]| {
        // SAFETY: the arguments are valid.
        let status = unsafe { vwd_decoder_attend(decoder.0, &args, backend.stream()) };
        assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, pieces);
        assert_eq!(engine.k.read_floats(), engine.keys, "keys after an error");
    };
    fails(attend, &["decoder", "no step", "vwd_decoder_begin"]);
    let (lens, table) = (ints(backend, &[9, 2]), ints(backend, &[0, 1]));
    let two = Tensor::ints(backend, I32, &Array::new(&[2, 2], vec![0, 1, 2, 3]), &Layout::default());
    let step = vwd_decoder_step { positions: 2, seq_lens: lens.c(), page_table: two.c(), ..args() };
    let refused = |step: vwd_decoder_step, pieces: &[&str]| {
        // SAFETY: the arguments are valid.
        let status = unsafe { vwd_decoder_begin(decoder.0, &step, backend.stream()) };
        assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, pieces);
    };
    refused(vwd_decoder_step { positions: 3, ..step }, &["positions", "3", "max_positions, 2"]);
    refused(vwd_decoder_step { mode: 3, ..step }, &["mode", "3"]);
    refused(vwd_decoder_step { mode: 1, modes: lens.c(), ..step }, &["mode", "0 beside modes"]);
    refused(vwd_decoder_step { page_table: table.c(), ..step }, &["page_table", "shape [2]"]);
    decoder.begin(backend, &step);
    fails(vwd_decoder_attend_args { layer: 1, ..attend }, &["layer", "1", "0 … 0"]);
    fails(vwd_decoder_attend_args { new_v: absent(), ..attend }, &["new_v", "NULL"]);
    fails(vwd_decoder_attend_args { q: new.c(), ..attend }, &["q", "Hq=4"]);
    fails(vwd_decoder_attend_args { out: new.c(), ..attend }, &["out", "Hq=4"]);
    fails(vwd_decoder_attend_args { k: new.c(), ..attend }, &["k", "pages=4"]);
    fails(vwd_decoder_attend_args { sinks: lens.c(), ..attend }, &["sinks", "int32"]);
    decoder.attend(backend, &attend);
}
