//! What every other module stands on: status, data types, tensor views and their checks.

pub mod copy;
pub mod dtype;
pub mod overlap;
pub mod status;
pub mod tensor;
