//! Values that a session's device keeps for many calls.

use super::{Backend, Session};
use crate::core::status::Result;
use std::sync::Arc;

/// Values on a CUDA session's device, as long as this lives. It keeps the session alive.
pub struct Placed {
    session: Arc<Session>,
    address: u64,
}

impl Session {
    /// Whether its tensors are elsewhere than the library's own values.
    pub fn has_device_memory(&self) -> bool {
        matches!(self.backend, Backend::Cuda(_))
    }

    /// Copies values to the session's device, where they are on return. None on the CPU, which reads them where they are.
    pub fn place<T: Copy>(self: &Arc<Session>, values: &[T]) -> Result<Option<Placed>> {
        Ok(match &self.backend {
            Backend::Cpu(_) => None,
            Backend::Cuda(cuda) => Some(Placed { session: self.clone(), address: cuda.upload(values)? }),
        })
    }
}

impl Placed {
    /// Where the values are.
    pub fn address<T>(&self) -> *const T {
        self.address as *const T
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        if let Backend::Cuda(cuda) = &self.session.backend {
            cuda.free(self.address);
        }
    }
}
