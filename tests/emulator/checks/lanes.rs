//! Lanes: what they exchange, where they part and meet.

use super::check;

#[test]
fn shuffles_read_the_lane_that_they_say() {
    // Mode, operand, control (upper bits: the segment; lower ones: the clamp), and the lane read; lanes out of range read themselves.
    type Lane = fn(u32) -> u32;
    let table: [(&str, u32, u32, Lane); 8] = [
        ("bfly", 1, 31, |lane| lane ^ 1),
        ("bfly", 16, 31, |lane| lane ^ 16),
        ("up", 1, 0, |lane| lane.max(1) - 1),
        ("up", 2, 0x1800, |lane| if lane % 8 < 2 { lane } else { lane - 2 }),
        ("down", 3, 31, |lane| if lane + 3 > 31 { lane } else { lane + 3 }),
        ("down", 4, 0x181f, |lane| if lane % 8 < 4 { lane + 4 } else { lane }),
        ("idx", 7, 31, |_| 7),
        ("idx", 1, 0x1c1f, |lane| lane / 4 * 4 + 1),
    ];
    for (mode, by, control, lane) in table {
        let body = format!(
            "add.s32 %r10, %r1, 100; shfl.sync.{mode}.b32 %r11|%p1, %r10, {by}, {control}, -1; st.global.u32 [%rd2], %r11;"
        );
        check(body).threads(32).gives(|thread| lane(thread) + 100);
    }
}

#[test]
fn a_shuffle_says_whether_its_lane_is_in_range() {
    let body = "shfl.sync.down.b32 %r10|%p1, %r1, 4, 31, -1; selp.b32 %r10, 1, 0, %p1; st.global.u32 [%rd2], %r10;";
    check(body).threads(32).gives(|thread| (thread < 28) as u32);
}

#[test]
fn votes_count_the_lanes_of_their_mask() {
    for (vote, expected) in [
        ("vote.sync.ballot.b32 %r10, %p1, -1", 0b111),
        ("vote.sync.any.pred %p2, %p1, -1; selp.b32 %r10, 1, 0, %p2", 1),
        ("vote.sync.all.pred %p2, %p1, -1; selp.b32 %r10, 1, 0, %p2", 0),
    ] {
        let body = format!("setp.lt.u32 %p1, %r1, 3; {vote}; st.global.u32 [%rd2], %r10;");
        check(body).threads(32).gives(|_| expected);
    }
    let body = "mov.u32 %r10, 9; setp.lt.u32 %p1, %r1, 3; setp.lt.u32 %p2, %r1, 2; @%p2 vote.sync.ballot.b32 %r10, %p1, 3; \
                st.global.u32 [%rd2], %r10;";
    check(body).threads(32).gives(|thread| if thread < 2 { 3 } else { 9 });
}

#[test]
fn one_lane_of_a_warp_is_elected_and_which_one_is_open() {
    let body =
        "elect.sync %r10|%p1, -1; selp.b32 %r11, 100, 0, %p1; add.s32 %r10, %r10, %r11; st.global.u32 [%rd2], %r10;";
    check(body).gives(|thread| if thread % 32 == 0 { 100 } else { 0 });
    let mut found = std::collections::BTreeSet::new();
    for seed in 1..9 {
        for warp in check(body).seed(seed).run().unwrap().chunks_exact(32) {
            let elected = warp[0] % 100;
            let expected: Vec<u32> = (0..32).map(|lane| elected + if lane == elected { 100 } else { 0 }).collect();
            assert_eq!(warp, expected);
            found.insert(elected);
        }
    }
    assert!(found.len() > 2, "{found:?}");
    let absent = "setp.lt.u32 %p2, %r1, 31; @%p2 elect.sync %r10|%p1, -1;";
    check(absent).threads(32).fails("takes no part");
}

#[test]
fn reductions_over_a_warp() {
    for (name, expected) in [
        ("add.s32", (-16i32 * 32 + 31 * 16) as u32),
        ("min.s32", -16i32 as u32),
        ("max.s32", 15),
        ("min.u32", 0),
        ("max.u32", !0),
        ("or.b32", !0),
        ("and.b32", 0),
    ] {
        let body = format!("sub.s32 %r10, %r1, 16; redux.sync.{name} %r11, %r10, -1; st.global.u32 [%rd2], %r11;");
        check(body).threads(32).gives(|_| expected);
    }
}

#[test]
fn lanes_that_part_meet_again() {
    let body = "and.b32 %r10, %r1, 1; setp.eq.u32 %p1, %r10, 0; mov.u32 %r11, 10; @%p1 bra EVEN; mov.u32 %r11, 20; \
                EVEN: shfl.sync.bfly.b32 %r12|%p2, %r11, 1, 31, -1; st.global.u32 [%rd2], %r12;";
    check(body).gives(|thread| if thread % 2 == 0 { 20 } else { 10 });
}

#[test]
fn each_lane_goes_round_a_loop_as_often_as_it_says() {
    let body = "mov.u32 %r10, 0; mov.u32 %r11, 0; AGAIN: setp.ge.u32 %p1, %r11, %r1; @%p1 bra END; add.s32 %r10, %r10, %r11; \
                add.s32 %r11, %r11, 1; bra AGAIN; END: vote.sync.ballot.b32 %r12, %p1, -1; popc.b32 %r12, %r12; \
                add.s32 %r10, %r10, %r12; st.global.u32 [%rd2], %r10;";
    check(body).threads(32).gives(|thread| thread * thread.saturating_sub(1) / 2 + 32);
}

#[test]
fn a_lane_that_has_ended_is_not_read() {
    let body = "setp.eq.u32 %p1, %r1, 0; @%p1 bra END; shfl.sync.idx.b32 %r10|%p2, %r1, 0, 31, -1; END: ret;";
    check(body).fails("takes no part");
}

#[test]
fn a_lane_that_is_not_in_its_own_mask_is_told() {
    check("redux.sync.add.s32 %r10, %r1, 2;").threads(32).fails("not among those");
}

#[test]
fn lanes_are_ordered_by_barriers_and_not_by_shuffles() {
    let neighbour = |between: &str| {
        check(format!(
            "st.shared.u32 [%r2], %r1; {between} xor.b32 %r10, %r2, 4; ld.shared.u32 %r11, [%r10]; st.global.u32 [%rd2], %r11;"
        ))
    };
    neighbour("shfl.sync.bfly.b32 %r12|%p1, %r1, 1, 31, -1;").fails("race");
    neighbour("bar.warp.sync -1;").gives(|thread| thread ^ 1);
}
