//! Forks. A child has the parent's memory but none of its threads, and no CUDA context of the parent works in it: what the
//! parent made is not used there.

use crate::core::status::{Code, Error, Result};
use once_cell::sync::OnceCell;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Forks between this process and the one that loaded the library.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// The process that made something.
#[derive(Clone, Copy, PartialEq)]
pub struct Process {
    generation: u32,
}

impl Process {
    /// This one, whose children are told apart from now on.
    pub fn this() -> Result<Process> {
        static WATCHED: OnceCell<()> = OnceCell::new();
        WATCHED.get_or_try_init(watch)?;
        Ok(Process { generation: GENERATION.load(Relaxed) })
    }

    #[inline]
    pub fn is_this(self) -> bool {
        self.generation == GENERATION.load(Relaxed)
    }
}

fn watch() -> Result<()> {
    extern "C" fn in_child() {
        GENERATION.fetch_add(1, Relaxed);
    }
    // SAFETY: the handler does nothing that a child of a process with threads may not do. It goes when the library is
    // unloaded: the C library knows whose it is.
    match unsafe { libc::pthread_atfork(None, None, Some(in_child)) } {
        0 => Ok(()),
        error => Err(Error::new(Code::OutOfMemory, format!("pthread_atfork: error {error}"))),
    }
}
