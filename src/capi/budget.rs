//! Budget: measured times of a shape on a device, and how much speculation they pay for.

use super::boundary::{Handle, computing, handle, out, release, versioned, write_versioned};
use super::session::vwd_session;
use crate::abi::{vwd_budget, vwd_budget_answer, vwd_budget_options, vwd_budget_question, vwd_status, vwd_stream};
use crate::core::status::Result;
use crate::core::text::text;
use crate::decode::budget::costs::Costs;
use crate::decode::budget::{Budget, Options, Question};
use crate::runtime::fork::Process;
use std::ffi::c_char;
use std::mem::MaybeUninit;
use std::sync::Arc;

/// What a `vwd_budget` is.
struct Measured(Budget, Process);

impl Handle for Measured {
    #[inline]
    fn maker(&self) -> Process {
        self.1
    }
}

impl Measured {
    fn into_c(budget: Budget, maker: Process) -> *mut vwd_budget {
        Box::into_raw(Box::new(Measured(budget, maker))).cast()
    }
}

/// What a decoder decides by; absent for NULL.
///
/// # Safety
/// `budget` is NULL or live.
pub unsafe fn costs<'a>(budget: *const vwd_budget, name: &str) -> Result<Option<&'a Arc<Costs>>> {
    if budget.is_null() {
        return Ok(None);
    }
    // SAFETY: says the caller.
    Ok(Some(unsafe { handle(budget.cast::<Measured>(), name)? }.0.costs()))
}

/// Measures the calls of one layer: selection, attention over k selected blocks, attention of guesses (PRR: Wang et al. 2026), repair
/// with shares of the blocks missed, and dense attention of 1 … max_draft + 1 positions, for each context and batch of the grid. Then a
/// layer of a `vwd_decoder` as it runs in a step, by SERIAL, by PRR for each ratio and share of missed blocks, and by FORESEEN for each
/// ratio, selection on a stream of the decoder's own beside attention; on CUDA in a graph.
///
/// session  Measured as it is: its threads, its forced variants, and its checks of contents, if it makes them.
/// options  Required: the shape has no defaults, the grid has.
/// stream   The stream that is measured. On CUDA other work on the device falsifies the times.
/// budget   Out. Release with `vwd_budget_release`. It does not need the session any more.
///
/// A set-up call: it allocates keys, values and what else the calls need, at most options->limit_bytes, and gives them back. Keys and
/// queries are random, lists are spread evenly. What the limit leaves, up to 64 MiB on the CPU and 256 MiB on CUDA, is read before
/// each timed call, so that caches hold nothing of its inputs. CUDA: times are those between two events on stream; the stream's
/// scratch arena grows to what the calls need, as with `vwd_session_reserve`. A decoder's layers are captured on a stream of the profile's
/// own, which has an arena meanwhile, and launched on stream; a session that checks contents launches their calls one by one.
///
/// Blocks, for seconds with the default grid, and waits for stream; not for capture: a stream that captures is refused. Thread-safe,
/// but calls on the session at the same time falsify the times; calls on one stream are ordered by the caller.
/// Errors: INVALID_ARGUMENT (the message names the argument; a limit that the grid exceeds, with what it needs), UNSUPPORTED,
/// OUT_OF_MEMORY, DRIVER, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_budget_profile(
    session: *const vwd_session,
    options: *const vwd_budget_options,
    stream: vwd_stream,
    budget: *mut *mut vwd_budget,
) -> vwd_status {
    computing("vwd_budget_profile", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of the arguments.
        let (session, options, budget) = unsafe {
            (handle(session, "session")?, versioned(options, "options", &mut buffer)?, out(budget, "budget")?)
        };
        let measured = Budget::profile(&session.0, &Options::from_c(options)?, stream)?;
        budget.write(Measured::into_c(measured, session.maker()));
        Ok(())
    })
}

/// Writes a budget to a safetensors file (docs/budget.md has the format), as `vwd_forecast_save` does: an existing file is replaced
/// whole and keeps its permissions; after an error it is as it was.
///
/// path  NUL-terminated UTF-8.
///
/// Blocks; not for capture. Thread-safe.
/// Errors: INVALID_ARGUMENT (path), IO (the message names path), OUT_OF_MEMORY, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_budget_save(budget: *const vwd_budget, path: *const c_char) -> vwd_status {
    computing("vwd_budget_save", || {
        // SAFETY: the C contract of budget and path.
        let (budget, path) = unsafe { (handle(budget.cast::<Measured>(), "budget")?, text(path, "path")?) };
        budget.0.save(path)
    })
}

/// Reads a budget that `vwd_budget_save` wrote, if it is of this shape and of the session's device. A file of version 1 or 2, whose
/// times of a decoder's strategies are absent or those of launches, is refused: profile again.
///
/// session  Its device (name, compute capability and multiprocessors; on the CPU the processor and the number of threads) must be the
///          one that was measured.
/// options  The shape must be the one that was measured; the grid is the file's, and its fields are checked and not used.
/// path     NUL-terminated UTF-8.
/// budget   Out. Release with `vwd_budget_release`. It does not need the session any more.
///
/// Blocks and allocates; not for capture. Thread-safe.
/// Errors: INVALID_ARGUMENT (the message names what differs, the value found and the one that was measured), IO (the message names
/// path and says what does not fit the format, a checksum among it), OUT_OF_MEMORY, INTERNAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_budget_load(
    session: *const vwd_session,
    options: *const vwd_budget_options,
    path: *const c_char,
    budget: *mut *mut vwd_budget,
) -> vwd_status {
    computing("vwd_budget_load", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of the arguments.
        let (session, options, path, budget) = unsafe {
            (
                handle(session, "session")?,
                versioned(options, "options", &mut buffer)?,
                text(path, "path")?,
                out(budget, "budget")?,
            )
        };
        let loaded = Budget::load(&session.0, &Options::from_c(options)?, path)?;
        budget.write(Measured::into_c(loaded, session.maker()));
        Ok(())
    })
}

/// Releases a budget; NULL is a no-op. No call on it may be in progress.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_budget_release(budget: *mut vwd_budget) {
    // SAFETY: the C contract of budget.
    unsafe { release(budget.cast::<Measured>()) }
}

/// Tells which speculation pays, and how much of it, for a context, a batch and what is known of guesses and drafts.
///
/// Times are linear between the contexts and batches of the grid. With the ones of selection s, attention a over k blocks, dense
/// attention d(γ) of γ + 1 positions, a decoder's layer t by SERIAL and p(r, x) by PRR, with ⌈r·k⌉ guesses of which the share x of the
/// selected blocks was missed, and the rest R of a layer:
///   SERIAL  R + s + a
///   PRR     R + s + a + p(r, 1 − coverage(r)) − t: guesses are attended while selection runs, and repaired
///   SELF    Σ_{j=0…γ} p^j tokens in the time γ·(the faster of the two) + R + γ·rest_position_us + d(γ); ties go to fewer drafts
///   dense   R + d(0)
/// A strategy pays if its speed exceeds what it is compared with by more than the margin.
///
/// question  Required.
/// answer    Out; the caller has set its struct_size.
///
/// Runs on the host, in microseconds at most: reads no tensor, does not allocate, block or touch the device; may be called during a
/// capture. Thread-safe.
/// Errors: INVALID_ARGUMENT (the message names the argument).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vwd_budget_ask(
    budget: *const vwd_budget,
    question: *const vwd_budget_question,
    answer: *mut vwd_budget_answer,
) -> vwd_status {
    computing("vwd_budget_ask", || {
        let mut buffer = MaybeUninit::uninit();
        // SAFETY: the C contract of budget and question.
        let (budget, question) =
            unsafe { (handle(budget.cast::<Measured>(), "budget")?, versioned(question, "question", &mut buffer)?) };
        let answered = budget.0.ask(&Question::from_c(question)?);
        // SAFETY: the C contract of answer.
        unsafe { write_versioned(answer, &answered, "answer") }
    })
}
