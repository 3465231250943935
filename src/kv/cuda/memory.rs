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
    /// Copies from host memory to slots, of even and of odd layers: what a layer waits for is not behind what was fetched ahead for the
    /// next one. A use for each layer.
    fetch: [SideStream; 2],
    /// Copies from tails to host memory; a use for each layer.
    pub write: SideStream,
    /// What gives slots to blocks that attention reads in host memory meanwhile; a use for each layer.
    pub give: SideStream,
}

impl Streams {
    pub fn create(session: &Arc<Session>, layers: usize) -> Result<Streams> {
        let create = |made: &mut [&mut SideStream]| {
            cuda(session)
                .side_stream(layers)
                .inspect_err(|_| made.iter_mut().for_each(|side| cuda(session).release_side_stream(side)))
        };
        let mut even = create(&mut [])?;
        let mut odd = create(&mut [&mut even])?;
        let mut write = create(&mut [&mut even, &mut odd])?;
        let give = create(&mut [&mut even, &mut odd, &mut write])?;
        Ok(Streams { session: session.clone(), fetch: [even, odd], write, give })
    }

    /// Where the fetches of a layer run, after each other.
    pub fn fetch(&mut self, layer: usize) -> &mut SideStream {
        &mut self.fetch[layer % 2]
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        for stream in self.fetch.iter_mut().chain([&mut self.write, &mut self.give]) {
            cuda(&self.session).release_side_stream(stream);
        }
    }
}
