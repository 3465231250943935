//! The module that every other one imports: status, data types, tensor views and their checks.

pub mod allocate;
pub mod along;
pub mod array;
pub mod copy;
pub mod dtype;
pub mod files;
pub mod float8;
pub mod floats;
pub mod instructions;
pub mod overlap;
pub mod quiet;
pub mod random;
pub mod status;
pub mod strides;
pub mod tensor;
pub mod text;
pub mod versioned;
