//! Attention over a selection.

use crate::capi::attention::*;
use crate::capi::types::vwd_stream;
use crate::core::status::{Error, Result};
use crate::runtime::Session;

pub struct Request;

impl Request {
    pub fn from_c(_session: &Session, _args: &vwd_attention_args) -> Result<Request> {
        Err(Error::unsupported("vwd_attention is not built yet"))
    }
}

pub fn run(_session: &Session, _request: &Request, _stream: vwd_stream) -> Result<()> {
    Ok(())
}

pub struct MergeRequest;

impl MergeRequest {
    pub unsafe fn from_c(_session: &Session, _args: &vwd_merge_states_args) -> Result<MergeRequest> {
        Err(Error::unsupported("vwd_merge_states is not built yet"))
    }
}

pub fn merge(_session: &Session, _request: &MergeRequest, _stream: vwd_stream) -> Result<()> {
    Ok(())
}
