//! Memory of a CUDA session's device, given back on drop.

use crate::core::status::Result;
use crate::runtime::Session;
use crate::runtime::cuda::{Cuda, SideStream};
use std::sync::Arc;

/// The backend of a CUDA session.
pub fn cuda(session: &Session) -> &Cuda {
    session.cuda().expect("a cache of a CUDA session")
}

pub struct Memory {
    session: Arc<Session>,
    address: u64,
}

impl Memory {
    pub fn alloc(session: &Arc<Session>, bytes: u64) -> Result<Memory> {
        Ok(Memory { session: session.clone(), address: cuda(session).alloc(bytes as usize)? })
    }

    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn at<T>(&self, offset: u64) -> *mut T {
        (self.address + offset) as *mut T
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        cuda(&self.session).free(self.address);
    }
}

/// The side streams of a cache, waited for on drop.
pub struct Streams {
    session: Arc<Session>,
    /// Copies from host memory to slots; a use for each layer.
    pub fetch: SideStream,
    /// Copies from tails to host memory; a use for each layer.
    pub write: SideStream,
}

impl Streams {
    pub fn create(session: &Arc<Session>, layers: usize) -> Result<Streams> {
        let mut fetch = cuda(session).side_stream(layers)?;
        let write = cuda(session).side_stream(layers).inspect_err(|_| cuda(session).release_side_stream(&mut fetch))?;
        Ok(Streams { session: session.clone(), fetch, write })
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        for stream in [&mut self.fetch, &mut self.write] {
            cuda(&self.session).release_side_stream(stream);
        }
    }
}
