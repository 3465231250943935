//! A library prints nothing: panics inside it become messages, all others go to the hook that was there before.

use std::cell::{Cell, RefCell};
use std::sync::Once;

thread_local! {
    /// Set while this thread runs library code.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    static PANIC_PLACE: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Marks this thread as running library code; gives what it was before, for [`leave`].
#[inline]
pub fn enter() -> bool {
    install_hook();
    INSIDE.replace(true)
}

#[inline]
pub fn leave(before: bool) {
    INSIDE.set(before);
}

/// Where this thread last panicked, " at file:line" or nothing; forgotten once asked.
pub fn panic_place() -> String {
    PANIC_PLACE.with_borrow_mut(std::mem::take)
}

fn install_hook() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !INSIDE.get() {
                return previous(info);
            }
            let place = info.location().map(|l| format!(" at {}:{}", l.file(), l.line())).unwrap_or_default();
            PANIC_PLACE.with_borrow_mut(|text| *text = place);
        }));
    });
}
