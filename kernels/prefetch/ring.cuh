// A ring of stages in shared memory, through which one lane moves pieces of memory by bulk copies, several in flight at once (compute
// capability 9.0).
#pragma once

#include "common/barrier.cuh"

// The target of the piece in a stage.
struct Destination {
    char *target;
    uint32 bytes;
};

// One lane of a warp calls these functions. `newest` is the stage that is filled next, `oldest` the stage that is written next.
class Ring {
    const uint32 begin, piece, stages;  // the address of the first stage, the bytes of a stage, and their number
    uint64 *const arrived;              // [stages] an mbarrier for each stage
    Destination *const destinations;    // [stages]
    uint32 newest = 0, oldest = 0, in_flight = 0, phase = 0;

    __device__ uint32 stage(uint32 n) const { return begin + n * piece; }
    __device__ void advance(uint32 &n) const { n = n + 1 == stages ? 0 : n + 1; }

    // Waits for the oldest piece to arrive, and begins to write it to its target.
    __device__ void write_oldest() {
        const uint32 barrier = shared_address(arrived + oldest);
        uint32 has_arrived = 0;
        while (!has_arrived) {
            asm volatile("{ .reg .pred p;\n\t"
                         "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                         "selp.u32 %0, 1, 0, p; }"
                         : "=r"(has_arrived) : "r"(barrier), "r"(phase) : "memory");
        }
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n\t"
                     "cp.async.bulk.commit_group;"
                     :: "l"(destinations[oldest].target), "r"(stage(oldest)), "r"(destinations[oldest].bytes) : "memory");
        advance(oldest);
        if (oldest == 0) phase ^= 1;
        --in_flight;
    }

public:
    __device__ Ring(uint32 begin, uint32 piece, uint32 stages, uint64 *arrived, Destination *destinations)
        : begin(begin), piece(piece), stages(stages), arrived(arrived), destinations(destinations) {
        for (uint32 n = 0; n < stages; ++n) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(arrived + n)) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    // Requests a piece into the newest stage.
    __device__ void add(const char *source, char *target, uint32 bytes) {
        if (in_flight + 1 == stages) {
            write_oldest();
            // The piece written before the oldest has left its stage, which is filled next.
            asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        }
        const uint32 barrier = shared_address(arrived + newest);
        destinations[newest] = {target, bytes};
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     :: "r"(stage(newest)), "l"(source), "r"(bytes), "r"(barrier) : "memory");
        advance(newest);
        ++in_flight;
    }
    // Waits until all pieces have left shared memory. The end of the kernel waits for their writes.
    __device__ void drain() {
        while (in_flight) write_oldest();
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
    // Waits until all pieces are written to their targets.
    __device__ void finish() {
        while (in_flight) write_oldest();
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
};
