//! What the emulator has to notice, and what it has to compute, in kernels of a few lines.

use crate::machine::{self, Choices, Launch};
use crate::memory::{Fault, Pieces};
use crate::{decode, parse};

const THREADS: u32 = 64;

/// Runs a CTA of two warps. The parameter is `out`, a word for each thread, which %rd1 points to; %rd2 to the thread's own; %r1 is its number.
fn run(body: &str, choices: Choices) -> Result<Vec<u32>, Fault> {
    let text = format!(
        ".version 8.4\n.target sm_90\n.address_size 64\n.visible .entry kernel(.param .u64 out)\n{{\n\
         .reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .shared .align 16 .b8 room[1024];\n\
         ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd2, %rd1, %rd3;\n\
         mov.u32 %r2, room; shl.b32 %r3, %r1, 2; add.s32 %r2, %r2, %r3; // the thread's word of the room\n\
         {body}\nret;\n}}\n"
    );
    let kernel = decode::kernel(&parse::module(&text)?, &vec![], "kernel")?;
    let out = vec![7u32; THREADS as usize];
    let begin = out.as_ptr() as u64;
    let launch = Launch {
        kernel: &kernel,
        ctas: 1,
        threads: THREADS,
        cluster: 1,
        shared: 0,
        parameters: &begin.to_ne_bytes(),
        pieces: &Pieces(vec![(begin, begin + 4 * THREADS as u64)]),
        choices,
        finds_races: true,
    };
    machine::run(&launch)?;
    Ok(out)
}

fn in_order(body: &str) -> Result<Vec<u32>, Fault> {
    run(body, Choices::new(0))
}

#[track_caller]
fn assert_fault(body: &str, words: &str) {
    let fault = in_order(body).expect_err("a fault");
    assert!(fault.contains(words), "{fault}");
}

/// Each thread leaves its number in the room, and takes what the other warp left.
fn exchange(between: &str) -> String {
    format!(
        "st.shared.u32 [%r2], %r1; {between} xor.b32 %r4, %r2, 128; ld.shared.u32 %r5, [%r4]; st.global.u32 [%rd2], %r5;"
    )
}

#[test]
fn what_a_barrier_orders_is_seen() {
    for seed in 0..20 {
        let out = run(&exchange("bar.sync 0;"), Choices::new(seed)).unwrap();
        assert_eq!(out, (0..THREADS).map(|thread| thread ^ 32).collect::<Vec<_>>());
    }
}

#[test]
fn what_nothing_orders_is_a_race() {
    assert_fault(&exchange(""), "race");
    assert_fault(&exchange("bar.warp.sync -1;"), "race");
}

#[test]
fn lanes_are_ordered_by_barriers_and_not_by_shuffles() {
    let neighbour = |between: &str| {
        format!(
            "st.shared.u32 [%r2], %r1; {between} xor.b32 %r4, %r2, 4; ld.shared.u32 %r5, [%r4]; st.global.u32 [%rd2], %r5;"
        )
    };
    assert_fault(&neighbour("shfl.sync.bfly.b32 %r6|%p1, %r1, 1, 31, -1;"), "race");
    let out = in_order(&neighbour("bar.warp.sync -1;")).unwrap();
    assert_eq!(out, (0..THREADS).map(|thread| thread ^ 1).collect::<Vec<_>>());
}

#[test]
fn lanes_that_part_meet_again() {
    let body = "and.b32 %r4, %r1, 1; setp.eq.u32 %p1, %r4, 0; mov.u32 %r5, 10; @%p1 bra EVEN; mov.u32 %r5, 20; \
                EVEN: shfl.sync.bfly.b32 %r6|%p2, %r5, 1, 31, -1; st.global.u32 [%rd2], %r6;";
    let out = in_order(body).unwrap();
    assert!(out.iter().enumerate().all(|(thread, &x)| x == if thread % 2 == 0 { 20 } else { 10 }), "{out:?}");
}

#[test]
fn memory_ends() {
    assert_fault("st.global.u32 [%rd2+4], %r1;", "not the device's");
    assert_fault("st.global.u64 [%rd2+4], %rd1;", "not a multiple");
    assert_fault("st.shared.u32 [%r2+1000], %r1;", "past its end");
}

#[test]
fn copies_are_there_once_they_were_waited_for() {
    let copy = |wait: &str| {
        format!(
            "mov.u32 %r4, room; shl.b32 %r5, %r1, 4; add.s32 %r4, %r4, %r5; and.b64 %rd4, %rd2, -16; \
             cp.async.cg.shared.global [%r4], [%rd4], 16; cp.async.commit_group; {wait} ld.shared.u32 %r6, [%r4]; st.global.u32 [%rd2], %r6;"
        )
    };
    assert!(in_order(&copy("cp.async.wait_group 0; bar.sync 0;")).unwrap().iter().all(|&x| x == 7));
    assert_fault(&copy("cp.async.wait_group 1;"), "race");
}

#[test]
fn a_barrier_that_not_all_reach_is_told() {
    assert_fault("setp.lt.u32 %p1, %r1, 32; @%p1 bra END; bar.sync 1; END: bar.sync 0;", "no warp can go on");
    let parts = "setp.eq.u32 %p1, %r1, 0; @%p1 bra END; bar.sync 0; END: bar.warp.sync -1;";
    assert_fault(parts, "no warp can go on");
}

#[test]
fn a_lane_that_has_ended_is_not_read() {
    assert_fault(
        "setp.eq.u32 %p1, %r1, 0; @%p1 bra END; shfl.sync.idx.b32 %r4|%p2, %r1, 0, 31, -1; END: ret;",
        "takes no part",
    );
}
