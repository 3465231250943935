// Pieces of memory that one lane moves by bulk copies through shared memory, several under way at once (compute capability 9.0).
#pragma once

#include "common/barrier.cuh"

struct Landing {
    char *target;
    uint32 bytes;
};

// Pieces of one warp on their way, oldest first. One lane drives it.
class Ring {
    const uint32 room, piece, stages;
    uint64 *const arrived;   // an mbarrier for each stage
    Landing *const landing;  // where its piece goes on to
    uint32 newest = 0, oldest = 0, travelling = 0, phase = 0;

    __device__ uint32 stage(uint32 n) const { return room + n * piece; }
    __device__ void advance(uint32 &n) const { n = n + 1 == stages ? 0 : n + 1; }

    __device__ void pass_on() {
        const uint32 barrier = shared_address(arrived + oldest);
        uint32 is_there = 0;
        while (!is_there) {
            asm volatile("{ .reg .pred p;\n\t"
                         "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                         "selp.u32 %0, 1, 0, p; }"
                         : "=r"(is_there) : "r"(barrier), "r"(phase) : "memory");
        }
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n\t"
                     "cp.async.bulk.commit_group;"
                     :: "l"(landing[oldest].target), "r"(stage(oldest)), "r"(landing[oldest].bytes) : "memory");
        advance(oldest);
        if (oldest == 0) phase ^= 1;
        --travelling;
    }

public:
    __device__ Ring(uint32 room, uint32 piece, uint32 stages, uint64 *arrived, Landing *landing)
        : room(room), piece(piece), stages(stages), arrived(arrived), landing(landing) {
        for (uint32 n = 0; n < stages; ++n) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(arrived + n)) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __device__ void add(const char *source, char *target, uint32 bytes) {
        if (travelling + 1 == stages) {
            pass_on();
            // The one before it has left its stage, which is the next to be filled.
            asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        }
        const uint32 barrier = shared_address(arrived + newest);
        landing[newest] = {target, bytes};
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     :: "r"(stage(newest)), "l"(source), "r"(bytes), "r"(barrier) : "memory");
        advance(newest);
        ++travelling;
    }
    // Until all have left shared memory: the kernel's end waits for the rest.
    __device__ void drain() {
        while (travelling) pass_on();
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
    // Until all are where they go.
    __device__ void land() {
        while (travelling) pass_on();
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
};
