// Barriers in shared memory that count arrivals and bytes (compute capability 9.0), and bulk copies that report their bytes to them.
#pragma once

#include "common/types.cuh"

__device__ inline uint32 shared_address(const void *p) { return uint32(__cvta_generic_to_shared(p)); }

struct Barrier {
    uint64 word;

    // Called by one thread, before a barrier of the CTA.
    __device__ void open(uint32 arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n\t"
                     "fence.mbarrier_init.release.cluster;" ::"r"(shared_address(this)), "r"(arrivals) : "memory");
    }
    // Arrives, and adds to the bytes that the phase awaits.
    __device__ void expect(uint32 bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)), "r"(bytes) : "memory");
    }
    // Waits until phase `number` is complete.
    __device__ void wait(uint32 number) const {
        asm volatile("{\n\t.reg .pred done;\n"
                     "again:\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
                     "@!done bra again;\n\t}" ::"r"(shared_address(this)), "r"(number & 1) : "memory");
    }
};

// Addresses and bytes are multiples of 16.
__device__ inline void copy_bulk(uint32 to, const char *from, uint32 bytes, const Barrier &barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
                 "r"(shared_address(&barrier)) : "memory");
}
// Stores from shared memory, which must not change until the same thread has called wait_stores().
__device__ inline void store_bulk(char *to, uint32 from, uint32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n\t"
                 "cp.async.bulk.commit_group;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ inline void wait_stores() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Prefetches bytes to the L2 cache; address and count are multiples of 16.
__device__ inline void prefetch_bulk(const char *from, uint32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
// Orders ordinary accesses to shared memory before later bulk copies to the same place.
__device__ inline void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
