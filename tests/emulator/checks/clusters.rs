//! Clusters: memory of other CTAs, what is sent there, and the cluster's barrier.

use super::check;

const BARRIER: &str = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;";

/// Each thread writes its number and its CTA's, and reads the word of the same thread of the next CTA.
fn next(before: &str, after: &str) -> super::Check {
    check(format!(
        "mov.u32 %r20, %cluster_ctarank; mov.u32 %r21, %cluster_nctarank; add.s32 %r22, %r20, 1; rem.u32 %r22, %r22, %r21; \
         mad.lo.s32 %r10, %r20, 1000, %r1; st.shared.u32 [%r2], %r10; {before} mapa.shared::cluster.u32 %r11, %r2, %r22; \
         ld.shared::cluster.u32 %r12, [%r11]; st.global.u32 [%rd2], %r12; {after}"
    ))
    .threads(32)
}

#[test]
fn a_cta_reads_the_shared_memory_of_another() {
    for seed in 0..5 {
        next(BARRIER, BARRIER).cluster(4).seed(seed).gives(|thread| (thread / 32 + 1) % 4 * 1000 + thread % 32);
    }
    next("", BARRIER).cluster(4).fails("race");
    next("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;", BARRIER)
        .cluster(1)
        .gives(|thread| thread);
}

#[test]
fn a_cta_that_has_ended_is_not_touched() {
    // The first CTA ends at once, and the second writes to it.
    let body = "mov.u32 %r20, %cluster_ctarank; setp.eq.u32 %p1, %r20, 0; @%p1 bra END; mov.u32 %r22, 0; \
                mapa.shared::cluster.u32 %r11, %r2, %r22; st.shared::cluster.u32 [%r11], %r1; END: ret;";
    check(body).cluster(2).fails("which has ended");
}

/// Each CTA opens a barrier, and sends each word of its warp to the next CTA, which waits for them.
fn sends(expected: u32, wait: &str) -> super::Check {
    check(format!(
        "mov.u32 %r20, %cluster_ctarank; mov.u32 %r21, %cluster_nctarank; add.s32 %r22, %r20, 1; rem.u32 %r22, %r22, %r21; \
         setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared::cta.b64 [gate], 1; @%p1 fence.mbarrier_init.release.cluster; \
         @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [gate], {expected}; {BARRIER} \
         mov.u32 %r23, gate; mapa.shared::cluster.u32 %r11, %r2, %r22; mapa.shared::cluster.u32 %r12, %r23, %r22; \
         mad.lo.s32 %r10, %r20, 1000, %r1; \
         st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r11], %r10, [%r12]; \
         {wait} ld.shared.u32 %r13, [%r2]; st.global.u32 [%rd2], %r13; {BARRIER}"
    ))
    .threads(32)
}
const WAIT: &str = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [gate], 0; @!%p2 bra WAIT;";

#[test]
fn what_is_sent_is_there_once_the_barrier_says_so() {
    for seed in 0..6 {
        sends(128, WAIT).cluster(4).seed(seed).gives(|thread| (thread / 32 + 3) % 4 * 1000 + thread % 32);
    }
    sends(128, "").cluster(4).fails("race");
    sends(132, WAIT).cluster(4).fails("no warp can go on");
}

#[test]
fn a_cta_does_not_end_before_what_is_on_its_way_to_it() {
    let body = "mov.u32 %r20, %cluster_ctarank; xor.b32 %r22, %r20, 1; setp.eq.u32 %p1, %r1, 0; \
         @%p1 mbarrier.init.shared::cta.b64 [gate], 1; @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [gate], 128;";
    let sent = "mov.u32 %r23, gate; mapa.shared::cluster.u32 %r11, %r2, %r22; mapa.shared::cluster.u32 %r12, %r23, %r22; \
         st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r11], %r1, [%r12];";
    check(format!("{body} {BARRIER} {sent} {BARRIER}")).threads(32).cluster(2).fails("on its way");
}

#[test]
fn each_cluster_has_its_own_barrier() {
    let body = format!("mov.u32 %r20, %cluster_ctarank; {BARRIER} {BARRIER} st.global.u32 [%rd2], %r20;");
    let one = check(body).threads(32);
    super::Check { ctas: 6, cluster: 2, ..one }.gives(|thread| thread / 32 % 2);
}
