//! Copies that go on while their thread does.

use super::check;

fn numbers(count: u32) -> Vec<u32> {
    (0..count).map(|n| n + 100).collect()
}

/// Each thread copies 16 bytes of the input to its place of the room, waits, and stores the last word of them.
fn copy(size: &str, wait: &str) -> super::Check {
    let body = format!(
        "mov.u32 %r10, room; shl.b32 %r11, %r1, 4; add.s32 %r10, %r10, %r11; mul.wide.u32 %rd10, %r1, 16; add.s64 %rd10, %rd3, %rd10; \
         cp.async.cg.shared.global [%r10], [%rd10], 16{size}; cp.async.commit_group; {wait} ld.shared.u32 %r12, [%r10+12]; \
         st.global.u32 [%rd2], %r12;"
    );
    check(body).input(numbers(256))
}

#[test]
fn copies_are_there_once_they_were_waited_for() {
    for seed in 0..4 {
        copy("", "cp.async.wait_group 0;").seed(seed).gives(|thread| thread * 4 + 103);
        copy("", "cp.async.wait_all;").seed(seed).gives(|thread| thread * 4 + 103);
    }
    copy("", "").fails("race");
    copy("", "cp.async.wait_group 1;").fails("race");
}

#[test]
fn a_copy_that_is_not_waited_for_is_late() {
    let late = copy("", "");
    super::Check { finds_races: false, ..late }.gives(|_| !0);
}

#[test]
fn a_copy_of_fewer_bytes_fills_up_with_zeros() {
    copy(", 12", "cp.async.wait_group 0;").gives(|_| 0);
    copy(", 16", "cp.async.wait_group 0;").gives(|thread| thread * 4 + 103);
}

#[test]
fn groups_end_in_order() {
    // Two groups of four bytes: after the first alone was waited for, it may be read and the second may not.
    let body = |offset: u32| {
        format!(
            "mov.u32 %r10, room; shl.b32 %r11, %r1, 3; add.s32 %r10, %r10, %r11; mul.wide.u32 %rd10, %r1, 8; add.s64 %rd10, %rd3, %rd10; \
             cp.async.ca.shared.global [%r10], [%rd10], 4; cp.async.commit_group; \
             cp.async.ca.shared.global [%r10+4], [%rd10+4], 4; cp.async.commit_group; \
             cp.async.wait_group 1; ld.shared.u32 %r12, [%r10+{offset}]; st.global.u32 [%rd2], %r12;"
        )
    };
    check(body(0)).input(numbers(128)).gives(|thread| thread * 2 + 100);
    check(body(4)).input(numbers(128)).fails("race");
}

#[test]
fn another_warp_sees_a_copy_after_a_barrier_alone() {
    let other = |between: &str| {
        check(format!(
            "mul.wide.u32 %rd10, %r1, 4; add.s64 %rd10, %rd3, %rd10; cp.async.ca.shared.global [%r2], [%rd10], 4; \
             cp.async.commit_group; cp.async.wait_group 0; {between} xor.b32 %r10, %r2, 128; ld.shared.u32 %r11, [%r10]; \
             st.global.u32 [%rd2], %r11;"
        ))
        .input(numbers(64))
    };
    other("bar.sync 0;").gives(|thread| (thread ^ 32) + 100);
    other("").fails("race");
}

#[test]
fn copies_arrive_at_a_barrier_in_shared_memory() {
    let body = "setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared::cta.b64 [gate], 64; bar.sync 0; \
         mul.wide.u32 %rd10, %r1, 4; add.s64 %rd10, %rd3, %rd10; cp.async.ca.shared.global [%r2], [%rd10], 4; \
         cp.async.mbarrier.arrive.noinc.shared::cta.b64 [gate]; \
         WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [gate], 0; @!%p2 bra WAIT; \
         xor.b32 %r10, %r2, 128; ld.shared.u32 %r11, [%r10]; st.global.u32 [%rd2], %r11;";
    for seed in 0..4 {
        check(body).input(numbers(64)).seed(seed).gives(|thread| (thread ^ 32) + 100);
    }
}

#[test]
fn a_barrier_awaits_copies_that_announce_themselves() {
    // The barrier is opened for one arrival of each warp.
    let body = |announced: &str| {
        check(format!(
            "setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared::cta.b64 [gate], 2; bar.sync 0; \
             mul.wide.u32 %rd10, %r1, 4; add.s64 %rd10, %rd3, %rd10; cp.async.ca.shared.global [%r2], [%rd10], 4; \
             cp.async.mbarrier.arrive{announced}.shared::cta.b64 [gate]; bar.warp.sync -1; \
             and.b32 %r12, %r1, 31; setp.eq.u32 %p3, %r12, 0; @%p3 mbarrier.arrive.expect_tx.shared::cta.b64 _, [gate], 0; \
             WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [gate], 0; @!%p2 bra WAIT; \
             xor.b32 %r10, %r2, 128; ld.shared.u32 %r11, [%r10]; st.global.u32 [%rd2], %r11;"
        ))
        .input(numbers(64))
    };
    for seed in 0..4 {
        body("").seed(seed).gives(|thread| (thread ^ 32) + 100);
    }
    assert!(body(".noinc").run().is_err());
}

/// Thread 0 copies 256 bytes of the input to the room at once; all wait.
fn bulk(expected: u32, bytes: u32, wait: &str) -> super::Check {
    let body = format!(
        "setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared::cta.b64 [gate], 1; bar.sync 0; mov.u32 %r10, room; mov.u32 %r11, gate; \
         and.b64 %rd10, %rd3, -16; @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [gate], {expected}; \
         @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r10], [%rd10], {bytes}, [%r11]; \
         {wait} ld.shared.u32 %r12, [%r2]; st.global.u32 [%rd2], %r12;"
    );
    check(body).input(vec![11; 70])
}
const WAIT: &str = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [gate], 0; @!%p2 bra WAIT;";

#[test]
fn a_bulk_copy_is_there_once_its_barrier_says_so() {
    for seed in 0..4 {
        bulk(256, 256, WAIT).seed(seed).gives(|_| 11);
    }
    bulk(256, 256, "").fails("race");
    bulk(272, 256, WAIT).fails("no warp can go on");
    bulk(24, 24, WAIT).fails("a bulk copy of 24 bytes");
}

/// Thread 0 copies what all threads wrote to the room to the output, waits, and another thread overwrites the room.
fn bulk_store(wait: &str) -> super::Check {
    check(format!(
        "setp.eq.u32 %p1, %r1, 0; st.shared.u32 [%r2], %r1; fence.proxy.async.shared::cta; bar.sync 0; mov.u32 %r10, room; \
         @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd20], [%r10], 240; @%p1 cp.async.bulk.commit_group; {wait} bar.sync 0; \
         mov.u32 %r11, 9; st.shared.u32 [%r2], %r11;"
    ))
}

#[test]
fn what_a_bulk_copy_reads_stays_until_it_has_been_read() {
    let aligned = |wait: &str| {
        let one = bulk_store(wait);
        // The output begins at a multiple of 16, as far as that can be had.
        super::Check { body: format!("add.s64 %rd20, %rd1, 15; and.b64 %rd20, %rd20, -16; {}", one.body), ..one }
    };
    for seed in 0..4 {
        let out = aligned("@%p1 cp.async.bulk.wait_group.read 0;").seed(seed).run().unwrap();
        let begin = out.iter().position(|&x| x == 1).unwrap() - 1;
        assert!(out[begin..begin + 60].iter().enumerate().all(|(n, &x)| x == n as u32), "{out:?}");
    }
    aligned("").fails("race");
}
