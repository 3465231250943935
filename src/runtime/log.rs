//! The log of a session: text for the engine's callback. Without a callback nothing is logged: the library prints nothing.

use crate::abi::{VWD_LOG_DEBUG, VWD_LOG_INFO, VWD_LOG_WARNING};
use crate::core::status::{Error, Result};
use std::ffi::{CString, c_char, c_void};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    Warning = VWD_LOG_WARNING as isize,
    Info = VWD_LOG_INFO as isize,
    Debug = VWD_LOG_DEBUG as isize,
}

/// The environment variable that states the level where the options do not.
pub const LEVEL_VARIABLE: &str = "VANWARD_LOG";

impl Level {
    const ALL: [(&'static str, Level); 3] =
        [("warning", Level::Warning), ("info", Level::Info), ("debug", Level::Debug)];

    /// `number` is a VWD_LOG_* value; 0 means the environment's level, `named`, or INFO without one.
    pub fn of(number: u32, named: Option<&str>) -> Result<Level> {
        if number != 0 {
            let level = Level::ALL.into_iter().find(|(_, level)| *level as u32 == number);
            return level
                .map(|(_, level)| level)
                .ok_or_else(|| Error::argument("options.log_level", number, "a VWD_LOG_* value (0 to 3)"));
        }
        let Some(named) = named.filter(|name| !name.is_empty()) else { return Ok(Level::Info) };
        let level = Level::ALL.into_iter().find(|(name, _)| *name == named);
        level
            .map(|(_, level)| level)
            .ok_or_else(|| Error::argument(LEVEL_VARIABLE, format!("{named:?}"), "warning, info or debug"))
    }
}

type Call = unsafe extern "C" fn(*mut c_void, u32, *const c_char);

/// `vwd_log` and its first argument.
#[derive(Clone, Copy, Debug)]
pub struct Log {
    call: Option<Call>,
    context: *mut c_void,
    /// The most detailed level that is logged.
    level: Level,
}

// SAFETY: the options say that the callback is called by every thread that uses the session.
unsafe impl Send for Log {}
// SAFETY: as above.
unsafe impl Sync for Log {}

impl Log {
    pub const NONE: Log = Log { call: None, context: std::ptr::null_mut(), level: Level::Warning };

    /// # Safety
    /// The contract of `vwd_log`, for as long as the result and its copies are used.
    pub unsafe fn new(call: Call, context: *mut c_void, level: Level) -> Log {
        Log { call: Some(call), context, level }
    }

    #[inline]
    pub fn has(&self, level: Level) -> bool {
        self.call.is_some() && level <= self.level
    }

    /// Logs a line. `text` is evaluated only where the level is logged.
    #[inline]
    pub fn write(&self, level: Level, text: impl FnOnce() -> String) {
        if self.has(level) {
            self.pass_on(level, text());
        }
    }

    #[cold]
    fn pass_on(&self, level: Level, text: String) {
        // The driver's log of a compilation has several lines.
        let text = CString::new(text.replace(['\0', '\n', '\r'], " ")).expect("no NUL is left");
        if let Some(call) = self.call {
            // SAFETY: the engine's callback with its own context; the text lives during the call.
            unsafe { call(self.context, level as u32, text.as_ptr()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    unsafe extern "C" fn collect(lines: *mut c_void, level: u32, text: *const c_char) {
        // SAFETY: the context is the test's vector, the text NUL-terminated.
        let (lines, text) = unsafe { (&mut *lines.cast::<Vec<(u32, String)>>(), CStr::from_ptr(text)) };
        lines.push((level, text.to_str().unwrap().to_owned()));
    }

    #[test]
    fn lines_up_to_the_level_reach_the_callback_and_others_are_not_made() {
        let mut lines: Vec<(u32, String)> = vec![];
        // SAFETY: the vector outlives the log, which one thread uses.
        let log = unsafe { Log::new(collect, (&raw mut lines).cast(), Level::Info) };
        log.write(Level::Warning, || "first".into());
        log.write(Level::Info, || "sec\0nd".into());
        log.write(Level::Info, || "a line\r\nand another\n".into());
        log.write(Level::Debug, || unreachable!("is not logged"));
        Log::NONE.write(Level::Warning, || unreachable!("nobody listens"));
        let expected = [(1, "first"), (2, "sec nd"), (2, "a line  and another ")];
        assert_eq!(lines, expected.map(|(level, text)| (level, text.to_owned())));
    }

    #[test]
    fn environment_states_the_level_where_the_options_do_not() {
        assert_eq!(Level::of(0, None), Ok(Level::Info));
        assert_eq!(Level::of(0, Some("")), Ok(Level::Info));
        assert_eq!(Level::of(0, Some("debug")), Ok(Level::Debug));
        assert_eq!(Level::of(VWD_LOG_WARNING, Some("debug")), Ok(Level::Warning));
        let wrong = |number, named| Level::of(number, named).unwrap_err().to_string();
        assert_eq!(wrong(4, None), "options.log_level: 4; expected a VWD_LOG_* value (0 to 3)");
        assert_eq!(wrong(0, Some("loud")), "VANWARD_LOG: \"loud\"; expected warning, info or debug");
    }
}
