// Tensors of any strides.
#pragma once

#include "common/types.cuh"

// A tensor of N dimensions, or null. Strides are in bytes.
template <int N> struct View {
    char *data;
    int64 step[N];

    __device__ explicit operator bool() const { return data; }
    __device__ char *at(int64 i) const { return data + i * step[0]; }
    __device__ char *at(int64 i, int64 j) const { return at(i) + j * step[1]; }
    __device__ char *at(int64 i, int64 j, int64 k) const { return at(i, j) + k * step[2]; }
};

// An integer of 4 or 8 bytes.
__device__ inline int64 load_integer(const char *p, uint32 bytes) { return bytes == 8 ? as<int64>(p) : as<int32>(p); }
__device__ inline void store_integer(char *p, uint32 bytes, int64 value) {
    if (bytes == 8) as<int64>(p) = value;
    else as<int32>(p) = int32(value);
}
