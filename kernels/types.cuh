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

// Dependent launch (compute capability 9.0 and later; elsewhere nothing, and kernels run one after the other). A kernel that allows it
// lets the next one start once all its own CTAs have started; the next waits for its end before it reads its results or writes anything.
__device__ inline void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
