//! Makes a call several times and checks what must hold of any.

use crate::case::{Case, Role};
use crate::memory::Memory;
use crate::placed::{Placed, PlacedTensor};
use crate::support::*;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use vanward::abi::*;

/// Time of the processor that a call with little work may take.
const MOST_TIME: Duration = Duration::from_secs(2);
/// Scratch that a session may keep after calls on tensors of at most a megabyte.
const MOST_SCRATCH: u64 = 256 << 20;

pub struct Lab {
    pub memory: Memory,
    /// Sessions with 1 thread, 7, 2, and the caller's; the last one has 1 thread and checks contents.
    sessions: [(&'static str, Session); 5],
}

/// The session that checks contents.
const CHECKING: usize = 4;

/// How a case is run: in which session, with which garbage around the elements, in which floating-point environment.
struct Run {
    session: usize,
    garbage: usize,
    is_odd: bool,
}

#[derive(PartialEq)]
pub enum Verdict {
    Refused,
    /// And wrote no results.
    Accepted,
    Worked,
}

/// What a call left behind.
struct Outcome {
    status: vwd_status,
    text: String,
    extra: Vec<u8>,
    /// The bytes of each tensor that it may write.
    tensors: Vec<Vec<u8>>,
}

impl Lab {
    pub fn new() -> Lab {
        let callers = vwd_session_options { device: VWD_DEVICE_CPU, parallel_for: Some(parallel_for), ..args() };
        let callers = Session::create(&callers).unwrap_or_else(|(status, text)| panic!("status {status}: {text}"));
        let checking =
            vwd_session_options { device: VWD_DEVICE_CPU, threads: 1, check: VWD_CHECK_CONTENTS as u64, ..args() };
        let checking = Session::create(&checking).unwrap_or_else(|(status, text)| panic!("status {status}: {text}"));
        let sessions = [
            ("1 thread", Session::cpu(1)),
            ("7 threads", Session::cpu(7)),
            ("2 threads", Session::cpu(2)),
            ("the caller's threads", callers),
            ("a session that checks contents", checking),
        ];
        Lab { memory: Memory::map(), sessions }
    }

    /// That of one thread.
    pub fn session(&self) -> &Session {
        &self.sessions[0].1
    }

    /// Runs a case four times: alone, shared among threads, with all else different that changes nothing, and with its contents
    /// checked, which may refuse it.
    pub fn check(&mut self, case: &mut Case) -> Result<Verdict, String> {
        let placed = Placed::new(case, &mut self.memory);
        let names = case.names();
        let other = case.rng.pick(&[2, 3]);
        let runs = [(0, 0, false), (1, 0, false), (other, 1, true), (CHECKING, 0, false)];
        let mut first: Option<Outcome> = None;
        for (session, garbage, is_odd) in runs {
            let run = Run { session, garbage, is_odd };
            let outcome = self.run(case, &placed, &run)?;
            let text = &outcome.text;
            match outcome.status {
                VWD_OK if placed.must_be_refused => return Err("accepted, though an output overlaps".into()),
                VWD_OK => {}
                VWD_ERROR_INVALID_ARGUMENT if !is_in_words(text, &names) => {
                    return Err(format!("the message is not `name: found; expected …`: {text}"));
                }
                VWD_ERROR_INVALID_ARGUMENT => {}
                status => return Err(format!("status {status}: {text}")),
            }
            untouched(&placed, &outcome, garbage)?;
            match &first {
                None => first = Some(outcome),
                Some(first) if session == CHECKING && first.status == VWD_OK && outcome.status != VWD_OK => {}
                Some(first) => same(&placed, first, &outcome, garbage).map_err(|what| {
                    let around = if is_odd { ", other garbage around the elements and other rounding" } else { "" };
                    format!("{what} on {}{around}", self.sessions[session].0)
                })?,
            }
        }
        let first = first.expect("a run");
        let wrote = placed.outputs().zip(&first.tensors).any(|(t, now)| t.before[0] != *now);
        Ok(match first.status {
            VWD_OK if wrote || !first.extra.is_empty() => Verdict::Worked,
            VWD_OK => Verdict::Accepted,
            _ => Verdict::Refused,
        })
    }

    fn run(&mut self, case: &Case, placed: &Placed, run: &Run) -> Result<Outcome, String> {
        for tensor in &placed.tensors {
            self.memory.write(&tensor.piece, &tensor.before[run.garbage]);
        }
        let (on, session) = &self.sessions[run.session];
        let begin = processor_time();
        let (status, extra) = match run.is_odd {
            true => rounding::oddly(|| (case.invoke)(session, placed.args)),
            false => (case.invoke)(session, placed.args),
        };
        let took = processor_time() - begin;
        let text = if status == VWD_OK { String::new() } else { last_error() };
        let scratch = session.details().scratch_bytes;
        if took > MOST_TIME {
            return Err(format!("took {took:?} on {on}, status {status}: {text}"));
        }
        if scratch > MOST_SCRATCH {
            return Err(format!("the session holds {scratch} bytes of scratch"));
        }
        let tensors = placed.outputs().map(|t| self.memory.read(&t.piece).to_vec()).collect();
        Ok(Outcome { status, text, extra, tensors })
    }
}

impl Placed {
    fn outputs(&self) -> impl Iterator<Item = &PlacedTensor> {
        self.tensors.iter().filter(|t| t.role != Role::In)
    }
}

/// `name: found; expected …`, where the name is an argument's, with an index where its contents are wrong, or the sum of two.
fn is_in_words(text: &str, names: &[String]) -> bool {
    let Some((name, rest)) = text.split_once(": ") else { return false };
    let is_known = |name: &str| names.iter().any(|known| known == name);
    let found =
        rest.split_once("; expected ").is_some_and(|(found, expected)| !found.is_empty() && !expected.is_empty());
    let without_index = name.rsplit_once('[').map_or(name, |(name, _)| name);
    found && (is_known(without_index) || name.split(" + ").all(is_known))
}

/// A call that failed has written nothing; one that did not, nothing but elements.
fn untouched(placed: &Placed, outcome: &Outcome, garbage: usize) -> Result<(), String> {
    for (tensor, now) in placed.outputs().zip(&outcome.tensors) {
        let before = &tensor.before[garbage];
        let mut bytes = now.iter().zip(before).zip(&tensor.is_element);
        let wrong =
            bytes.position(|((now, before), is_element)| now != before && !(*is_element && outcome.status == VWD_OK));
        if let Some(at) = wrong {
            let what = if outcome.status == VWD_OK { "beside its elements" } else { "in spite of an error" };
            return Err(format!("{} was written {what}, {at} bytes from {:?}", tensor.name, tensor.piece.range));
        }
    }
    Ok(())
}

/// Both runs did the same. Where the second began with other garbage, a byte that neither wrote may differ.
fn same(placed: &Placed, first: &Outcome, second: &Outcome, garbage: usize) -> Result<(), String> {
    if (first.status, &first.text) != (second.status, &second.text) {
        let both = [first, second].map(|o| format!("{} {:?}", o.status, o.text));
        return Err(format!("another answer, {} instead of {},", both[1], both[0]));
    }
    if first.extra != second.extra {
        return Err("other results".into());
    }
    for ((tensor, a), b) in placed.outputs().zip(&first.tensors).zip(&second.tensors) {
        let is_left = |at: usize| a[at] == tensor.before[0][at] && b[at] == tensor.before[garbage][at];
        if let Some(at) = (0..a.len()).find(|&at| a[at] != b[at] && !is_left(at)) {
            return Err(format!("{} differs in byte {at} of {:?}", tensor.name, tensor.piece.range));
        }
    }
    Ok(())
}

/// The caller's threads: those that share a call's work are made for it.
unsafe extern "C" fn parallel_for(_: *mut c_void, tasks: u64, task: vwd_task, work: *mut c_void) {
    struct Work(*mut c_void);
    // SAFETY: tasks may run on any threads.
    unsafe impl Sync for Work {}
    let (task, work, next) = (task.expect("a task"), &Work(work), &AtomicU64::new(0));
    let share = move || {
        std::iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed)).take_while(|&index| index < tasks).for_each(
            // SAFETY: each index once, and all have returned when this function returns.
            |index| unsafe { task(work.0, index) },
        );
    };
    std::thread::scope(|scope| {
        scope.spawn(share);
        share();
    });
}

/// A floating-point environment in which no number comes out right that depends on it.
mod rounding {
    /// Rounds towards zero, and takes subnormals for zero.
    #[cfg(target_arch = "x86_64")]
    pub fn oddly<T>(call: impl FnOnce() -> T) -> T {
        const ODD: u32 = 0x1f80 | 0x6000 | 0x8040;
        let set = |register: u32| {
            // SAFETY: a valid control register; what is computed under the odd one is compared with nothing.
            unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const register, options(nostack, readonly)) }
        };
        set(ODD);
        let result = call();
        let mut after = 0u32;
        // SAFETY: stores four bytes.
        unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut after, options(nostack)) };
        set(0x1f80);
        // The lowest bits say what has happened.
        assert_eq!(after & !0x3f, ODD & !0x3f, "the caller's floating-point environment");
        result
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub fn oddly<T>(call: impl FnOnce() -> T) -> T {
        call()
    }
}

/// Time that all threads of the process have computed.
pub fn processor_time() -> Duration {
    // SAFETY: plain data, filled by the call.
    let time = unsafe {
        let mut time = std::mem::zeroed::<libc::timespec>();
        assert_eq!(libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time), 0);
        time
    };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
