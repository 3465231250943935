//! Times of calls: the wall clock on the CPU, events on a stream on CUDA.

use super::cuda::Interval;
use super::{On, Session};
use crate::abi::vwd_stream;
use crate::core::status::{Error, Result};
use std::sync::Arc;
use std::time::Instant;

pub struct Timer {
    session: Arc<Session>,
    stream: vwd_stream,
    /// On CUDA.
    interval: Option<Interval>,
}

impl Timer {
    /// Fails for a stream that is captured: it cannot be waited for.
    pub fn new(session: &Arc<Session>, stream: vwd_stream) -> Result<Timer> {
        let interval = match session.on(stream)? {
            On::Cpu(_) => None,
            On::Cuda(enqueue) if enqueue.is_capturing()? => {
                let found = format!("{stream:p} is capturing a graph");
                return Err(Error::argument("stream", found, "one that is not: the call waits for it"));
            }
            On::Cuda(_) => Some(Interval::create()?),
        };
        Ok(Timer { session: session.clone(), stream, interval })
    }

    /// The microseconds that `work` takes after `before` has passed. Both enqueue on the timer's stream, which has passed on return.
    pub fn microseconds(&self, before: impl FnOnce() -> Result<()>, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        before()?;
        match (&self.interval, self.session.on(self.stream)?) {
            (Some(interval), On::Cuda(enqueue)) => interval.microseconds(&enqueue, work),
            _ => {
                let begin = Instant::now();
                work()?;
                Ok(begin.elapsed().as_secs_f64() * 1e6)
            }
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        if let (Some(interval), Ok(_on)) = (&mut self.interval, self.session.on(self.stream)) {
            interval.release();
        }
    }
}
