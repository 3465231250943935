//! What a launch says of itself, and whether the device can make it.

use crate::device::{Function, KernelLaunch, with};
use cudarc::driver::sys::*;
use std::ffi::c_void;
use std::sync::Arc;

/// Bytes that a CTA may ask for.
pub const SHARED_OF_CTA: u32 = 227 << 10;

fn attributes(config: &CUlaunchConfig) -> &[CUlaunchAttribute] {
    let attributes = if config.numAttrs == 0 { std::ptr::dangling_mut() } else { config.attrs };
    // SAFETY: the caller's attributes.
    unsafe { std::slice::from_raw_parts(attributes, config.numAttrs as usize) }
}

/// CTAs of a cluster.
pub fn cluster(config: &CUlaunchConfig) -> u32 {
    let id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    // SAFETY: the attribute says which value it is.
    attributes(config).iter().find(|one| one.id == id).map_or(1, |one| unsafe { one.value.clusterDim.x })
}

/// Whether the launch may begin before the one in front of it has ended.
pub fn depends(config: &CUlaunchConfig) -> bool {
    let id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    // SAFETY: the attribute says which value it is.
    attributes(config)
        .iter()
        .any(|one| one.id == id && unsafe { one.value.programmaticStreamSerializationAllowed } != 0)
}

/// A launch that the device can make, with its parameters copied.
pub unsafe fn prepared(
    function: CUfunction,
    ctas: u32,
    threads: u32,
    cluster: u32,
    shared: u32,
    depends: bool,
    parameters: *mut *mut c_void,
) -> Result<KernelLaunch, CUresult> {
    // SAFETY: a handle of cuModuleGetFunction, whose module keeps it.
    let function = unsafe {
        Arc::increment_strong_count(function.cast::<Function>());
        Arc::from_raw(function.cast::<Function>())
    };
    let kernel = with(|device| device.kernel(&function)).map_err(|fault| {
        eprintln!("emulated device: {fault}");
        CUresult::CUDA_ERROR_INVALID_PTX
    })?;
    let limits = *function.limits.lock();
    let fits = ctas > 0
        && ctas < 1 << 31
        && (1..=kernel.most_threads).contains(&threads)
        && shared <= limits.shared
        && shared as u64 + kernel.static_shared <= SHARED_OF_CTA as u64
        && (1..=limits.cluster).contains(&cluster)
        && ctas.is_multiple_of(cluster);
    if !fits {
        eprintln!(
            "emulated device: {}: {ctas} CTAs of {threads} threads in clusters of {cluster}, {shared} bytes of shared memory",
            function.name
        );
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let bytes = kernel.parameters.last().map_or(0, |(begin, bytes)| begin + bytes);
    let mut copied = vec![0u64; bytes.div_ceil(8)];
    for (n, &(begin, bytes)) in kernel.parameters.iter().enumerate() {
        // SAFETY: the caller has an address for each parameter, which has this size.
        unsafe {
            copied
                .as_mut_ptr()
                .cast::<u8>()
                .add(begin)
                .copy_from_nonoverlapping((*parameters.add(n)).cast::<u8>(), bytes)
        };
    }
    Ok(KernelLaunch { function, ctas, threads, cluster, shared, depends, parameters: copied })
}
