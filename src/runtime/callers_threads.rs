//! The caller's threads, which do a call's work while the call lasts: its `parallel_for`.

use crate::abi::vwd_task;
use crate::core::floats::Floats;
use crate::core::quiet;
use parking_lot::Mutex;
use std::any::Any;
use std::cell::Cell;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// `vwd_parallel_for` and its first argument.
#[derive(Clone, Copy, Debug)]
pub struct ParallelFor {
    call: unsafe extern "C" fn(*mut c_void, u64, vwd_task, *mut c_void),
    context: *mut c_void,
}

// SAFETY: the options say that it is called by every thread that uses the session.
unsafe impl Send for ParallelFor {}
// SAFETY: as above.
unsafe impl Sync for ParallelFor {}

/// One call's tasks; `work` points here.
struct Work<'t> {
    task: &'t (dyn Fn(usize) + Sync),
    tasks: usize,
    done: AtomicUsize,
    /// What the first task that panicked said.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

thread_local! {
    /// Set while this thread runs a task. What a task shares out it does itself: a pool may not bear calls from its own
    /// threads.
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

impl ParallelFor {
    /// # Safety
    /// The contract of `vwd_parallel_for`, for as long as the result and its copies are used.
    pub unsafe fn new(
        call: unsafe extern "C" fn(*mut c_void, u64, vwd_task, *mut c_void),
        context: *mut c_void,
    ) -> ParallelFor {
        ParallelFor { call, context }
    }

    /// Runs `task(0) … task(tasks−1)` and waits for all. A panic is passed on when all have ended.
    pub fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        if IN_TASK.get() {
            return (0..tasks).for_each(task);
        }
        let work = Work { task, tasks, done: AtomicUsize::new(0), panic: Mutex::default() };
        // SAFETY: the engine passes `work` to `run_task` and nobody else, and returns when all its calls have.
        unsafe { (self.call)(self.context, tasks as u64, Some(run_task), (&raw const work).cast_mut().cast()) };
        if let Some(payload) = work.panic.into_inner() {
            resume_unwind(payload);
        }
        let done = work.done.into_inner();
        assert!(done == tasks, "options.parallel_for returned when {done} of {tasks} tasks had run");
    }
}

/// Never unwinds: the engine's frames lie between this and the call.
unsafe extern "C" fn run_task(work: *mut c_void, index: u64) {
    // SAFETY: `work` is what `run` passed; it waits there.
    let work = unsafe { &*work.cast::<Work>() };
    let outcome = {
        let (_floats, outer) = (Floats::enter(), quiet::enter());
        let before = IN_TASK.replace(true);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            assert!(index < work.tasks as u64, "options.parallel_for ran task {index} of {}", work.tasks);
            (work.task)(index as usize);
        }))
        .map_err(|payload| Box::new(quiet::describe(payload.as_ref())));
        IN_TASK.set(before);
        quiet::leave(outer);
        outcome
    };
    if let Err(text) = outcome {
        work.panic.lock().get_or_insert(text);
    }
    work.done.fetch_add(1, Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the tasks on two threads, and counts calls in its context.
    unsafe extern "C" fn on_two_threads(context: *mut c_void, tasks: u64, task: vwd_task, work: *mut c_void) {
        // SAFETY: the tests pass a counter.
        unsafe { &*context.cast::<AtomicUsize>() }.fetch_add(1, Relaxed);
        let (task, work) = (task.expect("a function"), work as usize);
        // SAFETY: each task once, before this returns.
        let run = |first| (first..tasks).step_by(2).for_each(|index| unsafe { task(work as *mut c_void, index) });
        std::thread::scope(|scope| {
            scope.spawn(|| run(0));
            run(1);
        });
    }

    fn counting(calls: &AtomicUsize) -> ParallelFor {
        // SAFETY: the counter outlives what borrows it here.
        unsafe { ParallelFor::new(on_two_threads, (&raw const *calls).cast_mut().cast()) }
    }

    #[test]
    fn panic_of_a_task_reaches_the_caller_when_the_others_have_run() {
        let (calls, ran) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let caught = catch_unwind(|| {
            counting(&calls).run(100, &|index| {
                assert!(index != 30, "thirty");
                ran.fetch_add(1, Relaxed);
            });
        });
        let text = *caught.unwrap_err().downcast::<String>().unwrap();
        assert!(text.starts_with("thirty at src/runtime/callers_threads.rs:"), "{text}");
        assert_eq!((ran.into_inner(), calls.into_inner()), (99, 1));
    }

    #[test]
    fn task_does_itself_what_it_shares_out() {
        let (calls, ran) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let threads = counting(&calls);
        threads.run(4, &|_| {
            threads.run(10, &|_| {
                ran.fetch_add(1, Relaxed);
            })
        });
        assert_eq!((ran.into_inner(), calls.into_inner()), (40, 1));
    }
}
