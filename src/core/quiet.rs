//! The library prints nothing: a panic inside it becomes a message, any other goes to the panic hook that was installed
//! before.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::sync::Once;

thread_local! {
    /// Set while this thread runs library code.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    static PANIC_PLACE: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Marks this thread as running library code. Returns whether it ran library code before, for [`leave`].
#[inline]
pub fn enter() -> bool {
    install_hook();
    INSIDE.replace(true)
}

#[inline]
pub fn leave(before: bool) {
    INSIDE.set(before);
}

/// The message of a panic that this thread has caught, and its place if the panic began on this thread: "words at file:line".
pub fn describe(payload: &(dyn Any + Send)) -> String {
    let words = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("unknown");
    let place = PANIC_PLACE.try_with(RefCell::take).unwrap_or_default();
    format!("{words}{place}")
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
            // A thread that ends may have destroyed it.
            let _ = PANIC_PLACE.try_with(|text| text.replace(place));
        }));
    });
}
