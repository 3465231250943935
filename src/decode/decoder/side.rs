//! What runs beside the caller's stream.

use crate::core::status::Result;
use crate::runtime::Session;
use crate::runtime::cuda::Branch;
use std::sync::Arc;

/// A branch of the caller's stream. There is none on the CPU, where calls follow each other, and where no layer has a use for one.
pub struct Side {
    session: Arc<Session>,
    branch: Option<Branch>,
}

impl Side {
    /// `uses`: 0 makes none.
    pub fn create(session: &Arc<Session>, uses: usize) -> Result<Side> {
        let branch = match session.cuda() {
            Some(cuda) if uses > 0 => Some(cuda.branch(uses)?),
            _ => None,
        };
        Ok(Side { session: session.clone(), branch })
    }

    pub fn branch(&self) -> Option<&Branch> {
        self.branch.as_ref()
    }

    /// Makes the branch's scratch arena large enough, and waits for the branch where it was not.
    pub fn reserve(&self, bytes: u64) -> Result<()> {
        match &self.branch {
            Some(branch) if bytes > 0 => self.session.reserve(branch.stream(), bytes),
            _ => Ok(()),
        }
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        if let (Some(cuda), Some(branch)) = (self.session.cuda(), &mut self.branch) {
            cuda.release_branch(branch);
        }
    }
}
