//! Gather of listed blocks: target[target_ids[j]] = source[source_ids[j]].

mod cpu;

use crate::abi::{VWD_GATHER_COPY_ENGINE, vwd_gather_blocks_args, vwd_stream, vwd_tensor};
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Checks, Device, Tensor, device_type};
use crate::runtime::{On, Session, require_no_flags};

/// Checked arguments of `vwd_gather_blocks`.
pub struct GatherRequest<'a> {
    /// [N, …]
    pub source: Tensor<'a>,
    /// [M, …]
    pub target: Tensor<'a>,
    /// [n]
    pub source_ids: Tensor<'a>,
    /// [n]
    pub target_ids: Option<Tensor<'a>>,
    /// [1]
    pub count: Option<Tensor<'a>>,
}

impl<'a> GatherRequest<'a> {
    pub fn from_c(session: &Session, c: &'a vwd_gather_blocks_args) -> Result<GatherRequest<'a>> {
        require_no_flags("flags", c.flags)?;
        let checks = session.checks();
        if c.engine > VWD_GATHER_COPY_ENGINE {
            return Err(Error::argument("engine", c.engine, "a VWD_GATHER_* value (0 to 2)"));
        }
        let source = or_in(PINNED, &checks, &c.source).required("source", &c.source)?;
        if source.rank() == 0 {
            return Err(Error::argument("source", "rank 0", "[N, …]"));
        }
        let target = checks.required("target", &c.target)?.of(source.dtype)?.writable()?;
        if target.rank() != source.rank() || target.shape()[1..] != source.shape()[1..] {
            let found = format!("shape {:?}", target.shape());
            let expected = format!("[M] and then {:?}, as in source", &source.shape()[1..]);
            return Err(Error::argument("target", found, expected));
        }
        let (i32, n) = (&[DType::I32], ("n", ANY));
        let source_ids = or_in(HOST, &checks, &c.source_ids).input("source_ids", &c.source_ids, i32, &[n])?;
        let n = ("n", source_ids.dim(0));
        let target_ids = or_in(HOST, &checks, &c.target_ids).optional_input("target_ids", &c.target_ids, i32, &[n])?;
        let count = or_in(HOST, &checks, &c.count).optional_input("count", &c.count, i32, &[("1", 1)])?;
        overlap::reject(&[Some(&target)], &[Some(&source), Some(&source_ids), target_ids.as_ref(), count.as_ref()])?;
        Ok(GatherRequest { source, target, source_ids, target_ids, count })
    }
}

const PINNED: &[i32] = &[device_type::CUDA_HOST];
const HOST: &[i32] = &[device_type::CPU, device_type::CUDA_HOST];

/// Checks of a tensor that may lie in host memory of these kinds, too, whatever the session's device.
fn or_in(kinds: &[i32], checks: &Checks, t: &vwd_tensor) -> Checks {
    if kinds.contains(&t.device_type) { Checks { device: Device::Cpu } } else { *checks }
}

pub fn gather(session: &Session, request: &GatherRequest, stream: vwd_stream) -> Result<()> {
    match session.on(stream)? {
        On::Cpu(cpu) => {
            cpu::gather(cpu, request);
            Ok(())
        }
        On::Cuda(_) => Err(Error::unsupported("vwd_gather_blocks has no CUDA kernel in this build")),
    }
}
