//! Calls of the driver that fail when they are told to, so that tests see what their callers do then.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// `NAME:N` or `NAME:N+`, as in `VANWARD_EMULATOR_FAIL`.
struct Failure {
    name: String,
    /// The first call of that name that fails, counted from 1.
    first: u64,
    /// Those after it fail, too.
    goes_on: bool,
    calls: AtomicU64,
}

impl Failure {
    fn parse(text: &str) -> Option<Failure> {
        let (name, number) = text.split_once(':')?;
        let goes_on = number.ends_with('+');
        let first = number.trim_end_matches('+').parse().ok().filter(|&first| first > 0)?;
        Some(Failure { name: name.to_owned(), first, goes_on, calls: AtomicU64::new(0) })
    }

    /// Whether this call fails.
    fn takes(&self, name: &str) -> bool {
        if name != self.name {
            return false;
        }
        let call = self.calls.fetch_add(1, Relaxed) + 1;
        call == self.first || self.goes_on && call > self.first
    }
}

/// Whether the call that is being made of the function of this name is to fail.
pub fn fails(name: &str) -> bool {
    static FAILURE: OnceLock<Option<Failure>> = OnceLock::new();
    let failure = FAILURE.get_or_init(|| {
        let text = std::env::var("VANWARD_EMULATOR_FAIL").ok()?;
        Some(
            Failure::parse(&text).unwrap_or_else(|| panic!("VANWARD_EMULATOR_FAIL={text}: expected NAME:N or NAME:N+")),
        )
    });
    failure.as_ref().is_some_and(|failure| failure.takes(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_call_of_a_function_fails_and_those_after_it_where_asked() {
        for (text, expected) in [("cuMemAlloc_v2:2", [false, true, false]), ("cuMemAlloc_v2:2+", [false, true, true])] {
            let failure = Failure::parse(text).expect("a failure");
            assert!(!failure.takes("cuMemFree_v2"), "{text}");
            assert_eq!([(); 3].map(|()| failure.takes("cuMemAlloc_v2")), expected, "{text}");
        }
        for text in ["", "cuMemAlloc_v2", "cuMemAlloc_v2:0", "cuMemAlloc_v2:x"] {
            assert!(Failure::parse(text).is_none(), "{text}");
        }
    }
}
