//! Forecast of queries.

use crate::capi::forecast::*;
use crate::capi::session::vwd_session;
use crate::capi::types::vwd_stream;
use crate::core::status::{Error, Result};

pub struct Options;

impl Options {
    pub fn from_c(_c: &vwd_forecast_options) -> Result<Options> {
        Err(Error::unsupported("vwd_forecast_create is not built yet"))
    }
}

pub struct Forecast;

impl Forecast {
    pub fn create(_session: &vwd_session, _options: &Options) -> Result<Forecast> {
        Ok(Forecast)
    }
    pub fn details(&self) -> vwd_forecast_details {
        vwd_forecast_details {
            struct_size: size_of::<vwd_forecast_details>() as u32,
            layers: 0,
            input_dim: 0,
            q_heads: 0,
            head_dim: 0,
            ridge: 0.0,
            solved: 0,
            rank: 0,
            map_bytes: 0,
            sum_bytes: 0,
        }
    }
    pub fn accumulate(&self, _request: &AccumulateRequest) -> Result<()> {
        Ok(())
    }
    pub fn solve(&self, _rank: usize) -> Result<()> {
        Ok(())
    }
    pub fn save(&self, _path: &str) -> Result<()> {
        Ok(())
    }
    pub fn load(_session: &vwd_session, _path: &str) -> Result<Forecast> {
        Err(Error::unsupported("vwd_forecast_load is not built yet"))
    }
    pub fn project(&self, _request: &ProjectRequest, _stream: vwd_stream) -> Result<()> {
        Ok(())
    }
}

pub struct AccumulateRequest;

impl AccumulateRequest {
    pub fn from_c(_forecast: &Forecast, _args: &vwd_forecast_accumulate_args) -> Result<AccumulateRequest> {
        Ok(AccumulateRequest)
    }
}

pub struct ProjectRequest;

impl ProjectRequest {
    pub fn from_c(_forecast: &Forecast, _args: &vwd_forecast_project_args) -> Result<ProjectRequest> {
        Ok(ProjectRequest)
    }
}
