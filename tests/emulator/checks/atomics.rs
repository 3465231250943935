//! Atomics and reductions in memory: each operation and type, in shared and in global memory, in several orders.

use super::check;

#[test]
fn atomics_of_many_threads_leave_what_all_of_them_give() {
    // Operation, the word before, the operand (of %r1, the thread's number), and the word after 64 threads.
    let table = [
        ("add.u32", 5, "mov.u32 %r10, %r1", 5 + 63 * 32),
        ("or.b32", 1 << 30, "and.b32 %r10, %r1, 31; shl.b32 %r10, 1, %r10; and.b32 %r10, %r10, 0xf0", 1 << 30 | 0xf0),
        ("and.b32", 0xffff, "not.b32 %r10, %r1", 0xffc0),
        ("min.u32", 50, "add.s32 %r10, %r1, 3", 3),
        ("max.u32", 7, "mov.u32 %r10, %r1", 63),
        ("min.s32", 7, "sub.s32 %r10, %r1, 9", -9i32 as u32),
        ("max.s32", -5i32 as u32, "sub.s32 %r10, %r1, 64", -1i32 as u32),
    ];
    for (name, before, operand, after) in table {
        for seed in 0..3 {
            for prefix in ["red", "atom"] {
                let result = if prefix == "atom" { "%r11, " } else { "" };
                let shared = format!(
                    "setp.eq.u32 %p1, %r1, 0; @%p1 st.shared.u32 [room], {before}; bar.sync 0; {operand}; \
                     {prefix}.shared.{name} {result}[room], %r10; bar.sync 0; ld.shared.u32 %r12, [room]; st.global.u32 [%rd2], %r12;"
                );
                check(shared).seed(seed).gives(|_| after);
                let global = format!(
                    "setp.eq.u32 %p1, %r1, 0; @%p1 st.global.u32 [%rd1], {before}; bar.sync 0; {operand}; \
                     {prefix}.global.{name} {result}[%rd1], %r10;"
                );
                check(global).seed(seed).gives(|thread| if thread == 0 { after } else { super::UNTOUCHED });
            }
        }
    }
}

#[test]
fn an_atomic_returns_what_was_before_it() {
    let body = "atom.global.add.u32 %r10, [%rd3], 1; st.global.u32 [%rd2], %r10;";
    let mut seen = check(body).ctas(4).seed(3).run().unwrap();
    seen.sort_unstable();
    assert_eq!(seen, (0..256).collect::<Vec<_>>());
}

#[test]
fn an_exchange_hands_each_value_on_once() {
    let body = "add.s32 %r10, %r1, 1; atom.global.exch.b32 %r11, [%rd3], %r10; st.global.u32 [%rd2], %r11;";
    let mut seen = check(body).seed(5).run().unwrap();
    seen.sort_unstable();
    seen.dedup();
    assert!(seen.len() == 64 && seen[0] == 0 && seen[63] <= 64, "{seen:?}");
}

#[test]
fn a_comparison_and_exchange_takes_place_once() {
    let body = "cvt.u64.u32 %rd10, %r1; add.s64 %rd10, %rd10, 1; atom.global.cas.b64 %rd11, [%rd3], 0, %rd10; \
                setp.eq.s64 %p1, %rd11, 0; selp.b32 %r10, 1, 0, %p1; st.global.u32 [%rd2], %r10;";
    for seed in 0..5 {
        assert_eq!(check(body).seed(seed).run().unwrap().iter().sum::<u32>(), 1);
    }
}

#[test]
fn sums_of_64_bits_carry() {
    let body = "setp.eq.u32 %p1, %r1, 0; mov.u64 %rd10, 0x80000000; red.global.add.u64 [%rd3], %rd10; bar.sync 0; \
                ld.global.u32 %r10, [%rd3+4]; st.global.u32 [%rd2], %r10;";
    check(body).gives(|_| 32);
}
