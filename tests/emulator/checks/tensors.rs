//! Copies of boxes of tensors, and the maps that they need.

use super::{Check, check};
use crate::tensors::TensorMap;

/// A tensor [2 pages, 12 rows, 2 heads, 64 channels] of 16 bits, whose elements are numbered in the order of memory.
const DIMS: [u64; 4] = [64, 12, 2, 2];
const STRIDES: [u64; 3] = [256, 128, 12 * 256];

/// Thread 0 copies a box of 64 channels and as many rows as it is high to room + `to`; all 512 threads wait, and each stores a word of the room.
#[derive(Clone)]
struct Box {
    rows: u32,
    to: u32,
    /// Channel, row, head, page.
    first: [i32; 4],
    is_swizzled: bool,
    bytes: u32,
    wait: &'static str,
    /// Bytes from where a map may lie to where this one does.
    map_at: usize,
}
const WAIT: &str = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [gate], 0; @!%p2 bra WAIT;";
const WHOLE: Box = Box { rows: 8, to: 0, first: [0, 2, 1, 1], is_swizzled: true, bytes: 1024, wait: WAIT, map_at: 0 };

impl Box {
    fn check(&self) -> Check {
        let elements: Vec<u16> = (0..DIMS.iter().product::<u64>() as u16).collect();
        let mut input = vec![0u32; 64 + elements.len() / 2];
        let data = 60;
        for (word, pair) in input[data..].iter_mut().zip(elements.chunks_exact(2)) {
            *word = pair[0] as u32 | (pair[1] as u32) << 16;
        }
        // The tensor begins at a multiple of 16 and the map at one of 64, wherever the input lies.
        let begin = input.as_ptr() as usize;
        let shift = (begin + data * 4).next_multiple_of(16) - (begin + data * 4);
        input.rotate_right(shift / 4);
        let tensor = begin + data * 4 + shift;
        // SAFETY: of each there are four, and three strides.
        let map = unsafe {
            let lengths = [64, self.rows, 1, 1];
            let (dims, strides) = (DIMS.as_ptr(), STRIDES.as_ptr());
            TensorMap::new(4, self.is_swizzled, tensor as u64, dims, strides, lengths.as_ptr(), [1; 4].as_ptr())
        };
        let at = (begin.next_multiple_of(64) - begin + self.map_at) / 4;
        for (n, word) in map.unwrap().pack().into_iter().enumerate() {
            (input[at + 2 * n], input[at + 2 * n + 1]) = (word as u32, (word >> 32) as u32);
        }
        let Box { to, first: [channel, row, head, page], bytes, wait, map_at, .. } = self;
        let body = format!(
            "setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared::cta.b64 [gate], 1; bar.sync 0; mov.u32 %r10, room; mov.u32 %r11, gate; \
             add.s64 %rd10, %rd3, 63; and.b64 %rd10, %rd10, -64; add.s64 %rd10, %rd10, {map_at}; prefetch.tensormap [%rd10]; \
             mov.u32 %r12, {channel}; mov.u32 %r13, {row}; mov.u32 %r14, {head}; mov.u32 %r15, {page}; \
             @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [gate], {bytes}; \
             @%p1 cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r10+{to}], \
             [%rd10, {{%r12, %r13, %r14, %r15}}], [%r11]; \
             {wait} ld.shared.u32 %r12, [%r2]; st.global.u32 [%rd2], %r12;"
        );
        check(body).threads(512).input(input)
    }

    /// The word of the room that a thread finds.
    fn expected(&self, word: u32) -> u32 {
        let (address, end) = (word * 4, self.to + self.rows * 128);
        if address < self.to || address >= end {
            return !0;
        }
        let row = (address - self.to) / 128;
        let place = address % 128 / 16;
        let run = if self.is_swizzled { place ^ (address / 128 % 8) } else { place };
        let element = |within: u32| {
            let at = [run * 8 + within, row, 0, 0].map(|x| x as i32);
            let at: [i64; 4] = std::array::from_fn(|d| (at[d] + self.first[d]) as i64);
            let is_inside = (0..4).all(|d| at[d] >= 0 && at[d] < DIMS[d] as i64);
            let number = ((at[3] * 12 + at[1]) * 2 + at[2]) * 64 + at[0];
            if is_inside { number as u32 } else { 0 }
        };
        let within = address % 16 / 2;
        element(within) | element(within + 1) << 16
    }

    #[track_caller]
    fn arrives(&self) {
        for seed in 0..4 {
            self.check().seed(seed).gives(|word| self.expected(word));
        }
    }
}

#[test]
fn a_box_of_a_tensor_is_there_once_its_barrier_says_so() {
    WHOLE.arrives();
    Box { is_swizzled: false, ..WHOLE }.arrives();
    Box { rows: 12, bytes: 1536, first: [0, 0, 0, 1], ..WHOLE }.arrives();
    Box { wait: "", ..WHOLE }.check().fails("race");
    Box { bytes: 1040, ..WHOLE }.check().fails("no warp can go on");
}

#[test]
fn bytes_are_awaited_without_an_arrival() {
    // Thread 0 awaits the bytes, requests the box, and arrives last.
    let arrives = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [gate], 1024;";
    let awaits = |then: &str| {
        let whole = WHOLE.check();
        let body = whole.body.replace(arrives, "@%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [gate], 1024;");
        Check { body: body.replace("WAIT:", &format!("{then} WAIT:")), ..whole }
    };
    for seed in 0..4 {
        let arrival = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [gate], 0;";
        awaits(arrival).seed(seed).gives(|word| WHOLE.expected(word));
    }
    awaits("").fails("no warp can go on");
}

#[test]
fn a_box_that_is_not_waited_for_is_late() {
    let late = Box { wait: "", ..WHOLE }.check();
    let read = "ld.shared.u32 %r12, [%r2];";
    let body = late.body.replace(read, &format!("{read} {WAIT}"));
    // Warp 0 reads before it waits. Once it has waited, the box is there for the warps that follow.
    Check { body, finds_races: false, ..late }.gives(|word| if word < 32 { !0 } else { WHOLE.expected(word) });
}

#[test]
fn elements_outside_of_a_tensor_are_zeros_and_count_as_bytes() {
    for first in
        [[0, 9, 1, 1], [0, -3, 0, 0], [0, 0, 2, 0], [0, 0, 0, -1], [8, 10, 0, 1], [-13, 0, 1, 0], [0, 1 << 30, 0, 0]]
    {
        Box { first, ..WHOLE }.arrives();
    }
}

#[test]
fn runs_are_swizzled_by_their_address() {
    for to in [128, 384, 1024] {
        Box { to, rows: 7, bytes: 896, ..WHOLE }.arrives();
    }
}

#[test]
fn a_box_needs_a_target_and_a_map_where_hardware_does() {
    Box { to: 64, ..WHOLE }.check().fails("not a multiple of 128");
    Box { map_at: 16, ..WHOLE }.check().fails("not a multiple of 64");
    let unwritten = Box { map_at: 0, ..WHOLE }.check();
    let input = vec![0; unwritten.input.len()];
    unwritten.input(input).fails("the driver has not written");
    let whole = WHOLE.check();
    let flat = whole.body.replace("tensor.4d", "tensor.3d").replace(", %r15}", "}");
    Check { body: flat, ..whole }.fails("3 coordinates in a tensor of 4 dimensions");
}

#[test]
fn maps_of_what_hardware_does_not_take_are_refused() {
    struct Asked {
        rank: usize,
        address: u64,
        dims: [u64; 4],
        strides: [u64; 3],
        lengths: [u32; 4],
        element_strides: [u32; 4],
    }
    let sound = || Asked {
        rank: 4,
        address: 4096,
        dims: DIMS,
        strides: STRIDES,
        lengths: [64, 16, 1, 1],
        element_strides: [1; 4],
    };
    let takes = |change: &dyn Fn(&mut Asked)| {
        let mut asked = sound();
        change(&mut asked);
        let Asked { rank, address, dims, strides, lengths, element_strides } = asked;
        let (dims, strides) = (dims.as_ptr(), strides.as_ptr());
        // SAFETY: four of each, and three strides; the largest rank is refused before they are read.
        unsafe { TensorMap::new(rank, true, address, dims, strides, lengths.as_ptr(), element_strides.as_ptr()) }
            .is_some()
    };
    assert!(takes(&|_| ()));
    assert!(takes(&|asked| asked.dims[1] = 1 << 32));
    assert!(takes(&|asked| asked.strides = [128, 1 << 20, 0]));
    let refused: [&dyn Fn(&mut Asked); 12] = [
        &|asked| asked.rank = 0,
        &|asked| asked.rank = 6,
        &|asked| asked.address = 4104,
        &|asked| asked.dims[2] = 0,
        &|asked| asked.dims[1] = (1 << 32) + 1,
        &|asked| asked.strides[0] = 264,
        &|asked| asked.strides[2] = 1 << 40,
        &|asked| asked.lengths[1] = 0,
        &|asked| asked.lengths[1] = 257,
        &|asked| asked.lengths[0] = 60,
        &|asked| asked.lengths[0] = 72,
        &|asked| asked.element_strides[1] = 2,
    ];
    for (n, change) in refused.into_iter().enumerate() {
        assert!(!takes(change), "{n}");
    }
}
