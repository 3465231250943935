// Fixed-width names for kernels compiled by NVRTC, which has no <cstdint>.
#pragma once

using int32 = int;
using int64 = long long;
using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;

constexpr uint32 WARP = 32;
constexpr uint32 FULL_WARP = 0xffffffffu;

// The T at a byte offset. Tensors come with free strides; with them in bytes an address is one multiply-add per dimension.
template <typename T> __device__ inline T &at(char *base, int64 offset) { return *reinterpret_cast<T *>(base + offset); }
template <typename T> __device__ inline const T &at(const char *base, int64 offset) {
    return *reinterpret_cast<const T *>(base + offset);
}
