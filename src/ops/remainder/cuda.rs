//! Launches of the kernels of kernels/remainder/remainder.cu.

use super::Request;
use crate::core::status::{Error, Result};
use crate::runtime::cuda::Enqueue;

pub fn update(_: &Enqueue, _: &Request) -> Result<()> {
    Err(Error::unsupported("vwd_remainder_update on CUDA"))
}
