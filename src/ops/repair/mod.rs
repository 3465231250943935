//! Repair of a prediction.

use crate::capi::attention::*;
use crate::capi::types::vwd_stream;
use crate::core::status::{Error, Result};
use crate::runtime::Session;

pub struct Request;

impl Request {
    pub fn from_c(_session: &Session, _args: &vwd_repair_args) -> Result<Request> {
        Err(Error::unsupported("vwd_repair is not built yet"))
    }
}

pub fn run(_session: &Session, _request: &Request, _stream: vwd_stream) -> Result<()> {
    Ok(())
}
