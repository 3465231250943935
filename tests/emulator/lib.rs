//! A `libcuda.so` whose device is emulated: it runs the PTX that the library carries on the CPU, as far as that uses the instruction set.
//!
//! README.md says how it is used, what it knows, what it checks beyond hardware and what it cannot see, and names the files in reading order.
//!
//! parse → decode, operations → registers: PTX becomes instructions; machine, warp: who runs; compute, access, copies, tensors, matrix: what
//! they do; races: what they must not; streams: what orders launches; device, driver, launches, mapped, captures, failures, cupti: what a
//! program sees of it.

mod access;
mod captures;
#[cfg(test)]
mod checks;
mod compute;
mod copies;
mod cupti;
mod decode;
mod device;
#[macro_use]
mod driver;
mod failures;
mod instruction;
mod launches;
mod machine;
mod mapped;
mod matrix;
mod memory;
mod operations;
mod parse;
mod races;
mod registers;
mod streams;
mod tensors;
mod values;
mod warp;
