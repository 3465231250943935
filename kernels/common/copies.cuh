// Asynchronous copies to shared memory (cp.async), in groups that complete in order.
#pragma once

#include "common/types.cuh"

// Copies 16 bytes, or writes zeros where is_there is false.
__device__ inline void copy_16(uint32 to, const char *from, bool is_there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}
__device__ inline void copy_16(uint32 to, const char *from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Arrives at a barrier of shared memory (common/barrier.cuh) once this thread's copies so far are complete.
__device__ inline void arrive_after_copies(uint32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Waits for this thread's copies, except those of the N last groups.
template <uint32 N> __device__ inline void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
// Loads 16 bytes that a copy brought.
__device__ inline void load_four_words(uint32 from, uint32 (&x)[4]) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from) : "memory");
}
