//! Holt's smoothing of block scores.

use crate::capi::predictor::*;
use crate::capi::types::vwd_stream;
use crate::core::status::{Error, Result};
use crate::runtime::Session;

pub struct ResetRequest;

impl ResetRequest {
    pub fn from_c(_session: &Session, _args: &vwd_predictor_reset_args) -> Result<ResetRequest> {
        Err(Error::unsupported("vwd_predictor_reset is not built yet"))
    }
}

pub fn reset(_session: &Session, _request: &ResetRequest, _stream: vwd_stream) -> Result<()> {
    Ok(())
}

pub struct PredictRequest;

impl PredictRequest {
    pub fn from_c(_session: &Session, _args: &vwd_predictor_predict_args) -> Result<PredictRequest> {
        Err(Error::unsupported("vwd_predictor_predict is not built yet"))
    }
}

pub fn predict(_session: &Session, _request: &PredictRequest, _stream: vwd_stream) -> Result<()> {
    Ok(())
}

pub struct UpdateRequest;

impl UpdateRequest {
    pub fn from_c(_session: &Session, _args: &vwd_predictor_update_args) -> Result<UpdateRequest> {
        Err(Error::unsupported("vwd_predictor_update is not built yet"))
    }
}

pub fn update(_session: &Session, _request: &UpdateRequest, _stream: vwd_stream) -> Result<()> {
    Ok(())
}

pub struct CalibrateRequest;

impl CalibrateRequest {
    pub unsafe fn from_c(_session: &Session, _args: &vwd_predictor_calibrate_args) -> Result<CalibrateRequest> {
        Err(Error::unsupported("vwd_predictor_calibrate is not built yet"))
    }
}

pub struct Best {
    pub holt: vwd_holt,
    pub hit_rate: f64,
}

pub fn calibrate(_session: &Session, _request: &CalibrateRequest) -> Result<Best> {
    Err(Error::unsupported("vwd_predictor_calibrate is not built yet"))
}
