// Keeps a stream waiting for a random time, for tests of what must not depend on time.
//
// The device's clock decides for how long, so that each replay of a graph waits for another time; `seed` tells launches apart that begin
// together. One thread reads the clock until the time is over.
//
// targets: compute_80

#include "common/types.cuh"

// Modulo 2^32.
__device__ inline uint32 nanoseconds() {
    uint32 now;
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(now));
    return now;
}

// Waits for less than `most` nanoseconds, and for as long as one reading of the clock takes to differ from the next.
extern "C" __global__ void delay(uint32 most, uint32 seed) {
    const uint32 begin = nanoseconds();
    uint32 random = begin ^ seed;
    random = (random ^ random >> 16) * 0x85ebca6bu;
    random = (random ^ random >> 13) * 0xc2b2ae35u;
    random ^= random >> 16;
    const uint32 time = __umulhi(random, most);
    while (nanoseconds() - begin < time) {}
}
