//! Maps of a forecast that a test makes itself and hands over in a file.

use super::{Array, Backend, F32, Rng, assert_ok, oracle};
use std::ffi::CString;
use vanward::abi::*;
use vanward::capi::*;

/// A map W [q_heads·head_dim, inputs] as up [outputs, r] · down [r, inputs], or whole.
pub struct Map {
    pub heads: usize,
    pub dim: usize,
    pub input_dim: usize,
    pub memory: bool,
    pub factors: Vec<(&'static str, Array<f64>)>,
}

impl Map {
    pub fn random(rng: &mut Rng, [heads, dim, input_dim]: [usize; 3], rank: Option<usize>, memory: bool) -> Map {
        let inputs = input_dim + if memory { heads * dim } else { 0 } + 1;
        let mut factor =
            |rows: usize, columns: usize| rng.normals(&[rows, columns]).map(|x| F32.round(x / (columns as f64).sqrt()));
        let factors = match rank {
            None => vec![("weight", factor(heads * dim, inputs))],
            Some(rank) => vec![("down", factor(rank, inputs)), ("up", factor(heads * dim, rank))],
        };
        Map { heads, dim, input_dim, memory, factors }
    }

    /// As a file, read by the library.
    pub fn load(&self, backend: &Backend) -> Forecast {
        let (mut tensors, mut data) = (String::new(), vec![]);
        for (name, values) in &self.factors {
            let (begin, [rows, columns]) = (data.len(), [values.shape[0], values.shape[1]]);
            data.extend(values.data.iter().flat_map(|&x| (x as f32).to_le_bytes()));
            let offsets = format!("[{begin},{}]", data.len());
            tensors +=
                &format!(r#","layer.0.{name}":{{"dtype":"F32","shape":[{rows},{columns}],"data_offsets":{offsets}}}"#);
        }
        let Map { heads, dim, input_dim, memory, .. } = self;
        let flags = if *memory { VWD_FORECAST_MEMORY } else { 0 };
        let metadata = format!(
            r#""format":"vanward.forecast","version":"2","flags":"{flags}","layers":"1","input_dim":"{input_dim}","q_heads":"{heads}","head_dim":"{dim}""#
        );
        let header = format!(r#"{{"__metadata__":{{{metadata}}}{tensors}}}"#);
        let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
        let thread = format!("{:?}", std::thread::current().id()).replace(['(', ')'], "");
        let path = std::env::temp_dir().join(format!("vanward-forecast-{}-{thread}", std::process::id()));
        std::fs::write(&path, file).expect("write to the temporary folder");
        let name = CString::new(path.to_str().expect("UTF-8")).unwrap();
        let mut forecast = std::ptr::null_mut();
        // SAFETY: the pointers are valid.
        let status = unsafe { vwd_forecast_load(backend.session(), name.as_ptr(), &mut forecast) };
        let _ = std::fs::remove_file(&path);
        assert_ok(status);
        Forecast(forecast)
    }

    /// W·[x̂, previous, 1] for one row, and the sum of the products' magnitudes of each output.
    pub fn apply(&self, x: &[f64], previous: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let rms = (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64).sqrt();
        let mut values: Vec<f64> = x.iter().map(|x| if rms > 0.0 { x / rms } else { 0.0 }).collect();
        values.extend_from_slice(previous);
        values.push(1.0);
        let mut sizes: Vec<f64> = values.iter().map(|x| x.abs()).collect();
        for (_, factor) in &self.factors {
            let rows = 0..factor.shape[0];
            let absolute = |row: &[f64]| row.iter().map(|w| w.abs()).collect::<Vec<f64>>();
            (values, sizes) = (
                rows.clone().map(|row| oracle::dot(factor.row([row]), &values)).collect(),
                rows.map(|row| oracle::dot(&absolute(factor.row([row])), &sizes)).collect(),
            );
        }
        (values, sizes)
    }
}

pub struct Forecast(pub *mut vwd_forecast);

impl Drop for Forecast {
    fn drop(&mut self) {
        // SAFETY: loaded above, released once.
        unsafe { vwd_forecast_release(self.0) };
    }
}
