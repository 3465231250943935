//! Selection of blocks and tokens.

use crate::capi::select::*;
use crate::capi::types::vwd_stream;
use crate::core::status::{Error, Result};
use crate::runtime::Session;

pub struct BlocksRequest;

impl BlocksRequest {
    pub fn from_c(_session: &Session, _args: &vwd_select_blocks_args) -> Result<BlocksRequest> {
        Err(Error::unsupported("vwd_select_blocks is not built yet"))
    }
}

pub fn blocks(_session: &Session, _request: &BlocksRequest, _stream: vwd_stream) -> Result<()> {
    Ok(())
}

pub struct TokensRequest;

impl TokensRequest {
    pub fn from_c(_session: &Session, _args: &vwd_select_tokens_args) -> Result<TokensRequest> {
        Err(Error::unsupported("vwd_select_tokens is not built yet"))
    }
}

pub fn tokens(_session: &Session, _request: &TokensRequest, _stream: vwd_stream) -> Result<()> {
    Ok(())
}
