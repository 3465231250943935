//! Sessions that check contents: what is right passes and gives the same bits, and what is wrong is named.

use crate::Case;
use crate::support::maps::Map;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    contents_of_attention_are_checked,
    contents_of_lists_of_positions_and_slots_are_checked,
    contents_of_repair_and_merge_are_checked,
    contents_of_selection_are_checked,
    contents_of_index_update_are_checked,
    contents_of_verification_and_packing_are_checked,
    contents_of_gather_are_checked,
    contents_of_topk_and_predictor_are_checked,
    contents_of_forecast_are_checked,
    contents_of_the_cache_are_checked,
];

/// An input whose contents are checked.
pub struct Input<'b> {
    pub tensor: Tensor<'b>,
    good: Array<f64>,
}

impl<'b> Input<'b> {
    pub fn ints(backend: &'b Backend, shape: &[usize], values: &[i64]) -> Input<'b> {
        let good = Array::new(shape, values.iter().map(|&x| x as f64).collect());
        let values = Array::new(shape, values.to_vec());
        Input { tensor: Tensor::ints(backend, I32, &values, &Layout::default()), good }
    }

    pub fn floats(backend: &'b Backend, shape: &[usize], values: &[f64]) -> Input<'b> {
        let good = Array::new(shape, values.to_vec());
        Input { tensor: Tensor::floats(backend, F32, &good, &Layout::default()), good }
    }

    pub fn c(&self) -> vwd_tensor {
        self.tensor.c()
    }

    fn refill(&self, values: &Array<f64>) {
        match self.tensor.dtype {
            I32 => self.tensor.refill_ints(&values.map(|&x| x as i64)),
            _ => self.tensor.refill_floats(values),
        }
    }

    /// Element `at` has this value while `call` runs.
    pub fn with<R>(&self, at: usize, value: f64, call: impl FnOnce() -> R) -> R {
        let mut wrong = self.good.clone();
        wrong.data[at] = value;
        self.refill(&wrong);
        let result = call();
        self.refill(&self.good);
        result
    }
}

/// An input, one of its elements, a value that it must not have, and the message.
pub type Wrong<'t, 'b> = (&'t Input<'b>, usize, f64, &'static str);

/// Makes a call in the backend's session and in one that checks: the outputs are the same. Then each wrong value is named, and no
/// output is written.
pub fn check(
    backend: &Backend,
    outputs: &[&Tensor],
    wrong: &[Wrong],
    call: impl Fn(*const vwd_session, vwd_stream) -> vwd_status,
) {
    let (checked, stream) = (backend.checking(), backend.stream());
    backend.finish(call(backend.session(), stream));
    let expected: Vec<_> = outputs.iter().map(|t| t.read_memory()).collect();
    outputs.iter().for_each(|t| t.repoison());
    backend.finish(call(checked.session(), stream));
    for (n, (output, expected)) in outputs.iter().zip(&expected).enumerate() {
        assert!(output.read_memory() == *expected, "output {n} differs in a session that checks contents");
        output.repoison();
    }
    for &(input, at, value, text) in wrong {
        let status = input.with(at, value, || call(checked.session(), stream));
        assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, &[]);
        assert_eq!(last_error(), text);
        outputs.iter().for_each(|t| t.assert_untouched("an output"));
    }
    backend.finish(call(checked.session(), stream));
    outputs.iter().for_each(|t| t.repoison());
}

const PLAIN: Layout = Layout { order: vec![], gap: 0, lead: 0, reversed: vec![], expanded: vec![] };
const DIM: usize = 16;

fn normals<'b>(backend: &'b Backend, rng: &mut Rng, dtype: DType, shape: &[usize]) -> Tensor<'b> {
    Tensor::floats(backend, dtype, &rng.normals(shape), &PLAIN)
}

/// Three sequences of 6, 8 and no tokens in pages of 4; the last one's row of the table holds garbage.
struct Sequences<'b> {
    k: Tensor<'b>,
    v: Tensor<'b>,
    table: Input<'b>,
    lens: Input<'b>,
}

const PAGES: usize = 4;

impl<'b> Sequences<'b> {
    fn new(backend: &'b Backend, rng: &mut Rng, lens: [i64; 3]) -> Sequences<'b> {
        let shape = [PAGES, 4, 1, DIM];
        Sequences {
            k: normals(backend, rng, F32, &shape),
            v: normals(backend, rng, F32, &shape),
            table: Input::ints(backend, &[3, 3], &[2, 0, 99, 1, 3, 99, 77, 77, 99]),
            lens: Input::ints(backend, &[3], &lens),
        }
    }

    fn kv(&self) -> vwd_paged_kv {
        let (k, v, page_table, seq_lens) = (self.k.c(), self.v.c(), self.table.c(), self.lens.c());
        vwd_paged_kv { k, v, page_table, seq_lens, ..args() }
    }
}

fn contents_of_attention_are_checked(backend: &Backend) {
    rounds(1, |rng| {
        let s = Sequences::new(backend, rng, [6, 8, 0]);
        let (q, out) = (normals(backend, rng, F32, &[3, 2, DIM]), Tensor::poisoned(backend, F32, &[3, 2, DIM], &PLAIN));
        let sinks = Input::floats(backend, &[2], &[f64::NEG_INFINITY, 0.5]);
        // The third sequence has no tokens: its list and its pages may hold anything. So may entries past counts.
        let ids = Input::ints(backend, &[3, 1, 3], &[0, 1, -9, 1, 77, 77, 5, 5, 5]);
        let counts = Input::ints(backend, &[3, 1], &[2, 1, 50]);
        let kv = s.kv();
        let list = vwd_block_list { ids: ids.c(), counts: counts.c(), slots: absent() };
        let call = |list: vwd_block_list, kv: &vwd_paged_kv, session, stream| {
            let block_size = if list.ids.data.is_null() { 0 } else { 4 };
            let args = vwd_attention_args { block_size, kv, list, q: q.c(), sinks: sinks.c(), out: out.c(), ..args() };
            // SAFETY: everything is alive until the call has passed.
            unsafe { vwd_attention(session, &args, stream) }
        };
        let shared: &[Wrong] = &[
            (&s.lens, 1, 5000.0, "kv.seq_lens[1]: 5000; expected 0 to 12"),
            (&s.lens, 2, -3.0, "kv.seq_lens[2]: −3; expected 0 to 12"),
            (&s.table, 3, 99.0, "kv.page_table[1, 0]: 99; expected −1 or 0 to 3"),
            (&s.table, 1, -2.0, "kv.page_table[0, 1]: −2; expected −1 or 0 to 3"),
            (&sinks, 1, f64::NAN, "sinks[1]: NaN; expected a number"),
        ];
        check(backend, &[&out], shared, |session, stream| call(list_absent(), &kv, session, stream));
        let lists: &[Wrong] = &[
            (&counts, 0, 4.0, "list.counts[0, 0]: 4; expected 0 to 3"),
            (&counts, 1, -1.0, "list.counts[1, 0]: −1; expected 0 to 3"),
            (&ids, 1, 2.0, "list.ids[0, 0, 1]: 2; expected 0 to 1"),
            (&ids, 3, -1.0, "list.ids[1, 0, 0]: −1; expected 0 to 1"),
            (&ids, 1, 0.0, "list.ids[0, 0, 1]: 0; expected more than the 0 before it"),
        ];
        check(backend, &[&out], &[shared, lists].concat(), |session, stream| call(list, &kv, session, stream));
        // −1 stands for a page that holds no tokens.
        s.table.with(1, -1.0, || check(backend, &[&out], &[], |session, stream| call(list, &kv, session, stream)));

        let bytes = vec![0x38; PAGES * 4 * DIM];
        let keys = Tensor::raw(backend, F8E4M3, &[PAGES, 4, 1, DIM], &bytes, &PLAIN);
        let scales = Input::floats(backend, &[1], &[0.5]);
        let kv = vwd_paged_kv { k: keys.c(), v: keys.c(), k_scale: scales.c(), v_scale: scales.c(), ..s.kv() };
        let wrong: &[Wrong] = &[
            (&scales, 0, -0.5, "kv.k_scale[0]: -0.5; expected a finite number, 0 or above"),
            (&scales, 0, f64::INFINITY, "kv.k_scale[0]: inf; expected a finite number, 0 or above"),
        ];
        check(backend, &[&out], wrong, |session, stream| call(list, &kv, session, stream));
    });
}

fn list_absent() -> vwd_block_list {
    vwd_block_list { ids: absent(), counts: absent(), slots: absent() }
}

fn contents_of_lists_of_positions_and_slots_are_checked(backend: &Backend) {
    rounds(1, |rng| {
        // Rows 0 and 1 of the first sequence see 4 and 5 tokens; the second has one row, the third none.
        let s = Sequences::new(backend, rng, [5, 8, 0]);
        let q_lens = Input::ints(backend, &[3], &[2, 1, 0]);
        let q = normals(backend, rng, F32, &[3, 2, 2, DIM]);
        let out = Tensor::poisoned(backend, F32, &[3, 2, 2, DIM], &PLAIN);
        let ids = Input::ints(backend, &[3, 2, 1, 2], &[0, 9, 0, 1, 0, 1, 9, 9, 9, 9, 9, 9]);
        let counts = Input::ints(backend, &[3, 2, 1], &[1, 2, 2, 50, 50, -50]);
        let slots = Input::ints(backend, &[3, 2, 1, 2], &[3, 9, 3, -1, 2, 0, 9, 9, 9, 9, 9, 9]);
        let call = |kv: vwd_paged_kv, slots: vwd_tensor, session, stream| {
            let list = vwd_block_list { ids: ids.c(), counts: counts.c(), slots };
            let (q, q_lens, out) = (q.c(), q_lens.c(), out.c());
            let args = vwd_attention_args { block_size: 4, kv: &kv, list, q, q_lens, out, ..args() };
            // SAFETY: everything is alive until the call has passed.
            unsafe { vwd_attention(session, &args, stream) }
        };
        let wrong: &[Wrong] = &[
            (&q_lens, 0, 3.0, "q_lens[0]: 3; expected 0 to 2"),
            (&counts, 2, 3.0, "list.counts[1, 0, 0]: 3; expected 0 to 2"),
            (&ids, 0, 1.0, "list.ids[0, 0, 0, 0]: 1; expected 0"),
            (&ids, 3, 2.0, "list.ids[0, 1, 0, 1]: 2; expected 0 to 1"),
            (&ids, 4, 1.0, "list.ids[1, 0, 0, 1]: 1; expected more than the 1 before it"),
        ];
        check(backend, &[&out], wrong, |session, stream| call(s.kv(), absent(), session, stream));
        let pool = vwd_paged_kv { page_table: absent(), ..s.kv() };
        let of_slots: &[Wrong] = &[
            (&slots, 0, 4.0, "list.slots[0, 0, 0, 0]: 4; expected −1 or 0 to 3"),
            (&slots, 5, -2.0, "list.slots[1, 0, 0, 1]: −2; expected −1 or 0 to 3"),
        ];
        check(backend, &[&out], &[wrong, of_slots].concat(), |session, stream| call(pool, slots.c(), session, stream));
    });
}

fn contents_of_repair_and_merge_are_checked(backend: &Backend) {
    rounds(1, |rng| {
        let s = Sequences::new(backend, rng, [6, 8, 0]);
        let (q, out) = (normals(backend, rng, F32, &[3, 2, DIM]), Tensor::poisoned(backend, F32, &[3, 2, DIM], &PLAIN));
        let lists = [[0, 9, 0, 1, 9, 9], [1, 9, 1, 9, 9, 9]].map(|ids| Input::ints(backend, &[3, 1, 2], &ids));
        let counts = [[1, 2, 9], [1, 1, -9]].map(|counts| Input::ints(backend, &[3, 1], &counts));
        let list = |n: usize| vwd_block_list { ids: lists[n].c(), counts: counts[n].c(), slots: absent() };
        let acc = normals(backend, rng, F32, &[3, 2, DIM]);
        let m = normals(backend, rng, F32, &[3, 2]);
        let l = Input::floats(backend, &[3, 2], &[1.0, 2.0, 1.0, 3.0, 0.0, 0.0]);
        let state = vwd_attention_state { acc: acc.c(), m: m.c(), l: l.c() };
        let kv = s.kv();
        let wrong: &[Wrong] = &[
            (&s.lens, 0, 13.0, "kv.seq_lens[0]: 13; expected 0 to 12"),
            (&s.table, 0, 4.0, "kv.page_table[0, 0]: 4; expected −1 or 0 to 3"),
            (&counts[0], 0, 3.0, "predicted.counts[0, 0]: 3; expected 0 to 2"),
            (&lists[0], 3, 0.0, "predicted.ids[1, 0, 1]: 0; expected more than the 0 before it"),
            (&lists[1], 2, 2.0, "selected.ids[1, 0, 0]: 2; expected 0 to 1"),
        ];
        check(backend, &[&out], wrong, |session, stream| {
            let args = vwd_repair_args {
                mode: VWD_REPAIR_SUPERSET,
                block_size: 4,
                kv: &kv,
                q: q.c(),
                predicted: list(0),
                selected: list(1),
                predicted_state: state,
                out: out.c(),
                ..args()
            };
            // SAFETY: everything is alive until the call has passed.
            unsafe { vwd_repair(session, &args, stream) }
        });
        let sums = Input::floats(backend, &[3, 2], &[1.0; 6]);
        let inputs = [state, vwd_attention_state { l: sums.c(), ..state }];
        let wrong: &[Wrong] = &[
            (&sums, 3, f64::NAN, "inputs[1].l[1, 1]: NaN; expected a finite number, 0 or above"),
            (&l, 2, -1.0, "inputs[0].l[1, 0]: -1; expected a finite number, 0 or above"),
        ];
        check(backend, &[&out], wrong, |session, stream| {
            let args = vwd_merge_states_args { input_count: 2, inputs: inputs.as_ptr(), out: out.c(), ..args() };
            // SAFETY: everything is alive until the call has passed.
            unsafe { vwd_merge_states(session, &args, stream) }
        });
    });
}

/// An index of three sequences of 6, 8 and no tokens, through a table with pages of `rows` summaries.
fn index<'b>(backend: &'b Backend, rng: &mut Rng, rows: usize) -> ([Tensor<'b>; 2], Input<'b>) {
    let table = Input::ints(backend, &[3, 3], &[2, 0, 99, 1, 3, 99, 77, 77, 99]);
    ([0, 1].map(|_| normals(backend, rng, F32, &[PAGES, rows, 1, DIM])), table)
}

fn contents_of_selection_are_checked(backend: &Backend) {
    rounds(1, |rng| {
        let lens = Input::ints(backend, &[3], &[6, 8, 0]);
        let budgets = Input::ints(backend, &[3], &[1, 2, 0]);
        let q = normals(backend, rng, F32, &[3, 2, DIM]);
        let outputs = [&[3, 1, 2][..], &[3, 1]].map(|shape| Tensor::poisoned(backend, I32, shape, &PLAIN));
        let selected = vwd_block_list { ids: outputs[0].c(), counts: outputs[1].c(), slots: absent() };
        let ([max, min], table) = index(backend, rng, 1);
        let extremes = vwd_index {
            kind: VWD_INDEX_MINMAX,
            block_size: 4,
            table: table.c(),
            key_max: max.c(),
            key_min: min.c(),
            ..args()
        };
        let select = |method, index: &vwd_index, candidates, session, stream| {
            let args = vwd_select_blocks_args {
                method,
                block_size: 4,
                k: 2,
                index,
                q: q.c(),
                seq_lens: lens.c(),
                budgets: budgets.c(),
                candidates,
                selected,
                ..args()
            };
            // SAFETY: everything is alive until the call has passed.
            unsafe { vwd_select_blocks(session, &args, stream) }
        };
        let wrong: &[Wrong] = &[
            (&lens, 0, -1.0, "seq_lens[0]: −1; expected 0 or above"),
            (&table, 4, 4.0, "index.table[1, 1]: 4; expected −1 or 0 to 3"),
            (&budgets, 2, 3.0, "budgets[2]: 3; expected 0 to 2"),
        ];
        let [ids, counts] = &outputs;
        check(backend, &[ids, counts], wrong, |session, stream| {
            select(VWD_SELECT_MINMAX, &extremes, list_absent(), session, stream)
        });

        let codes = Tensor::ints(backend, U8, &Array::filled(&[PAGES, 4, 1, 1], 0x21), &PLAIN);
        let [scale, least] =
            [1.0, 0.0].map(|x| Tensor::floats(backend, F16, &Array::filled(&[PAGES, 4, 1], x), &PLAIN));
        let channels = Input::ints(backend, &[1, 2], &[3, 7]);
        let labels = vwd_index {
            kind: VWD_INDEX_LABEL,
            table: table.c(),
            labels: codes.c(),
            label_scale: scale.c(),
            label_min: least.c(),
            channels: channels.c(),
            ..args()
        };
        let blocks = Input::ints(backend, &[3, 1, 2], &[0, 1, 1, 9, 9, 9]);
        let block_counts = Input::ints(backend, &[3, 1], &[2, 1, 9]);
        let candidates = vwd_block_list { ids: blocks.c(), counts: block_counts.c(), slots: absent() };
        let of_candidates: &[Wrong] = &[
            (&channels, 1, 16.0, "index.channels[0, 1]: 16; expected 0 to 15"),
            (&block_counts, 0, 3.0, "candidates.counts[0, 0]: 3; expected 0 to 2"),
            (&blocks, 0, 2.0, "candidates.ids[0, 0, 0]: 2; expected 0 to 1"),
            (&blocks, 0, 1.0, "candidates.ids[0, 0, 1]: 1; expected more than the 1 before it"),
        ];
        let wrong = [wrong, of_candidates].concat();
        check(backend, &[ids, counts], &wrong, |session, stream| {
            select(VWD_SELECT_LABEL_MASS, &labels, candidates, session, stream)
        });
        check(backend, &[ids, counts], &wrong, |session, stream| {
            let args = vwd_select_tokens_args {
                block_size: 4,
                k: 2,
                index: &labels,
                q: q.c(),
                seq_lens: lens.c(),
                budgets: budgets.c(),
                candidates,
                selected,
                ..args()
            };
            // SAFETY: everything is alive until the call has passed.
            unsafe { vwd_select_tokens(session, &args, stream) }
        });
    });
}

fn contents_of_index_update_are_checked(backend: &Backend) {
    rounds(1, |rng| {
        let s = Sequences::new(backend, rng, [6, 8, 0]);
        let ([max, min], table) = index(backend, rng, 1);
        let means = normals(backend, rng, F32, &[PAGES, 2, 1, DIM]);
        // Only the second page of the second sequence is read, and only its second block is written.
        let begin = Input::ints(backend, &[3], &[0, 5, 0]);
        let update = |index: &vwd_index, session, stream| {
            let (k, page_table, seq_lens, begin) = (s.k.c(), s.table.c(), s.lens.c(), begin.c());
            let args = vwd_index_update_args { index, k, page_table, seq_lens, begin, ..args() };
            // SAFETY: everything is alive until the call has passed.
            unsafe { vwd_index_update(session, &args, stream) }
        };
        let extremes = vwd_index {
            kind: VWD_INDEX_MINMAX,
            block_size: 4,
            table: table.c(),
            key_max: max.c(),
            key_min: min.c(),
            ..args()
        };
        let wrong: &[Wrong] = &[
            (&s.lens, 1, 13.0, "seq_lens[1]: 13; expected 0 to 12"),
            (&begin, 1, 9.0, "begin[1]: 9; expected 0 to 8"),
            (&begin, 0, -1.0, "begin[0]: −1; expected 0 to 6"),
            (&s.table, 4, 5.0, "page_table[1, 1]: 5; expected −1 or 0 to 3"),
            (&table, 0, -2.0, "index.table[0, 0]: −2; expected −1 or 0 to 3"),
        ];
        check(backend, &[&max, &min], wrong, |session, stream| update(&extremes, session, stream));
        // A block of two pages is summarised from both, though the tokens before `begin` are not new.
        let of_two_pages = vwd_index { block_size: 8, ..extremes };
        let wrong: &[Wrong] = &[(&s.table, 3, -1.0, "page_table[1, 0]: −1; expected 0 to 3")];
        check(backend, &[&max, &min], wrong, |session, stream| update(&of_two_pages, session, stream));
        let unread = [&s.table, &table].map(|table| table.good.clone());
        for (input, good) in [&s.table, &table].into_iter().zip(&unread) {
            let mut open = good.clone();
            open.data[3] = 1000.0;
            input.refill(&open);
        }
        // The rows of the first block are not written either way: what the page was is not read.
        let checked = backend.checking();
        backend.finish(update(&extremes, checked.session(), backend.stream()));
        s.table.refill(&unread[0]);
        table.refill(&unread[1]);
        // Windows of 4 tokens every 2: 2 a page. Two sequences have 2 and 3 of them.
        let windows =
            vwd_index { kind: VWD_INDEX_MEAN, window: 4, stride: 2, table: table.c(), means: means.c(), ..args() };
        let wrong: &[Wrong] = &[
            (&table, 0, 4.0, "index.table[0, 0]: 4; expected −1 or 0 to 3"),
            (&table, 4, 4.0, "index.table[1, 1]: 4; expected −1 or 0 to 3"),
        ];
        table.with(1, 1000.0, || check(backend, &[&means], &[], |session, stream| update(&windows, session, stream)));
        check(backend, &[&means], wrong, |session, stream| update(&windows, session, stream));
    });
}

fn contents_of_verification_and_packing_are_checked(backend: &Backend) {
    rounds(1, |rng| {
        let ints = |shape: &[usize], rng: &mut Rng| {
            Tensor::ints(backend, I32, &Array::from_fn(shape, |_| rng.int(-1..=2)), &PLAIN)
        };
        let (draft, target) = (ints(&[3, 4], rng), ints(&[3, 5], rng));
        let lens = Input::ints(backend, &[3], &[4, 0, 2]);
        let [accepted, next_token] = [0, 1].map(|_| Tensor::poisoned(backend, I32, &[3], &PLAIN));
        let verify = vwd_verify_args {
            draft: draft.c(),
            target: target.c(),
            draft_lens: lens.c(),
            accepted: accepted.c(),
            next_token: next_token.c(),
            ..args()
        };
        let wrong: &[Wrong] = &[
            (&lens, 1, 5.0, "draft_lens[1]: 5; expected 0 to 4"),
            (&lens, 2, -1.0, "draft_lens[2]: −1; expected 0 to 4"),
        ];
        check(backend, &[&accepted, &next_token], wrong, |session, stream| {
            // SAFETY: everything is alive until the call has passed.
            unsafe { vwd_verify(session, &verify, stream) }
        });
        // A draft without tokens ends where it begins.
        let (flat, bonus) = (ints(&[9], rng), ints(&[3], rng));
        let ends = Input::ints(backend, &[3], &[4, 4, 9]);
        let one_after_the_other = vwd_verify_args {
            draft: flat.c(),
            target: flat.c(),
            draft_lens: absent(),
            draft_ends: ends.c(),
            bonus: bonus.c(),
            ..verify
        };
        let wrong_ends: &[Wrong] = &[
            (&ends, 0, -1.0, "draft_ends[0]: −1; expected 0 to 9"),
            (&ends, 2, 10.0, "draft_ends[2]: 10; expected 0 to 9"),
            (&ends, 1, 3.0, "draft_ends[1]: 3; expected no less than the 4 before it"),
        ];
        check(backend, &[&accepted, &next_token], wrong_ends, |session, stream| {
            // SAFETY: everything is alive until the call has passed.
            unsafe { vwd_verify(session, &one_after_the_other, stream) }
        });
        let rows = normals(backend, rng, F32, &[3, 4, 8]);
        let packed = Tensor::poisoned(backend, F32, &[12, 8], &PLAIN);
        let offsets = Tensor::poisoned(backend, I32, &[4], &PLAIN);
        let (row_array, packed_array) = ([rows.c()], [packed.c()]);
        let both = vwd_verify_pack_args {
            tensor_count: 1,
            rows: row_array.as_ptr(),
            packed: packed_array.as_ptr(),
            draft: draft.c(),
            target: target.c(),
            draft_lens: lens.c(),
            accepted: accepted.c(),
            next_token: next_token.c(),
            offsets: offsets.c(),
            ..args()
        };
        check(backend, &[&accepted, &next_token, &packed, &offsets], wrong, |session, stream| {
            // SAFETY: everything is alive until the call has passed.
            unsafe { vwd_verify_pack(session, &both, stream) }
        });
        let counts = Input::ints(backend, &[3], &[4, 0, 2]);
        let pack = vwd_pack_args {
            tensor_count: 1,
            rows: row_array.as_ptr(),
            packed: packed_array.as_ptr(),
            accepted: counts.c(),
            offsets: offsets.c(),
            ..args()
        };
        let wrong: &[Wrong] = &[(&counts, 2, 5.0, "accepted[2]: 5; expected 0 to 4")];
        check(backend, &[&packed, &offsets], wrong, |session, stream| {
            // SAFETY: everything is alive until the call has passed.
            unsafe { vwd_pack(session, &pack, stream) }
        });
    });
}

fn contents_of_gather_are_checked(backend: &Backend) {
    rounds(1, |rng| {
        let source = normals(backend, rng, F32, &[4, 8]);
        let target = Tensor::poisoned(backend, F32, &[5, 8], &PLAIN);
        for place in [Place::Session, Place::Host] {
            fn moved<'b>(input: Input<'b>, place: Place) -> Input<'b> {
                Input { tensor: input.tensor.moved_to(place), ..input }
            }
            // The third entry copies nothing, so that its target may be another's; the last one is past the count.
            let sources = moved(Input::ints(backend, &[5], &[3, 0, -1, 2, 99]), place);
            let targets = moved(Input::ints(backend, &[5], &[1, 4, 4, 2, 99]), place);
            let count = moved(Input::ints(backend, &[1], &[4]), place);
            let gather = vwd_gather_blocks_args {
                source: source.c(),
                target: target.c(),
                source_ids: sources.c(),
                target_ids: targets.c(),
                count: count.c(),
                ..args()
            };
            let wrong: &[Wrong] = &[
                (&count, 0, 6.0, "count[0]: 6; expected 0 to 5"),
                (&sources, 1, 4.0, "source_ids[1]: 4; expected −1 or 0 to 3"),
                (&sources, 3, -2.0, "source_ids[3]: −2; expected −1 or 0 to 3"),
                (&targets, 0, 5.0, "target_ids[0]: 5; expected −1 or 0 to 4"),
                (&targets, 3, 1.0, "target_ids[3]: 1; expected a number that [0] does not have, too"),
                (&sources, 2, 1.0, "target_ids[2]: 4; expected a number that [1] does not have, too"),
            ];
            check(backend, &[&target], wrong, |session, stream| {
                // SAFETY: everything is alive until the call has passed.
                unsafe { vwd_gather_blocks(session, &gather, stream) }
            });
        }
    });
}

fn contents_of_topk_and_predictor_are_checked(backend: &Backend) {
    rounds(1, |rng| {
        let scores = normals(backend, rng, F32, &[3, 6]);
        let (lens, budgets) = (Input::ints(backend, &[3], &[6, 0, 3]), Input::ints(backend, &[3], &[2, 0, 1]));
        let outputs = [&[3, 2][..], &[3]].map(|shape| Tensor::poisoned(backend, I32, shape, &PLAIN));
        let [ids, counts] = &outputs;
        let topk = vwd_topk_args {
            k: 2,
            scores: scores.c(),
            lens: lens.c(),
            budgets: budgets.c(),
            ids: ids.c(),
            counts: counts.c(),
            ..args()
        };
        let wrong: &[Wrong] =
            &[(&lens, 0, 7.0, "lens[0]: 7; expected 0 to 6"), (&budgets, 2, -1.0, "budgets[2]: −1; expected 0 to 2")];
        check(backend, &[ids, counts], wrong, |session, stream| {
            // SAFETY: everything is alive until the call has passed.
            unsafe { vwd_topk(session, &topk, stream) }
        });

        let [level, trend] = [0, 1].map(|_| normals(backend, rng, F32, &[3, 1, 4]));
        let state = vwd_predictor_state { level: level.c(), trend: trend.c() };
        let lens = Input::ints(backend, &[3], &[16, 0, 3]);
        let outputs = [&[3, 1, 3][..], &[3, 1]].map(|shape| Tensor::poisoned(backend, I32, shape, &PLAIN));
        let [ids, counts] = &outputs;
        let predict = vwd_predictor_predict_args {
            block_size: 4,
            k: 2,
            ratio: 1.5,
            state,
            seq_lens: lens.c(),
            budgets: budgets.c(),
            predicted: vwd_block_list { ids: ids.c(), counts: counts.c(), slots: absent() },
            ..args()
        };
        let of_lens: Wrong = (&lens, 0, 17.0, "seq_lens[0]: 17; expected 0 to 16");
        let wrong: &[Wrong] = &[of_lens, (&budgets, 1, 3.0, "budgets[1]: 3; expected 0 to 2")];
        check(backend, &[ids, counts], wrong, |session, stream| {
            // SAFETY: everything is alive until the call has passed.
            unsafe { vwd_predictor_predict(session, &predict, stream) }
        });
        let scores = normals(backend, rng, F32, &[3, 1, 4]);
        let update =
            vwd_predictor_update_args { block_size: 4, state, seq_lens: lens.c(), scores: scores.c(), ..args() };
        check(backend, &[&level, &trend], &[of_lens], |session, stream| {
            // SAFETY: everything is alive until the call has passed.
            unsafe { vwd_predictor_update(session, &update, stream) }
        });
        let rows = Input::ints(backend, &[2], &[-1, 2]);
        let reset = vwd_predictor_reset_args { state, rows: rows.c(), ..args() };
        let wrong: &[Wrong] = &[(&rows, 1, 3.0, "rows[1]: 3; expected −1 or 0 to 2")];
        check(backend, &[&level, &trend], wrong, |session, stream| {
            // SAFETY: everything is alive until the call has passed.
            unsafe { vwd_predictor_reset(session, &reset, stream) }
        });
    });
}

/// A forecast belongs to its session, and so does a cache: each is made anew in the session that checks.
fn contents_of_forecast_are_checked(backend: &Backend) {
    rounds(1, |rng| {
        let map = Map::random(rng, [2, 16, 8], None, false);
        let checked = backend.checking();
        let forecasts = [map.load(backend), map.load(&checked)];
        let (x, q) = (normals(backend, rng, F32, &[3, 8]), Tensor::poisoned(backend, F32, &[3, 2, 16], &PLAIN));
        let positions = Input::ints(backend, &[3], &[0, 7, 100]);
        let frequencies = Input::floats(backend, &[8], &[0.5; 8]);
        let rope = vwd_rope { inv_freq: frequencies.c(), ..args() };
        let args = vwd_forecast_project_args { rope: &rope, x: x.c(), positions: positions.c(), q: q.c(), ..args() };
        let wrong: &[Wrong] = &[
            (&positions, 1, -5.0, "positions[1]: −5; expected 0 or above"),
            (&frequencies, 3, f64::NAN, "rope.inv_freq[3]: NaN; expected a finite number"),
        ];
        check(backend, &[&q], wrong, |session, stream| {
            let forecast = &forecasts[(session != backend.session()) as usize];
            // SAFETY: everything is alive until the call has passed.
            unsafe { vwd_forecast_project(forecast.0, &args, stream) }
        });
    });
}

struct Cache(*mut vwd_kv_cache);

impl Cache {
    /// A cache with two sequences that have room for 16 tokens each.
    fn new(backend: &Backend) -> Cache {
        let mut cache = std::ptr::null_mut();
        let options = vwd_kv_cache_options {
            dtype_code: F8E4M3.code as u32,
            dtype_bits: F8E4M3.bits as u32,
            token_scales: 1,
            max_blocks: 4,
            max_sequences: 3,
            ..small_cache()
        };
        // SAFETY: everything is valid.
        unsafe {
            assert_ok(vwd_kv_cache_create(backend.session(), &options, &mut cache));
            for n in 0..2 {
                let mut sequence = 9;
                assert_ok(vwd_kv_cache_add(cache, &mut sequence, backend.stream()));
                assert_eq!(sequence, n);
                assert_ok(vwd_kv_cache_extend(cache, sequence, 16, backend.stream()));
            }
        }
        Cache(cache)
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // SAFETY: created once; its calls have passed.
        unsafe { vwd_kv_cache_release(self.0) }
    }
}

fn contents_of_the_cache_are_checked(backend: &Backend) {
    rounds(1, |rng| {
        let checked = backend.checking();
        let caches = [Cache::new(backend), Cache::new(&checked)];
        let of = |session| caches[(session != backend.session()) as usize].0;
        // The last row is idle.
        let sequences = Input::ints(backend, &[3], &[1, 0, -1]);
        let begin = Input::ints(backend, &[3], &[0, 0, -7]);
        let lens = Input::ints(backend, &[3], &[5, 2, 99]);
        let bytes: Vec<u8> = (0..3 * 5 * DIM).map(|_| rng.int(0..=0x70) as u8).collect();
        let rows = Tensor::raw(backend, F8E4M3, &[3, 5, 1, DIM], &bytes, &PLAIN);
        let mut factors = vec![1.0; 15];
        factors[7..].fill(f64::NAN);
        factors[5..7].fill(0.5);
        let scales = Input::floats(backend, &[3, 5, 1], &factors);
        let append = vwd_kv_cache_append_args {
            sequences: sequences.c(),
            begin: begin.c(),
            lens: lens.c(),
            k: rows.c(),
            v: rows.c(),
            k_scale: scales.c(),
            v_scale: scales.c(),
            ..args()
        };
        let wrong: &[Wrong] = &[
            (&sequences, 0, 3.0, "sequences[0]: 3; expected −1 or 0 to 2"),
            (&sequences, 1, 1.0, "sequences[1]: 1; expected a number that [0] does not have, too"),
            (&begin, 0, 17.0, "begin[0]: 17; expected 0 to 16"),
            (&lens, 1, 6.0, "lens[1]: 6; expected 0 to 5"),
            (&scales, 6, -1.0, "k_scale[1, 1, 0]: -1; expected a finite number, 0 or above"),
        ];
        check(backend, &[], wrong, |session, stream| {
            // SAFETY: everything is alive until the call has passed.
            unsafe { vwd_kv_cache_append(of(session), &append, stream) }
        });
        let ids = Input::ints(backend, &[3, 1, 2], &[0, 1, 0, 99, 99, 99]);
        let counts = Input::ints(backend, &[3, 1], &[2, 1, 9]);
        let slots = Tensor::poisoned(backend, I32, &[3, 1, 2], &PLAIN);
        let wanted = vwd_block_list { ids: ids.c(), counts: counts.c(), slots: slots.c() };
        let resolve = vwd_kv_cache_resolve_args { sequences: sequences.c(), wanted, ..args() };
        let wrong: &[Wrong] = &[
            (&sequences, 1, -2.0, "sequences[1]: −2; expected −1 or 0 to 2"),
            (&counts, 1, 3.0, "wanted.counts[1, 0]: 3; expected 0 to 2"),
            (&ids, 1, 4.0, "wanted.ids[0, 0, 1]: 4; expected 0 to 3"),
        ];
        check(backend, &[&slots], wrong, |session, stream| {
            // SAFETY: everything is alive until the call has passed.
            unsafe { vwd_kv_cache_resolve(of(session), &resolve, stream) }
        });
    });
}
