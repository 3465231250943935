//! A `libcuda.so` whose device is emulated: it runs the PTX that the library carries on the CPU, as far as that uses the instruction set.
//!
//! It is there so that kernels are checked where there is no GPU: by `make test`, on every change. It says nothing about speed, and it is
//! no proof for a device: what the hardware does beyond what PTX promises shows there alone. But it is stricter than hardware where PTX
//! is: bytes past the end of an allocation, misaligned addresses, shuffles from lanes that take no part, barriers that not all reach,
//! writes to CTAs that have ended, are faults; copies happen no sooner than they are waited for, and memory that nobody wrote is 0xff. With
//! `VANWARD_EMULATOR_SEED` it does what is left open otherwise: which warp goes on, when a copy arrives. `VANWARD_EMULATOR_RACES=1` looks for
//! races for shared memory.
//!
//! parse → decode, operations → registers: PTX becomes instructions; machine, warp: who runs; compute, access, copies, matrix: what they
//! do; races: what they must not; device, driver: what a program sees of it.

mod access;
#[cfg(test)]
mod checks;
mod compute;
mod copies;
mod decode;
mod device;
mod driver;
mod instruction;
mod machine;
mod matrix;
mod memory;
mod operations;
mod parse;
mod races;
mod registers;
mod streams;
mod values;
mod warp;
