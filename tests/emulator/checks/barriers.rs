//! Barriers of a CTA, and barriers in shared memory: phases, arrivals and bytes.

use super::check;

/// Each thread leaves its number in the room, and takes what the other warp left.
fn exchange(between: &str) -> super::Check {
    check(format!(
        "st.shared.u32 [%r2], %r1; {between} xor.b32 %r10, %r2, 128; ld.shared.u32 %r11, [%r10]; st.global.u32 [%rd2], %r11;"
    ))
}

#[test]
fn what_a_barrier_orders_is_seen() {
    for seed in 0..20 {
        exchange("bar.sync 0;").seed(seed).gives(|thread| thread ^ 32);
        exchange("barrier.sync 3, 64;").seed(seed).gives(|thread| thread ^ 32);
    }
}

#[test]
fn what_nothing_orders_is_a_race() {
    exchange("").fails("race");
    exchange("bar.warp.sync -1;").fails("race");
}

#[test]
fn a_barrier_joins_predicates() {
    for (kind, below, expected) in [("or", 1, 1), ("or", 0, 0), ("and", 64, 1), ("and", 63, 0)] {
        let body = format!(
            "setp.lt.u32 %p1, %r1, {below}; bar.red.{kind}.pred %p2, 0, %p1; selp.b32 %r10, 1, 0, %p2; st.global.u32 [%rd2], %r10;"
        );
        check(body).gives(|_| expected);
    }
}

#[test]
fn a_barrier_that_not_all_reach_is_told() {
    check("setp.lt.u32 %p1, %r1, 32; @%p1 bra END; bar.sync 1; END: bar.sync 0;").fails("no warp can go on");
    check("setp.eq.u32 %p1, %r1, 0; @%p1 bra END; bar.sync 0; END: bar.warp.sync -1;").fails("no warp can go on");
    check("barrier.sync 1, 48;").fails("more threads arrive");
}

/// Thread 0 opens the barrier for so many arrivals, and all see it.
fn opened(arrivals: u32) -> String {
    format!(
        "setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared::cta.b64 [gate], {arrivals}; \
         @%p1 fence.mbarrier_init.release.cluster; bar.sync 0;"
    )
}

/// Waits for a phase's end.
fn wait(parity: u32) -> String {
    format!("WAIT{parity}: mbarrier.try_wait.parity.shared::cta.b64 %p2, [gate], {parity}; @!%p2 bra WAIT{parity};")
}

#[test]
fn the_phases_of_a_barrier_in_shared_memory_alternate() {
    // Every thread arrives twice: what was written before the first is there after it, and again after the second.
    let round = |value: u32, parity: u32| {
        format!(
            "add.s32 %r10, %r1, {value}; st.shared.u32 [%r2], %r10; mbarrier.arrive.expect_tx.shared::cta.b64 _, [gate], 0; {} \
             xor.b32 %r11, %r2, 128; ld.shared.u32 %r1{}, [%r11];",
            wait(parity),
            2 + parity
        )
    };
    let body = format!(
        "{} {} bar.sync 0; {} add.s32 %r12, %r12, %r13; st.global.u32 [%rd2], %r12;",
        opened(64),
        round(100, 0),
        round(1000, 1)
    );
    for seed in 0..10 {
        check(body.as_str()).seed(seed).gives(|thread| (thread ^ 32) * 2 + 1100);
    }
}

#[test]
fn a_phase_is_not_over_before_its_bytes_are_there() {
    // 16 bytes are expected, and said to be there by another thread, twice 8.
    let body = |told: &str| {
        format!(
            "{} setp.eq.u32 %p3, %r1, 32; @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [gate], 16; bar.sync 0; \
             @%p3 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [gate], 8; {told} {} st.global.u32 [%rd2], %r1;",
            opened(1),
            wait(0)
        )
    };
    check(body("@%p3 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [gate], 8;")).gives(|thread| thread);
    check(body("")).fails("no warp can go on");
}

#[test]
fn a_barrier_in_shared_memory_is_opened_before_it_is_used() {
    check("mbarrier.arrive.expect_tx.shared::cta.b64 _, [gate], 0;").fails("not opened");
}

#[test]
fn more_arrivals_than_a_barrier_was_opened_for_are_told() {
    // Each arrival awaits a byte that never comes: the phase does not end after three of them.
    let body = format!("{} mbarrier.arrive.expect_tx.shared::cta.b64 _, [gate], 1; {}", opened(3), wait(0));
    check(body).fails("more arrivals");
}

#[test]
fn what_a_thread_writes_after_its_arrival_is_a_race() {
    let body = format!(
        "{} mbarrier.arrive.expect_tx.shared::cta.b64 _, [gate], 0; st.shared.u32 [%r2], %r1; {} \
         xor.b32 %r11, %r2, 128; ld.shared.u32 %r12, [%r11]; st.global.u32 [%rd2], %r12;",
        opened(64),
        wait(0)
    );
    check(body).fails("race");
}

/// Each thread of 16 warps that have a multiprocessor to themselves has 128 registers: half may have 160 where the others give 32.
#[test]
fn warps_take_the_registers_that_others_give() {
    let body = |left: u32| {
        format!(
            "setp.lt.u32 %p1, %r1, 256; @%p1 bra TAKE; setmaxnreg.dec.sync.aligned.u32 {left}; bra END; \
             TAKE: setmaxnreg.inc.sync.aligned.u32 160; END: st.global.u32 [%rd2], %r1;"
        )
    };
    check(body(96)).threads(512).bounds(".maxntid 512,1,1 .minnctapersm 1").gives(|thread| thread);
    check(body(104))
        .threads(512)
        .bounds(".maxntid 512,1,1 .minnctapersm 1")
        .fails("warps take 2112 registers of a thread together; the CTA has 2048");
}
