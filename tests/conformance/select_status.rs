//! What selection promises whatever its inputs hold: how many blocks there are and which of them are forced follow from
//! lengths alone, and the status says what could not be scored.

use crate::Case;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    select_forces_the_newest_block_whatever_scores_and_index_hold,
    select_scores_nothing_for_a_nan_query_in_every_method,
    select_says_where_a_product_was_nan,
    select_of_a_short_index_and_the_longest_sequence_takes_little_memory,
    select_gives_positions_that_are_not_there_empty_lists,
    select_ranks_zeros_and_denormals_as_numbers,
    select_and_importance_take_any_extents_without_elements,
];

const METHODS: [u32; 5] =
    [VWD_SELECT_MINMAX, VWD_SELECT_MEAN_SOFTMAX, VWD_SELECT_MEAN_DOT, VWD_SELECT_LABEL_MASS, VWD_SELECT_AXIS];

const HEADS: usize = 2;
const DIM: usize = 16;
const BLOCK: usize = 4;

/// An index of each kind over `rows` summaries of one sequence, of ones but where `value` says otherwise.
struct Indices<'b> {
    floats: [Tensor<'b>; 3],
    axes: Tensor<'b>,
    labels: [Tensor<'b>; 4],
}

impl<'b> Indices<'b> {
    fn new(backend: &'b Backend, rows: usize, value: impl Fn(usize) -> f64) -> Indices<'b> {
        let plain = Layout::default();
        let of = |dtype, last: &[usize]| {
            let shape = [&[1, rows, HEADS], last].concat();
            Tensor::floats(backend, dtype, &Array::from_fn(&shape, |at| value(at[1])), &plain)
        };
        let codes = Array::filled(&[1, rows, HEADS, 1], 0x11);
        let channels = Array::from_fn(&[HEADS, 2], |at| at[1] as i64);
        Indices {
            floats: [0, 1, 2].map(|_| of(F32, &[DIM])),
            axes: of(F32, &[2 * DIM]),
            labels: [
                Tensor::ints(backend, U8, &codes, &plain),
                Tensor::floats(backend, F16, &Array::filled(&[1, rows, HEADS], 0.0), &plain),
                of(F16, &[]),
                Tensor::ints(backend, I32, &channels, &plain),
            ],
        }
    }

    /// Windows are blocks.
    fn c(&self, method: u32) -> vwd_index {
        let [max, min, means] = &self.floats;
        let [codes, scale, least, channels] = &self.labels;
        match method {
            VWD_SELECT_MINMAX => vwd_index {
                kind: VWD_INDEX_MINMAX,
                block_size: BLOCK as u32,
                key_max: max.c(),
                key_min: min.c(),
                ..args()
            },
            VWD_SELECT_AXIS => {
                vwd_index { kind: VWD_INDEX_AXIS, block_size: BLOCK as u32, axes: self.axes.c(), ..args() }
            }
            VWD_SELECT_LABEL_MASS => vwd_index {
                kind: VWD_INDEX_LABEL,
                labels: codes.c(),
                label_scale: scale.c(),
                label_min: least.c(),
                channels: channels.c(),
                ..args()
            },
            _ => vwd_index {
                kind: VWD_INDEX_MEAN,
                window: BLOCK as u32,
                stride: BLOCK as u32,
                means: means.c(),
                ..args()
            },
        }
    }
}

/// What one call gave for one sequence.
struct Selected {
    /// The ids of each list. Lists are in the order of positions (one where they share) and KV heads.
    ids: Vec<Vec<i64>>,
    status: Vec<i64>,
    /// [lists][places]
    scores: Array<f64>,
}

/// One sequence: `queries` [Q, HEADS, DIM] as q of rank 4 with lists of their own, of rank 3 if Q is 1.
struct Call<'a> {
    len: i64,
    queries: Array<f64>,
    q_len: Option<i64>,
    own: bool,
    cap: usize,
    /// Budget, first and last ones forced.
    choose: [u32; 3],
    places: usize,
    candidates: &'a [i64],
}

impl Call<'_> {
    fn run(&self, backend: &Backend, index: vwd_index, method: u32) -> Selected {
        self.run_any(backend, index, Some(method))
    }

    /// Without a method: of tokens.
    fn run_any(&self, backend: &Backend, index: vwd_index, method: Option<u32>) -> Selected {
        let plain = Layout::default();
        let count = self.queries.shape[0];
        let is_one = count == 1 && !self.own;
        let shape = if is_one { vec![1, HEADS, DIM] } else { vec![1, count, HEADS, DIM] };
        let q = Tensor::floats(backend, F32, &Array::new(&shape, self.queries.data.clone()), &plain);
        let ints = |a: &Array<i64>| Tensor::ints(backend, I32, a, &plain);
        let (lens, q_lens) = (ints(&Array::filled(&[1], self.len)), self.q_len.map(|n| ints(&Array::filled(&[1], n))));
        let per_head = if self.own { count } else { 1 };
        let lead = if self.own { vec![1, count, HEADS] } else { vec![1, HEADS] };
        let with = |last: usize| [&lead[..], &[last]].concat();
        // Tokens have a score for each that is selected.
        let places = if method.is_some() { self.places } else { self.cap };
        let given = self.candidates.repeat(per_head * HEADS);
        let candidates = [
            ints(&Array::new(&with(self.candidates.len()), given)),
            ints(&Array::filled(&lead, self.candidates.len() as i64)),
        ];
        let empty = |dtype, shape: &[usize]| Tensor::poisoned(backend, dtype, shape, &plain);
        let (ids, counts) = (empty(I32, &with(self.cap)), empty(I32, &lead));
        let (scores, status) = (empty(F32, &with(places)), empty(U32, &lead));
        let list = |ids: &Tensor, counts: &Tensor| vwd_block_list { ids: ids.c(), counts: counts.c(), slots: absent() };
        let none = vwd_block_list { ids: absent(), counts: absent(), slots: absent() };
        let reads = matches!(method, None | Some(VWD_SELECT_LABEL_MASS));
        let candidates = if reads { list(&candidates[0], &candidates[1]) } else { none };
        let ([k, init, local], q_lens) = (self.choose, q_lens.as_ref().map_or(absent(), Tensor::c));
        // SAFETY: the tensors are alive.
        backend.finish(unsafe {
            match method {
                Some(method) => vwd_select_blocks(
                    backend.session(),
                    &vwd_select_blocks_args {
                        method,
                        block_size: BLOCK as u32,
                        k,
                        init_blocks: init,
                        local_blocks: local,
                        index: &index,
                        q: q.c(),
                        q_lens,
                        seq_lens: lens.c(),
                        candidates,
                        selected: list(&ids, &counts),
                        scores: scores.c(),
                        status: status.c(),
                        ..args()
                    },
                    backend.stream(),
                ),
                None => vwd_select_tokens(
                    backend.session(),
                    &vwd_select_tokens_args {
                        block_size: BLOCK as u32,
                        k,
                        init_tokens: init,
                        local_tokens: local,
                        index: &index,
                        q: q.c(),
                        q_lens,
                        seq_lens: lens.c(),
                        candidates,
                        selected: list(&ids, &counts),
                        scores: scores.c(),
                        status: status.c(),
                        ..args()
                    },
                    backend.stream(),
                ),
            }
        });
        let (ids, counts) = (ids.read_ints(), counts.read_ints().data);
        let lists = ids.data.chunks(self.cap).zip(&counts);
        Selected {
            ids: lists.map(|(ids, &count)| ids[..count as usize].to_vec()).collect(),
            status: status.read_ints().data,
            scores: Array::new(&[per_head * HEADS, places], scores.read_floats().data),
        }
    }
}

fn ones(count: usize) -> Array<f64> {
    Array::filled(&[count, HEADS, DIM], 1.0)
}

const BY_LENGTH: Call = Call {
    len: 0,
    queries: Array { shape: vec![], data: vec![] },
    q_len: None,
    own: false,
    cap: 8,
    choose: [0, 0, 1],
    places: 64,
    candidates: &[],
};

/// One row short of the sequence: the last block is still there, and still forced.
fn select_forces_the_newest_block_whatever_scores_and_index_hold(backend: &Backend) {
    for (rows, places) in [(16, 16), (15, 16), (16, 15), (0, 0), (3, 2)] {
        let index = Indices::new(backend, rows * BLOCK, |_| 1.0);
        for method in METHODS {
            let index = vwd_index { ..index.c(method) };
            let index = match method {
                // Rows are tokens.
                VWD_SELECT_LABEL_MASS => index,
                _ => cut(index, rows as i64),
            };
            let call = Call { len: 61, queries: ones(1), choose: [1, 0, 1], places, candidates: &[0, 15], ..BY_LENGTH };
            let found = call.run(backend, index, method);
            assert_eq!(found.ids, [[15], [15]], "method {method}, {rows} rows, {places} places");
            // A window is full from four tokens on: the last block has none.
            let full = if matches!(method, VWD_SELECT_MEAN_SOFTMAX | VWD_SELECT_MEAN_DOT) { 15 } else { 16 };
            let missing = if rows < full { VWD_SELECT_NO_SUMMARY as i64 } else { 0 };
            let short = if places < 16 { VWD_SELECT_CLAMPED as i64 } else { 0 };
            assert_eq!(found.status, [missing | short; 2], "method {method}, {rows} rows, {places} places");
        }
    }
}

/// The first rows of an index.
fn cut(index: vwd_index, rows: i64) -> vwd_index {
    let mut index = index;
    for t in [&mut index.key_max, &mut index.key_min, &mut index.means, &mut index.axes] {
        t.shape[1] = rows;
    }
    index
}

/// Lists of their own: position 1 of head 0 asks with a NaN. Where they share, the other positions still do.
fn select_scores_nothing_for_a_nan_query_in_every_method(backend: &Backend) {
    let index = Indices::new(backend, 64, |row| row as f64 / 64.0);
    let mut queries = ones(3);
    queries[[1, 0, 7]] = f64::NAN;
    let all: Vec<i64> = (0..16).collect();
    for method in METHODS.map(Some).into_iter().chain([None]) {
        let call = Call { len: 64, choose: [6, 0, 1], cap: 64, candidates: &all, ..BY_LENGTH };
        let call = Call { queries: queries.clone(), own: true, ..call };
        let found = call.run_any(backend, index.c(method.unwrap_or(VWD_SELECT_LABEL_MASS)), method);
        let nan = VWD_SELECT_NAN as i64;
        assert_eq!(found.status, [0, 0, nan, 0, 0, 0], "method {method:?}");
        let asked = if method.is_some() { f64::NEG_INFINITY } else { 0.0 };
        let count = if method.is_some() { 16 } else { 6 };
        assert_eq!(found.scores.row([2])[..count], vec![asked; count], "method {method:?}");
        // Nothing is better than anything: the lowest, and what is forced.
        let last = if method.is_some() { 15 } else { 62 };
        assert_eq!(found.ids[2], [0, 1, 2, 3, 4, last], "method {method:?}");
        let shared = Call { own: false, ..call };
        let found = shared.run_any(backend, index.c(method.unwrap_or(VWD_SELECT_LABEL_MASS)), method);
        assert_eq!(found.status, [nan, 0], "method {method:?}");
        assert_ne!(found.ids[0], [0, 1, 2, 3, 4, last], "method {method:?}: the other positions still ask");
    }
}

fn select_says_where_a_product_was_nan(backend: &Backend) {
    let index = Indices::new(backend, 64, |row| if row == 5 { f64::NAN } else { 1.0 });
    for method in METHODS {
        // In an index of labels row 5 is a token of block 1.
        let at = if method == VWD_SELECT_LABEL_MASS { 1 } else { 5 };
        let call = Call { len: 64, queries: ones(1), choose: [16, 0, 0], cap: 16, candidates: &[0, 1, 2], ..BY_LENGTH };
        let found = call.run(backend, index.c(method), method);
        assert_eq!(found.status, [VWD_SELECT_NAN as i64; 2], "method {method}");
        let score = found.scores.row([0])[at];
        let others = found.scores.row([0])[0];
        assert!(score < others, "method {method}: {score} beside {others}");
    }
}

/// Scratch is sized by the summaries that there are.
fn select_of_a_short_index_and_the_longest_sequence_takes_little_memory(backend: &Backend) {
    let index = Indices::new(backend, 8, |row| row as f64);
    for (window, stride) in [(BLOCK as u32, BLOCK as u32), (1 << 30, 1), (1, 1 << 28), (u32::MAX, 1)] {
        // On CUDA the scores of the blocks that MEAN's windows reach lie side by side: here there are 2^28.
        let is_wide = window.max(stride) > BLOCK as u32 && backend.is_cuda();
        let is_taken =
            |method: &Option<u32>| !(is_wide && matches!(method, Some(VWD_SELECT_MEAN_SOFTMAX | VWD_SELECT_MEAN_DOT)));
        for method in METHODS.map(Some).into_iter().chain([None]).filter(is_taken) {
            let call =
                Call { len: i32::MAX as i64, queries: ones(1), choose: [5, 1, 1], candidates: &[1, 3], ..BY_LENGTH };
            let mut index = index.c(method.unwrap_or(VWD_SELECT_LABEL_MASS));
            if index.kind == VWD_INDEX_MEAN {
                (index.window, index.stride) = (window, stride);
            }
            let found = call.run_any(backend, index, method);
            let n = if method.is_some() { 1 << 29 } else { i32::MAX as i64 };
            for ids in found.ids {
                assert_eq!((ids.len(), ids[0], ids[4]), (5, 0, n - 1), "method {method:?}: {ids:?}");
            }
            // Candidate 3 lies past an index of labels.
            let is_mean = index.kind == VWD_INDEX_MEAN;
            let full = oracle::windows(i32::MAX as usize, window as usize, stride as usize);
            let missing = if is_mean && full <= 8 { 0 } else { VWD_SELECT_NO_SUMMARY as i64 };
            assert_eq!(found.status.iter().map(|s| s & !(VWD_SELECT_CLAMPED as i64)).collect::<Vec<_>>(), [missing; 2]);
        }
    }
}

fn select_gives_positions_that_are_not_there_empty_lists(backend: &Backend) {
    let index = Indices::new(backend, 64, |row| row as f64);
    for method in METHODS.map(Some).into_iter().chain([None]) {
        let index = index.c(method.unwrap_or(VWD_SELECT_LABEL_MASS));
        let call = Call { len: 2, choose: [2, 1, 1], candidates: &[0], ..BY_LENGTH };
        // Three positions for two tokens: the first stands before the sequence. The fourth is not there.
        let own = Call { queries: ones(4), q_len: Some(3), own: true, ..call };
        let counts: Vec<usize> = own.run_any(backend, index, method).ids.iter().map(Vec::len).collect();
        let third = if method.is_some() { 1 } else { 2 };
        assert_eq!(counts, [0, 0, 1, 1, third, third, 0, 0], "method {method:?}");
        for (q_len, count, status) in [(0, 0, 0), (-1, 0, VWD_SELECT_CLAMPED), (9, third, VWD_SELECT_CLAMPED)] {
            let shared = Call { q_len: Some(q_len), own: false, ..own.again() };
            let found = shared.run_any(backend, index, method);
            assert_eq!(found.ids.iter().map(Vec::len).collect::<Vec<_>>(), [count; 2], "method {method:?}");
            assert_eq!(found.status, [status as i64; 2], "method {method:?}, q_len {q_len}");
        }
        let nobody = Call { queries: ones(0), q_len: None, own: false, ..own.again() };
        assert_eq!(nobody.run_any(backend, index, method).ids, [[0i64; 0]; 2], "method {method:?}");
    }
}

impl Call<'_> {
    fn again(&self) -> Call<'_> {
        Call { queries: self.queries.clone(), ..*self }
    }
}

/// −0 and +0 are equal, and the smallest number is more than both.
fn select_ranks_zeros_and_denormals_as_numbers(backend: &Backend) {
    let tiny = f32::from_bits(1) as f64;
    let values = [-0.0, 0.0, tiny, -0.0, -tiny, 0.0];
    let index = Indices::new(backend, 6, |row| values[row]);
    let mut queries = Array::filled(&[1, HEADS, DIM], 0.0);
    (0..HEADS).for_each(|h| queries[[0, h, 3]] = 1.0);
    for method in [VWD_SELECT_MINMAX, VWD_SELECT_MEAN_DOT] {
        for (k, expected) in [(1, &[2][..]), (2, &[0, 2]), (5, &[0, 1, 2, 3, 5])] {
            let choose = [k, 0, 0];
            let call = Call { len: 24, queries: queries.clone(), choose, ..BY_LENGTH };
            let found = call.run(backend, index.c(method), method);
            assert_eq!(found.ids, [expected, expected], "method {method}");
        }
    }
}

/// Extents that would overflow are nothing to a tensor without elements.
fn select_and_importance_take_any_extents_without_elements(backend: &Backend) {
    let index = Indices::new(backend, 8, |_| 1.0);
    let many = 1i64 << 60;
    let plain = Layout::default();
    let nothing = Tensor::poisoned(backend, F32, &[0], &plain);
    let some = Tensor::poisoned(backend, I32, &[4], &plain);
    let shaped = |t: &Tensor, shape: &[i64]| {
        let mut c = vwd_tensor { ndim: shape.len() as i32, strides: [0; 5], ..t.c() };
        c.shape[..shape.len()].copy_from_slice(shape);
        c
    };
    let heads = HEADS as i64;
    let q = shaped(&nothing, &[0, many, DIM as i64]);
    let list =
        vwd_block_list { ids: shaped(&some, &[0, heads, 1]), counts: shaped(&some, &[0, heads]), slots: absent() };
    for method in METHODS.into_iter().filter(|&method| method != VWD_SELECT_MEAN_DOT) {
        let labels = method == VWD_SELECT_LABEL_MASS;
        let none = vwd_block_list { ids: absent(), counts: absent(), slots: absent() };
        let seq_lens = shaped(&some, &[0]);
        let (k, block_size, candidates) = (1, BLOCK as u32, if labels { list } else { none });
        let index = kept(index.c(method));
        let call =
            vwd_select_blocks_args { method, k, block_size, index, q, seq_lens, candidates, selected: list, ..args() };
        // SAFETY: the tensors are alive.
        backend.finish(unsafe { vwd_select_blocks(backend.session(), &call, backend.stream()) });
        if labels {
            let call =
                vwd_select_tokens_args { k, block_size, index, q, seq_lens, candidates, selected: list, ..args() };
            // SAFETY: as above.
            backend.finish(unsafe { vwd_select_tokens(backend.session(), &call, backend.stream()) });
        }
    }
    let channels = Tensor::poisoned(backend, I32, &[1, 2], &plain);
    let k = shaped(&nothing, &[0, 1, DIM as i64]);
    let call = vwd_channel_importance_args { q, k, channels: channels.c(), ..args() };
    // SAFETY: the tensors are alive.
    backend.finish(unsafe { vwd_channel_importance(backend.session(), &call, backend.stream()) });
    assert_eq!(channels.read_ints().data, [0, 1], "nothing is important: the first ones");
}
