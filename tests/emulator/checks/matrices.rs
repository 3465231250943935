//! Products of matrices, against sums of small whole numbers, which are exact. Operands are laid out here by the tables of the instruction
//! set, element by element: with g = lane / 4 and t = lane % 4.

use super::{Check, check};
use half::{bf16, f16};

/// Element (row, column) of an operand: small whole numbers that differ.
fn element(row: usize, column: usize, seed: usize) -> i32 {
    ((row * 7 + column * 3 + row * column + seed) % 9) as i32 - 4
}

fn bits(kind: &str, value: i32) -> u32 {
    match kind {
        "f16" => f16::from_f32(value as f32).to_bits() as u32,
        "bf16" => bf16::from_f32(value as f32).to_bits() as u32,
        "tf32" => (value as f32).to_bits(),
        _ => value as u8 as u32,
    }
}

/// Runs m16n8 of a depth on every element's place; checks all of the product.
fn multiplies(kind: &str, name: &str, depth: usize) {
    let per_word = match kind {
        "tf32" => 1,
        "u8" => 4,
        _ => 2,
    };
    let is_whole = kind == "u8";
    let a = |row: usize, k: usize| if is_whole { element(row, k, 1) + 100 } else { element(row, k, 1) };
    let b = |k: usize, column: usize| element(k, column, 5);
    let (a_words, b_words) = (16 * depth / per_word / 32, 8 * depth / per_word / 32);
    let mut input = vec![];
    for lane in 0..32 {
        let (g, t) = (lane / 4, lane % 4);
        // A: rows g and g + 8 in turn, then the other half of the depth. B: halves of the depth.
        for n in 0..a_words {
            let k = n / 2 * (depth / 2) + t * per_word;
            input.push(
                (0..per_word).fold(0, |word, i| word | bits(kind, a(g + n % 2 * 8, k + i)) << (i * (32 / per_word))),
            );
        }
        for n in 0..b_words {
            let k = n * (depth / 2) + t * per_word;
            input.push((0..per_word).fold(0, |word, i| word | bits(kind, b(k + i, g)) << (i * (32 / per_word))));
        }
    }
    let registers =
        |first: usize, count: usize| (first..first + count).map(|n| format!("%r{n}")).collect::<Vec<_>>().join(", ");
    let loads: String =
        (0..a_words + b_words).map(|n| format!("ld.global.u32 %r{}, [%rd10+{}]; ", 20 + n, n * 4)).collect();
    for place in 0..4 {
        let start = if is_whole { "mov.u32 %r40, 3;".to_owned() } else { format!("mov.u32 %r40, {};", 3f32.to_bits()) };
        let body = format!(
            "mul.wide.u32 %rd10, %r1, {}; add.s64 %rd10, %rd3, %rd10; {loads} {start} mma.sync.aligned.{name} {{{}}}, {{{}}}, {{{}}}, \
             {{%r40, %r40, %r40, %r40}}; st.global.u32 [%rd2], %r{};",
            (a_words + b_words) * 4,
            registers(30, 4),
            registers(20, a_words),
            registers(20 + a_words, b_words),
            30 + place
        );
        check(body).threads(32).input(input.clone()).gives(|lane| {
            let (row, column) = (lane as usize / 4 + place / 2 * 8, lane as usize % 4 * 2 + place % 2);
            let sum: i32 = (0..depth).map(|k| a(row, k) * b(k, column)).sum::<i32>() + 3;
            if is_whole { sum as u32 } else { (sum as f32).to_bits() }
        });
    }
}

#[test]
fn products_of_float16() {
    multiplies("f16", "m16n8k16.row.col.f32.f16.f16.f32", 16);
}

#[test]
fn products_of_bfloat16() {
    multiplies("bf16", "m16n8k16.row.col.f32.bf16.bf16.f32", 16);
}

#[test]
fn products_of_tf32() {
    multiplies("tf32", "m16n8k8.row.col.f32.tf32.tf32.f32", 8);
}

#[test]
fn products_of_bytes() {
    multiplies("u8", "m16n8k32.row.col.s32.u8.s8.s32", 32);
}

#[test]
fn tf32_leaves_out_the_lower_bits() {
    let body = "mov.u32 %r10, 0x3f801fff; mov.u32 %r11, 0x3f800000; mov.u32 %r12, 0; \
        mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r20, %r21, %r22, %r23}, {%r10, %r10, %r10, %r10}, {%r11, %r11}, \
        {%r12, %r12, %r12, %r12}; st.global.u32 [%rd2], %r20;";
    check(body).threads(32).gives(|_| 8f32.to_bits());
}

/// Element (row, column) of matrix n is n · 64 + row · 8 + column.
fn loads_matrices(trans: &str, place: usize) -> Check {
    // Every thread writes two elements of each matrix, and has the address of a row.
    let body = format!(
        "shl.b32 %r10, %r1, 1; mov.u32 %r13, 0; FILL: shl.b32 %r11, %r13, 6; add.s32 %r11, %r11, %r10; add.s32 %r12, %r11, 1; \
         shl.b32 %r12, %r12, 16; or.b32 %r12, %r12, %r11; shl.b32 %r14, %r13, 7; add.s32 %r14, %r2, %r14; st.shared.u32 [%r14], %r12; \
         add.s32 %r13, %r13, 1; setp.lt.u32 %p1, %r13, 4; @%p1 bra FILL; bar.sync 0; \
         mov.u32 %r15, room; shl.b32 %r16, %r1, 4; add.s32 %r15, %r15, %r16; \
         ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r20, %r21, %r22, %r23}}, [%r15]; st.global.u32 [%rd2], %r{};",
        20 + place
    );
    check(body).threads(32)
}

#[test]
fn matrices_are_loaded_by_rows_and_by_columns() {
    for place in 0..4 {
        let at = |row: u32, column: u32| place as u32 * 64 + row * 8 + column;
        loads_matrices("", place).gives(|lane| at(lane / 4, lane % 4 * 2) | at(lane / 4, lane % 4 * 2 + 1) << 16);
        loads_matrices(".trans", place).gives(|lane| at(lane % 4 * 2, lane / 4) | at(lane % 4 * 2 + 1, lane / 4) << 16);
    }
}

#[test]
fn a_matrix_in_registers_is_transposed() {
    let body = "shl.b32 %r10, %r1, 1; add.s32 %r11, %r10, 1; shl.b32 %r11, %r11, 16; or.b32 %r10, %r10, %r11; \
                movmatrix.sync.aligned.m8n8.trans.b16 %r12, %r10; st.global.u32 [%rd2], %r12;";
    check(body).threads(32).gives(|lane| {
        let at = |row: u32, column: u32| row * 8 + column;
        at(lane % 4 * 2, lane / 4) | at(lane % 4 * 2 + 1, lane / 4) << 16
    });
}

/// How a warpgroup's operand lies in shared memory, as its descriptor says it.
#[derive(Clone, Copy)]
struct Layout {
    /// Bytes that are permuted together: 0 or 128.
    swizzle: usize,
    /// Rows, in the sense of A's rows and B's columns, follow each other; otherwise the depth does.
    is_transposed: bool,
    leading: usize,
    stride: usize,
}

impl Layout {
    /// The byte of an element, by the tables of the instruction set.
    fn place(&self, row: usize, k: usize) -> usize {
        let (along, across) = if self.is_transposed { (row, k) } else { (k, row) };
        match self.swizzle {
            // Core matrices of eight rows of 16 bytes: leading bytes apart along a row, stride bytes across.
            0 => along / 8 * self.leading + along % 8 * 2 + across / 8 * self.stride + across % 8 * 16,
            // Eight rows of 128 bytes, whose pieces of 16 bytes are exchanged by the row's number.
            _ => {
                let (tile, inside) = (along / 64, along % 64);
                let row = across % 8;
                tile * self.leading + across / 8 * self.stride + row * 128 + ((inside / 8) ^ row) * 16 + inside % 8 * 2
            }
        }
    }
    fn descriptor(&self) -> u64 {
        let swizzle = if self.swizzle == 0 { 0 } else { 1u64 };
        (self.leading as u64 >> 4) << 16 | (self.stride as u64 >> 4) << 32 | swizzle << 62
    }
}

/// Multiplies 64 rows by 64 columns, 16 deep; A lies in the first 2 KiB and more, B behind it.
fn group_multiplies(kind: &str, a: Layout, b: Layout, adds: bool) {
    const B_BEGINS: usize = 8192;
    let mut shared = vec![0u8; 16384];
    for row in 0..64 {
        for k in 0..16 {
            for (begin, layout, seed) in [(0, a, 1), (B_BEGINS, b, 5)] {
                let at = begin + layout.place(row, k);
                shared[at..at + 2].copy_from_slice(&(bits(kind, element(row, k, seed)) as u16).to_le_bytes());
            }
        }
    }
    let input: Vec<u32> = shared.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect();
    let sums: Vec<String> = (0..32).map(|n| format!("%f{n}")).collect();
    let start: String = sums.iter().map(|sum| format!("mov.f32 {sum}, 0f3f800000; ")).collect();
    for place in [0, 1, 2, 3, 4, 13, 30, 31] {
        let body = format!(
            ".shared .align 1024 .b8 matrices[16384]; mov.u32 %r10, 0; \
             FILL: mad.lo.s32 %r11, %r10, 128, %r1; mul.wide.u32 %rd10, %r11, 4; add.s64 %rd10, %rd3, %rd10; ld.global.u32 %r12, [%rd10]; \
             mov.u32 %r13, matrices; shl.b32 %r14, %r11, 2; add.s32 %r13, %r13, %r14; st.shared.u32 [%r13], %r12; \
             add.s32 %r10, %r10, 1; setp.lt.u32 %p1, %r10, 32; @%p1 bra FILL; fence.proxy.async.shared::cta; bar.sync 0; \
             mov.u32 %r13, matrices; shr.u32 %r13, %r13, 4; cvt.u64.u32 %rd11, %r13; or.b64 %rd12, %rd11, {}; \
             add.s64 %rd11, %rd11, {}; or.b64 %rd13, %rd11, {}; setp.eq.u32 %p2, {}, 1; {start} \
             wgmma.fence.sync.aligned; wgmma.mma_async.sync.aligned.m64n64k16.f32.{kind}.{kind} {{{}}}, %rd12, %rd13, %p2, 1, 1, {}, {}; \
             wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; mov.b32 %r20, %f{place}; st.global.u32 [%rd2], %r20;",
            a.descriptor(),
            B_BEGINS >> 4,
            b.descriptor(),
            adds as u32,
            sums.join(", "),
            a.is_transposed as u32,
            b.is_transposed as u32,
        );
        let begun = if adds { 1 } else { 0 };
        check(body).threads(128).input(input.clone()).gives(|thread| {
            let (warp, lane) = (thread as usize / 32, thread as usize % 32);
            let row = warp * 16 + lane / 4 + place / 2 % 2 * 8;
            let column = place / 4 * 8 + lane % 4 * 2 + place % 2;
            let sum: i32 = (0..16).map(|k| element(row, k, 1) * element(column, k, 5)).sum();
            ((sum + begun) as f32).to_bits()
        });
    }
}

const CORES: Layout = Layout { swizzle: 0, is_transposed: false, leading: 1024, stride: 128 };
const SWIZZLED: Layout = Layout { swizzle: 128, is_transposed: false, leading: 16, stride: 1024 };
const TRANSPOSED: Layout = Layout { swizzle: 128, is_transposed: true, leading: 4096, stride: 1024 };

#[test]
fn warpgroups_multiply_core_matrices() {
    group_multiplies("f16", CORES, CORES, true);
    group_multiplies("bf16", CORES, CORES, false);
}

#[test]
fn warpgroups_multiply_swizzled_matrices() {
    group_multiplies("bf16", SWIZZLED, SWIZZLED, true);
    group_multiplies("f16", SWIZZLED, TRANSPOSED, false);
}
