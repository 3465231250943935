//! Summaries of keys.

use crate::capi::index::*;
use crate::capi::types::vwd_stream;
use crate::core::status::{Error, Result};
use crate::runtime::Session;

pub struct UpdateRequest;

impl UpdateRequest {
    pub fn from_c(_session: &Session, _args: &vwd_index_update_args) -> Result<UpdateRequest> {
        Err(Error::unsupported("vwd_index_update is not built yet"))
    }
}

pub fn update(_session: &Session, _request: &UpdateRequest, _stream: vwd_stream) -> Result<()> {
    Ok(())
}

pub struct ImportanceRequest;

impl ImportanceRequest {
    pub fn from_c(_session: &Session, _args: &vwd_channel_importance_args) -> Result<ImportanceRequest> {
        Err(Error::unsupported("vwd_channel_importance is not built yet"))
    }
}

pub fn importance(_session: &Session, _request: &ImportanceRequest, _stream: vwd_stream) -> Result<()> {
    Ok(())
}
