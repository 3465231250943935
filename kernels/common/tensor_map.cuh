// Copies of boxes of tensors to shared memory (compute capability 9.0), which report their bytes to a barrier. One thread requests a box.
#pragma once

#include "common/barrier.cuh"

// Says where a tensor lies and which box a copy takes. The driver writes it: src/runtime/cuda/tensor_map.rs. It is part of a kernel's parameters.
struct alignas(128) TensorMap {
    uint64 words[16];

    // Asks for the map, which is read when a box is requested.
    __device__ void prefetch() const { asm volatile("prefetch.tensormap [%0];" ::"l"(this) : "memory"); }
    // Requests the box that begins with these coordinates, the innermost first. `to`: a multiple of 1024 where the box has so many bytes. Elements outside of the tensor are
    // zeros, and are among the bytes that the barrier is told of.
    __device__ void copy_box(uint32 to, int32 x, int32 y, int32 z, int32 w, const Barrier &barrier) const {
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to), "l"(this),
                     "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(&barrier)) : "memory");
    }
};

// Whether the thread is the one of its warp that requests boxes. All threads of the warp ask. The compiler repeats a request for each lane where it cannot tell that there is one.
__device__ inline bool is_elected() {
    uint32 is_elected;
    asm volatile("{\n\t.reg .pred elected;\n\t"
                 "elect.sync _|elected, 0xffffffff;\n\t"
                 "selp.u32 %0, 1, 0, elected;\n\t}" : "=r"(is_elected)::"memory");
    return is_elected;
}
// Adds to the bytes that a barrier's phase awaits, and does not arrive.
__device__ inline void await_bytes(const Barrier &barrier, uint32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes) : "memory");
}
// Makes the barrier's phase await one arrival more, which comes once this thread's copies (common/copies.cuh) so far are complete.
__device__ inline void await_copies(const Barrier &barrier) {
    asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
