//! Gather of blocks.

use crate::capi::prefetch::*;
use crate::capi::types::vwd_stream;
use crate::core::status::{Error, Result};
use crate::runtime::Session;

pub struct GatherRequest;

impl GatherRequest {
    pub fn from_c(_session: &Session, _args: &vwd_gather_blocks_args) -> Result<GatherRequest> {
        Err(Error::unsupported("vwd_gather_blocks is not built yet"))
    }
}

pub fn gather(_session: &Session, _request: &GatherRequest, _stream: vwd_stream) -> Result<()> {
    Ok(())
}
