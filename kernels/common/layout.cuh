// What a family's layout.cuh states of its kernels' parameters: where their fields lie in the Rust structs
// that are passed, and which values Rust takes the constants for that both sides have.
#pragma once

#ifdef __CUDACC_RTC__  // knows offsetof by its own name alone
#define VWD_OFFSET(Struct, field) __INTADDR__(&static_cast<Struct *>(nullptr)->field)
#else
#define VWD_OFFSET(Struct, field) __builtin_offsetof(Struct, field)
#endif

#define VWD_SIZE(Struct, bytes) static_assert(sizeof(Struct) == bytes, #Struct " has another size in Rust");
#define VWD_FIELD(Struct, field, at, bytes) \
    static_assert(VWD_OFFSET(Struct, field) == at && sizeof(Struct::field) == bytes, #Struct "::" #field " lies elsewhere in Rust");

#define VWD_CONSTANT(constant, value) static_assert(constant == value, #constant " has another value in Rust");
