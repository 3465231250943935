//! Races in global memory: joins of CTAs by a counter, and launches on streams.

use super::{Check, UNTOUCHED, check};
use crate::memory::Fault;
use crate::races::{Current, Global};
use crate::streams::Works;
use std::cell::RefCell;

/// A stream's handle, other than the default stream's.
const STREAM: usize = 100;
const OTHER: usize = 200;

/// The launches of one check, on its streams, over one output.
struct Device {
    works: Works,
    global: RefCell<Global>,
    out: Vec<u32>,
    input: Vec<u32>,
}

impl Device {
    fn new(threads: u32) -> Device {
        let mut works = Works::default();
        works.creates(STREAM, true);
        works.creates(OTHER, true);
        Device { works, global: RefCell::default(), out: vec![UNTOUCHED; threads as usize], input: vec![0; 64] }
    }

    fn launch(&mut self, check: &Check, stream: usize, depends: bool) -> Result<(), Fault> {
        let work = self.works.enqueue(stream, "kernel", depends);
        let current = Current { work, interval: self.works.interval(work).clone(), works: &self.works };
        // The input's vector keeps its place while the check has it.
        let check = Check { input: std::mem::take(&mut self.input), ..check.clone() };
        check.run_into(&mut self.out, Some((&self.global, &current)))?;
        self.input = check.input;
        self.works.ends(stream, work, true);
        Ok(())
    }
}

fn alone(check: Check) -> Result<Vec<u32>, Fault> {
    let mut device = Device::new(check.threads * check.ctas);
    device.launch(&check, STREAM, false).map(|()| device.out)
}

/// Each of four CTAs writes its words, and counts; whoever is last reads all of the words and adds them up.
fn join(release: &str, count: &str, acquire: &str) -> Result<u32, Fault> {
    let body = format!(
        "add.s32 %r10, %r4, 1; st.global.u32 [%rd2], %r10; {release} setp.eq.u32 %p1, %r1, 0; mov.u32 %r11, 0; @!%p1 bra COUNTED; \
         {count} %r11, [%rd3], 1; COUNTED: {acquire} setp.eq.u32 %p2, %r11, 3; \
         bar.red.or.pred %p3, 0, %p2; @!%p3 bra END; @!%p1 bra END; mov.u32 %r12, 0; mov.u32 %r13, 0; \
         ADD: mul.wide.u32 %rd10, %r12, 4; add.s64 %rd10, %rd1, %rd10; ld.global.cg.u32 %r14, [%rd10]; add.s32 %r13, %r13, %r14; \
         add.s32 %r12, %r12, 1; setp.lt.u32 %p4, %r12, 256; @%p4 bra ADD; st.global.u32 [%rd1], %r13; END:"
    );
    alone(check(body).ctas(4)).map(|out| out[0])
}
const RELAXED: &str = "atom.global.add.u32";
const ACQ_REL: &str = "atom.acq_rel.gpu.global.add.u32";

#[test]
fn a_join_by_a_counter_between_fences_is_no_race() {
    let all = (1..=256).sum::<u32>();
    assert_eq!(join("bar.sync 0; membar.gl;", RELAXED, "membar.gl;").unwrap(), all);
    assert_eq!(join("membar.gl; bar.sync 0; fence.acq_rel.gpu;", RELAXED, "fence.acq_rel.gpu;").unwrap(), all);
    assert_eq!(join("bar.sync 0;", ACQ_REL, "").unwrap(), all);
}

#[track_caller]
fn is_race<T: std::fmt::Debug>(found: Result<T, Fault>) {
    let fault = found.expect_err("a race");
    assert!(fault.contains("race for global memory"), "{fault}");
}

#[test]
fn a_join_without_a_fence_before_the_counter_is_a_race() {
    is_race(join("bar.sync 0;", RELAXED, "membar.gl;"));
    is_race(join("bar.sync 0;", "atom.acquire.gpu.global.add.u32", ""));
}

#[test]
fn a_join_whose_last_cta_does_not_acquire_is_a_race() {
    is_race(join("bar.sync 0; membar.gl;", RELAXED, ""));
    is_race(join("bar.sync 0;", "atom.release.gpu.global.add.u32", ""));
}

#[test]
fn a_join_without_a_barrier_between_the_warps_is_a_race() {
    is_race(join("membar.gl;", RELAXED, "membar.gl;"));
}

#[test]
fn a_fence_for_the_cta_alone_joins_no_ctas() {
    is_race(join("bar.sync 0; fence.acq_rel.cta;", RELAXED, "fence.acq_rel.cta;"));
    is_race(join("bar.sync 0;", "atom.acq_rel.cta.global.add.u32", ""));
}

#[test]
fn ctas_that_write_the_same_word_race() {
    is_race(alone(check("st.global.u32 [%rd1], %r3;").threads(1).ctas(2)));
    is_race(alone(check("ld.global.u32 %r10, [%rd1+4]; st.global.u32 [%rd2], %r10;").threads(1).ctas(2)));
}

#[test]
fn atomics_and_volatile_accesses_do_not_race_with_each_other() {
    alone(
        check(
            "red.global.add.u32 [%rd3], 1; ld.volatile.global.u32 %r10, [%rd3]; st.volatile.global.u32 [%rd3], %r10;",
        )
        .ctas(3),
    )
    .unwrap();
    is_race(alone(check("red.global.add.u32 [%rd3], 1; ld.global.u32 %r10, [%rd3];").ctas(3)));
}

#[test]
fn bytes_of_one_word_are_told_apart() {
    alone(
        check("mul.wide.u32 %rd10, %r3, 2; add.s64 %rd10, %rd1, %rd10; st.global.u16 [%rd10], 1;").threads(1).ctas(2),
    )
    .unwrap();
}

#[test]
fn a_volatile_flag_between_fences_orders() {
    // The first CTA writes and raises a flag; the second waits for the flag and reads.
    let body = |release: &str, acquire: &str| {
        let text = format!(
            "setp.eq.u32 %p1, %r3, 1; @%p1 bra WAIT; st.global.u32 [%rd1], 55; {release} st.volatile.global.u32 [%rd3], 1; bra END; \
             WAIT: ld.volatile.global.u32 %r10, [%rd3]; setp.eq.u32 %p2, %r10, 0; @%p2 bra WAIT; {acquire} \
             ld.global.u32 %r11, [%rd1]; st.global.u32 [%rd2], %r11; END:"
        );
        alone(check(text).threads(1).ctas(2))
    };
    assert_eq!(body("membar.gl;", "membar.gl;").unwrap(), [55, 55]);
    is_race(body("", "membar.gl;"));
    is_race(body("membar.gl;", ""));
}

#[test]
fn what_a_bulk_copy_wrote_is_released_once_it_was_waited_for() {
    let joins = |wait: &str| {
        let body = format!(
            "setp.eq.u32 %p1, %r3, 1; @%p1 bra WAIT; mov.u32 %r10, room; add.s64 %rd10, %rd1, 15; and.b64 %rd10, %rd10, -16; \
             cp.async.bulk.global.shared::cta.bulk_group [%rd10], [%r10], 32; cp.async.bulk.commit_group; {wait} \
             membar.gl; st.volatile.global.u32 [%rd3], 1; bra END; \
             WAIT: ld.volatile.global.u32 %r10, [%rd3]; setp.eq.u32 %p2, %r10, 0; @%p2 bra WAIT; membar.gl; \
             ld.global.u32 %r11, [%rd1+16]; END:"
        );
        let mut device = Device::new(64);
        device.launch(&check(body).threads(1).ctas(2), STREAM, false)
    };
    joins("cp.async.bulk.wait_group 0;").unwrap();
    is_race(joins("cp.async.bulk.wait_group.read 0;"));
}

fn writes() -> Check {
    check("st.global.u32 [%rd2], %r1;")
}

#[test]
fn launches_of_one_stream_are_ordered_and_those_of_two_are_not() {
    let mut device = Device::new(64);
    device.launch(&writes(), STREAM, false).unwrap();
    device.launch(&writes(), STREAM, false).unwrap();
    is_race(device.launch(&writes(), OTHER, false));
}

#[test]
fn an_event_orders_two_streams() {
    const EVENT: usize = 1;
    let mut device = Device::new(64);
    device.launch(&writes(), STREAM, false).unwrap();
    device.works.records(EVENT, STREAM);
    device.works.waits(OTHER, EVENT);
    device.launch(&writes(), OTHER, false).unwrap();
    device.works.host_waits(OTHER);
    device.launch(&writes(), STREAM, false).unwrap();
}

#[test]
fn a_launch_that_may_begin_early_waits_before_it_touches_what_the_one_in_front_wrote() {
    let waits = check("griddepcontrol.wait; st.global.u32 [%rd2], %r1;");
    let mut device = Device::new(64);
    device.launch(&writes(), STREAM, false).unwrap();
    device.launch(&waits, STREAM, true).unwrap();
    device.launch(&waits, STREAM, true).unwrap();
    is_race(device.launch(&writes(), STREAM, true));

    // What was there before the launch in front began may be read at once.
    let mut device = Device::new(64);
    let reads = check("ld.global.u32 %r10, [%rd2]; griddepcontrol.wait; st.global.u32 [%rd2], %r10;");
    device.launch(&writes(), STREAM, false).unwrap();
    device.launch(&check("mov.u32 %r10, 0;"), STREAM, false).unwrap();
    device.launch(&reads, STREAM, true).unwrap();
    is_race(device.launch(&reads, STREAM, true));
}

#[test]
fn nodes_of_a_graph_are_ordered_by_its_edges() {
    let mut works = Works::default();
    works.creates(STREAM, true);
    let first = works.enqueue_node(STREAM, "first", &[], false);
    let second = works.enqueue_node(STREAM, "second", &[first], false);
    let third = works.enqueue_node(STREAM, "third", &[first], false);
    assert!(works.interval(second).begun.has(first) && works.interval(third).begun.has(first));
    assert!(!works.interval(third).waited.has(second));
    works.ends_graph(STREAM, &[first, second, third]);
    let after = works.enqueue(STREAM, "after", true);
    assert!([first, second, third].iter().all(|&node| works.interval(after).begun.has(node)));
}
