//! vwd_compact.

use crate::Case;
use crate::support::oracle::Pages;
use crate::support::paged::random_table;
use crate::support::*;
use std::collections::BTreeSet;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    compact_moves_accepted_rows_and_nothing_else,
    compact_moves_rows_across_pages_of_any_size,
    compact_moves_paths_of_more_rows_than_are_moved_at_once,
    compact_moves_rows_and_their_scales_at_the_end_of_a_page,
    compact_splits_interleaved_keys_and_values,
    compact_takes_hundreds_of_caches,
    compact_of_a_path_that_stays_writes_nothing,
];

/// A compactor that releases itself.
pub struct Compactor(pub *mut vwd_compactor);

impl Compactor {
    pub fn new(backend: &Backend, caches: &[vwd_tensor]) -> Compactor {
        let options = vwd_compactor_options { cache_count: caches.len() as u32, caches: caches.as_ptr(), ..args() };
        let mut compactor = std::ptr::null_mut();
        // SAFETY: the pointers are valid.
        assert_ok(unsafe { vwd_compactor_create(backend.session(), &options, &mut compactor) });
        Compactor(compactor)
    }
}

impl Drop for Compactor {
    fn drop(&mut self) {
        // SAFETY: created once, released once.
        unsafe { vwd_compactor_release(self.0) };
    }
}

/// Where rows lie and which move.
struct Moves {
    table: Option<Array<i64>>,
    pages: usize,
    page: usize,
    bases: Array<i64>,
    path: Array<i64>,
    accepted: Option<Array<i64>>,
}

impl Moves {
    /// Trees of up to `nodes` nodes; some positions lie past the pages, and some pages are missing.
    fn random(rng: &mut Rng, page: usize, nodes: usize) -> Moves {
        let (batch, max_pages) = (rng.size(0..=4), nodes.div_ceil(page) + rng.size(1..=2));
        let mut table = (!rng.one_in(5)).then(|| random_table(rng, batch, max_pages));
        let pages = table.as_ref().map_or(batch, |table| table.data.iter().max().map_or(0, |&most| most as usize + 1));
        if let Some(table) = &mut table {
            for page in &mut table.data {
                if rng.one_in(8) {
                    *page = rng.pick(&[-1, pages as i64, i32::MAX as i64, i32::MIN as i64]);
                }
            }
        }
        let room = (max_pages * page) as i64;
        let bases = Array::from_fn(&[batch], |_| match rng.size(0..=9) {
            0 => -rng.int(1..=3),
            1 => room - rng.int(0..=3),
            2 => i32::MAX as i64 - rng.int(0..=3),
            // Past all pages, though its lower 32 bits are not.
            3 => (1 << 32) + rng.int(0..=3),
            _ => rng.int(0..=(room - nodes as i64).max(0)),
        });
        let places = rng.size(1..=nodes + 2);
        let path = (0..batch).flat_map(|_| random_path(rng, nodes, places)).collect();
        let accepted = rng.one_in(2).then(|| Array::from_fn(&[batch], |_| rng.int(-2..=places as i64 + 2)));
        Moves { table, pages, page, bases, path: Array::new(&[batch, places], path), accepted }
    }

    /// (from, to) of every move as page and row, in order.
    fn list(&self) -> Vec<([usize; 2], [usize; 2])> {
        let pages = Pages { table: self.table.as_ref(), pages: self.pages, size: self.page };
        let mut list = vec![];
        for i in 0..self.bases.data.len() {
            let last = self.accepted.as_ref().map_or(i64::MAX, |accepted| accepted[[i]]);
            let row = self.path.row([i]);
            let is_path = |j: usize| row[j] > if j == 0 { -1 } else { row[j - 1] } && j as i64 <= last;
            for j in (0..row.len()).take_while(|&j| is_path(j) && self.bases[[i]] >= 0) {
                let find = |n: i64| pages.find(i, (self.bases[[i]] + n) as usize).map(|(page, row)| [page, row]);
                if let (Some(from), Some(to)) = (find(row[j]), find(j as i64)) {
                    list.push((from, to));
                }
            }
        }
        list.retain(|(from, to)| from != to);
        list
    }

    /// What a cache [pages, P, …] holds afterwards.
    fn applied<T: Clone>(&self, before: &Array<T>) -> Array<T> {
        let (length, mut after) = (before.shape[2..].iter().product::<usize>(), before.clone());
        let at = |[page, row]: [usize; 2]| (page * self.page + row) * length;
        for (from, to) in self.list() {
            after.data[at(to)..at(to) + length].clone_from_slice(&before.data[at(from)..at(from) + length]);
        }
        after
    }

    fn run(&self, backend: &Backend, rng: &mut Rng, caches: &[vwd_tensor]) {
        let compactor = Compactor::new(backend, caches);
        let ints = |rng: &mut Rng, dtype, values: &Array<i64>| {
            Tensor::ints(backend, dtype, values, &Layout::random(rng, values.shape.len()))
        };
        let table = self.table.as_ref().map(|table| ints(rng, I32, table));
        let accepted = self.accepted.as_ref().map(|accepted| ints(rng, I32, accepted));
        let is_wide = self.bases.data.iter().any(|&base| i32::try_from(base).is_err());
        let base = if is_wide { I64 } else { rng.pick(&[I32, I64]) };
        let (bases, path) = (ints(rng, base, &self.bases), ints(rng, I32, &self.path));
        let given = |t: &Option<Tensor>| t.as_ref().map_or(absent(), Tensor::c);
        let args = vwd_compact_args {
            page_table: given(&table),
            bases: bases.c(),
            path: path.c(),
            accepted: given(&accepted),
            ..args()
        };
        // SAFETY: the tensors outlive the call.
        backend.finish(unsafe { vwd_compact(compactor.0, &args, backend.stream()) });
        let inputs = [("bases", Some(&bases)), ("path", Some(&path)), ("page_table", table.as_ref())];
        for (name, t) in inputs.into_iter().chain([("accepted", accepted.as_ref())]) {
            t.into_iter().for_each(|t| t.assert_untouched(name));
        }
    }
}

/// Ascending nodes, the root first, and then what ends a path; sometimes it begins at another node.
fn random_path(rng: &mut Rng, nodes: usize, places: usize) -> Vec<i64> {
    let mut all: Vec<i64> = (1..nodes as i64).collect();
    rng.shuffle(&mut all);
    all.truncate(rng.size(0..=places - 1));
    all.push(if rng.one_in(6) { 1 } else { 0 });
    all.sort_unstable();
    all.dedup();
    let end = rng.pick(&[-1, -1, -1, 0, i32::MIN as i64]);
    all.resize(places, end);
    all
}

/// A cache of any dtype and layout.
fn random_cache<'b>(backend: &'b Backend, rng: &mut Rng, moves: &Moves, inner: &[usize]) -> Tensor<'b> {
    let dtype = DType { code: rng.pick(&[0, 1, 2]), bits: rng.pick(&[8, 16, 32, 64, 24, 128]) };
    let shape = [&[moves.pages, moves.page], inner].concat();
    let bytes = rng.bytes(shape.iter().product::<usize>() * dtype.bytes());
    Tensor::raw(backend, dtype, &shape, &bytes, &Layout::random(rng, shape.len()))
}

fn check(backend: &Backend, rng: &mut Rng, moves: &Moves, caches: &[Tensor]) {
    let before: Vec<_> = caches.iter().map(Tensor::read_raw).collect();
    let c: Vec<_> = caches.iter().map(Tensor::c).collect();
    moves.run(backend, rng, &c);
    let written: BTreeSet<[usize; 2]> = moves.list().into_iter().map(|(_, to)| to).collect();
    for (n, (cache, before)) in caches.iter().zip(&before).enumerate() {
        assert!(cache.read_raw() == moves.applied(before), "cache {n}: {:?}", moves.list());
        cache.assert_written("a cache", |at| written.contains(&[at[0], at[1]]));
    }
}

fn compact_moves_accepted_rows_and_nothing_else(backend: &Backend) {
    rounds(40, |rng| {
        let (page, nodes) = (rng.size(1..=9), rng.size(1..=12));
        let moves = Moves::random(rng, page, nodes);
        let caches: Vec<_> = (0..rng.size(1..=4))
            .map(|_| {
                let inner: Vec<usize> = (0..rng.size(0..=3)).map(|_| rng.pick(&[1, 2, 3, 8, 20])).collect();
                random_cache(backend, rng, &moves, &inner)
            })
            .collect();
        check(backend, rng, &moves, &caches);
    });
}

fn compact_moves_rows_across_pages_of_any_size(backend: &Backend) {
    rounds(3, |rng| {
        for page in [1, 16, 64, 256] {
            let moves = Moves::random(rng, page, 24);
            // Llama's keys, MiniCPM's latents, a scale.
            let caches = [&[2, 64][..], &[96], &[]].map(|inner| random_cache(backend, rng, &moves, inner));
            check(backend, rng, &moves, &caches);
        }
    });
}

fn compact_moves_paths_of_more_rows_than_are_moved_at_once(backend: &Backend) {
    rounds(4, |rng| {
        let (page, nodes) = (rng.pick(&[1, 5, 16]), rng.size(60..=100));
        let mut moves = Moves::random(rng, page, nodes);
        // Every row moves one place down, into the row that was read just before.
        let places = moves.path.shape[1];
        for i in (0..moves.bases.data.len()).filter(|i| i % 2 == 0) {
            (0..places).for_each(|j| moves.path[[i, j]] = if j == 0 { 0 } else { j as i64 + 1 });
        }
        let caches = [random_cache(backend, rng, &moves, &[7])];
        check(backend, rng, &moves, &caches);
    });
}

/// Pages of bytes: P rows, and then P scales.
fn compact_moves_rows_and_their_scales_at_the_end_of_a_page(backend: &Backend) {
    rounds(6, |rng| {
        let page = rng.pick(&[4, 16]);
        let moves = Moves::random(rng, page, 10);
        let bytes_of_a_page = page * 40 + page * 4;
        let bytes = rng.bytes(moves.pages * bytes_of_a_page);
        let buffer = Tensor::raw(backend, U8, &[moves.pages, bytes_of_a_page], &bytes, &Layout::default());
        let all = buffer.c();
        let step = bytes_of_a_page as i64;
        let extents = [moves.pages as i64, page as i64, 40, 0, 0];
        let rows = vwd_tensor { ndim: 3, shape: extents, strides: [step, 40, 1, 0, 0], ..all };
        let scales = vwd_tensor {
            data: all.data.wrapping_byte_add(page * 40),
            dtype_code: F32.code,
            dtype_bits: F32.bits,
            ndim: 2,
            shape: extents,
            strides: [step / 4, 1, 0, 0, 0],
            ..all
        };
        moves.run(backend, rng, &[rows, scales]);
        let part = |from: usize, width: usize, bytes: &[u8]| {
            let of_page = |p: usize| bytes[p * bytes_of_a_page + from..][..page * width].to_vec();
            Array::new(&[moves.pages, page, width], (0..moves.pages).flat_map(of_page).collect())
        };
        let after = buffer.read_memory();
        for (from, width) in [(0, 40), (page * 40, 4)] {
            assert!(part(from, width, &after) == moves.applied(&part(from, width, &bytes)), "{:?}", moves.list());
        }
    });
}

fn compact_splits_interleaved_keys_and_values(backend: &Backend) {
    rounds(10, |rng| {
        let moves = Moves::random(rng, 8, 12);
        let shape = [moves.pages, 2, moves.page, 2, 12];
        let bytes = rng.bytes(shape.iter().product::<usize>() * 2);
        let both = Tensor::raw(backend, F16, &shape, &bytes, &Layout::random(rng, 5));
        let parts = [both.part(1, 0), both.part(1, 1)];
        let before = [0, 1].map(|n| parts[n].read_raw());
        moves.run(backend, rng, &[parts[0].c(), parts[1].c()]);
        for n in 0..2 {
            assert!(parts[n].read_raw() == moves.applied(&before[n]), "part {n}");
        }
    });
}

/// Keys and values of 80 layers, and scales of some; with 1 KiB a row of 64 units.
fn compact_takes_hundreds_of_caches(backend: &Backend) {
    rounds(1, |rng| {
        let mut moves = Moves::random(rng, 4, 10);
        while moves.list().is_empty() {
            moves = Moves::random(rng, 4, 10);
        }
        let inner = |n: usize| if n % 3 == 2 { vec![2] } else { vec![2, 8] };
        let caches: Vec<_> = (0..200).map(|n| random_cache(backend, rng, &moves, &inner(n))).collect();
        check(backend, rng, &moves, &caches);
    });
}

/// The cache lies in memory that cannot be written.
fn compact_of_a_path_that_stays_writes_nothing(backend: &Backend) {
    let memory = ReadOnly::new(backend, 4096);
    let (device_type, device_id) = backend.device();
    let cache = vwd_tensor {
        data: memory.start(),
        device_type,
        device_id,
        dtype_code: U8.code,
        dtype_bits: U8.bits,
        lanes: 1,
        ndim: 3,
        shape: [16, 16, 16, 0, 0],
        strides: [256, 16, 1, 0, 0],
    };
    let moves = Moves {
        table: Some(Array::from_fn(&[2, 8], |at| (at[0] * 8 + at[1]) as i64)),
        pages: 16,
        page: 16,
        bases: Array::new(&[2], vec![5, 40]),
        path: Array::from_fn(&[2, 30], |at| if at[1] < 25 { at[1] as i64 } else { -1 }),
        accepted: None,
    };
    moves.run(backend, &mut Rng::new(0), &[cache]);
}
