// Copies of runs by loads and stores.
#pragma once

#include "common/types.cuh"

// Copies `bytes` in units of 16 by the loads and stores of LANES threads, so many units of each in flight.
template <uint32 LANES, uint32 AT_ONCE = 8>
__device__ inline void copy_units(const char *source, char *target, uint64 bytes, uint32 lane) {
    const uint64 units = bytes / 16;
    for (uint64 first = lane; first < units; first += AT_ONCE * LANES) {
        uint4 values[AT_ONCE];
#pragma unroll
        for (uint32 k = 0; k < AT_ONCE; ++k)
            if (first + k * LANES < units) values[k] = __ldcs(&as<uint4>(source + (first + k * LANES) * 16));
#pragma unroll
        for (uint32 k = 0; k < AT_ONCE; ++k)
            if (first + k * LANES < units) as<uint4>(target + (first + k * LANES) * 16) = values[k];
    }
}
