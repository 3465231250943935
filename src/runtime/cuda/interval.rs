//! The time between two events of a stream.

use super::Enqueue;
use super::arena::Allocating;
use super::driver::check;
use crate::core::status::Result;
use cudarc::driver::sys::{self, CUevent};

pub struct Interval {
    begin: CUevent,
    end: CUevent,
}

// SAFETY: handles may be used from any thread; the driver locks.
unsafe impl Send for Interval {}

impl Interval {
    /// The context is current.
    pub fn create() -> Result<Interval> {
        let _allocating = Allocating::enter()?;
        let mut interval = Interval { begin: std::ptr::null_mut(), end: std::ptr::null_mut() };
        let flags = sys::CUevent_flags_enum::CU_EVENT_DEFAULT as u32;
        // SAFETY: the context is current.
        let made = unsafe {
            check(sys::cuEventCreate(&mut interval.begin, flags), "cuEventCreate")
                .and_then(|()| check(sys::cuEventCreate(&mut interval.end, flags), "cuEventCreate"))
        };
        if let Err(error) = made {
            interval.release();
            return Err(error);
        }
        Ok(interval)
    }

    /// The microseconds of the device's time that what `work` enqueues takes on the caller's stream. Waits for it.
    pub fn microseconds(&self, enqueue: &Enqueue, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        let _allocating = Allocating::enter()?;
        // SAFETY: the events and the caller's stream live, and the context is current.
        unsafe {
            check(sys::cuEventRecord(self.begin, enqueue.stream), "cuEventRecord")?;
            let done = work();
            check(sys::cuEventRecord(self.end, enqueue.stream), "cuEventRecord")?;
            check(sys::cuEventSynchronize(self.end), "cuEventSynchronize")?;
            done?;
            let mut milliseconds = 0f32;
            check(sys::cuEventElapsedTime(&mut milliseconds, self.begin, self.end), "cuEventElapsedTime")?;
            Ok(milliseconds as f64 * 1e3)
        }
    }

    /// The context is current.
    pub fn release(&mut self) {
        let _allocating = Allocating::enter();
        for event in [&mut self.begin, &mut self.end] {
            let event = std::mem::replace(event, std::ptr::null_mut());
            if !event.is_null() {
                // SAFETY: made by `create`, destroyed once.
                let _ = unsafe { sys::cuEventDestroy_v2(event) };
            }
        }
    }
}
