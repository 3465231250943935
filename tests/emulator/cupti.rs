//! A program that is told of each call, as profilers are by CUPTI.

use std::ffi::{CStr, c_char, c_int, c_void};

type Told = extern "C" fn(*mut c_void, c_int, u32, *const Call);

/// The beginning of the record that CUPTI passes for a call.
#[repr(C)]
struct Call {
    /// 0 on entry.
    site: c_int,
    name: *const c_char,
}

static TOLD: parking_lot::Mutex<(Option<Told>, usize, bool)> = parking_lot::Mutex::new((None, 0, false));

pub fn tell(name: &CStr) {
    let (told, user, enabled) = *TOLD.lock();
    if let Some(told) = told.filter(|_| enabled) {
        told(user as *mut c_void, 1, 0, &Call { site: 0, name: name.as_ptr() });
    }
}

/// As CUPTI's function of this name.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
extern "C" fn cuptiSubscribe(subscriber: *mut *mut c_void, told: Told, user: *mut c_void) -> c_int {
    *TOLD.lock() = (Some(told), user as usize, false);
    // SAFETY: the caller's place.
    unsafe { *subscriber = std::ptr::dangling_mut() };
    0
}

/// As CUPTI's function of this name; of every domain.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
extern "C" fn cuptiEnableDomain(enable: u32, _subscriber: *mut c_void, _domain: c_int) -> c_int {
    TOLD.lock().2 = enable != 0;
    0
}

/// As CUPTI's function of this name.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
extern "C" fn cuptiUnsubscribe(_subscriber: *mut c_void) -> c_int {
    *TOLD.lock() = (None, 0, false);
    0
}
