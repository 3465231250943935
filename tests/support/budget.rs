//! Budgets whose times are what a test wants: a profile is measured, and its file rewritten.

use super::{Backend, assert_ok, last_error};
use std::ffi::CString;
use std::path::Path;
use vanward::abi::*;
use vanward::capi::*;

pub struct Budget(pub *mut vwd_budget);

impl Drop for Budget {
    fn drop(&mut self) {
        // SAFETY: made once.
        unsafe { vwd_budget_release(self.0) }
    }
}

/// A budget whose times are what `time` says of a tensor's name and of each of its elements.
pub fn forced(backend: &Backend, options: &vwd_budget_options, time: impl Fn(&str, usize) -> Option<f32>) -> Budget {
    let kind = if backend.is_cuda() { "cuda" } else { "cpu" };
    let name = format!("vanward-fallback-{kind}-{}-{:?}", std::process::id(), std::thread::current().id());
    let path = std::env::temp_dir().join(name.replace(['(', ')'], "-"));
    let text = CString::new(path.to_str().expect("UTF-8")).expect("no NUL");
    let (session, mut budget) = (backend.session(), std::ptr::null_mut());
    // SAFETY: the arguments are valid.
    unsafe {
        // No more memory than needed: nothing is read between calls.
        let least = vwd_budget_options { limit_bytes: 1, ..*options };
        assert_eq!(vwd_budget_profile(session, &least, backend.stream(), &mut budget), VWD_ERROR_INVALID_ARGUMENT);
        let message = last_error();
        let needed = message.split("at least ").nth(1).and_then(|rest| rest.split(',').next()).expect("what is needed");
        let options = &vwd_budget_options { limit_bytes: needed.parse().expect("a number"), ..*options };
        assert_ok(vwd_budget_profile(session, options, backend.stream(), &mut budget));
        let measured = Budget(budget);
        assert_ok(vwd_budget_save(measured.0, text.as_ptr()));
        rewrite(&path, time);
        assert_ok(vwd_budget_load(session, options, text.as_ptr(), &mut budget));
    }
    std::fs::remove_file(&path).expect("the file");
    Budget(budget)
}

/// docs/budget.md gives the format.
fn rewrite(path: &Path, time: impl Fn(&str, usize) -> Option<f32>) {
    const FIELDS: &str = "format version library device max_draft query_heads kv_heads key_dim value_dim dtype page_size \
                          block_size method k init_blocks local_blocks repair_mode partial_blocks";
    const TENSORS: &str =
        "contexts batches ratios missed select attend guess repair dense serial prr prr_foreseen foreseen";
    let bytes = std::fs::read(path).expect("the file");
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).expect("JSON");
    let mut data = bytes[8 + length..].to_vec();
    let mut sum = 0xcbf29ce484222325u64;
    let mut add = |bytes: &[u8]| {
        for &byte in bytes.iter().chain(&[0]) {
            sum = (sum ^ byte as u64).wrapping_mul(0x100000001b3);
        }
    };
    for field in FIELDS.split_whitespace() {
        add(header["__metadata__"][field].as_str().expect("a string").as_bytes());
    }
    for name in TENSORS.split_whitespace() {
        let offsets = &header[name]["data_offsets"];
        let [begin, end] = [0, 1].map(|n| offsets[n].as_u64().expect("an offset") as usize);
        for (n, value) in data[begin..end].chunks_mut(4).enumerate() {
            if let Some(time) = time(name, n) {
                value.copy_from_slice(&time.to_le_bytes());
            }
            add(value);
        }
    }
    header["__metadata__"]["checksum"] = format!("{sum:016x}").into();
    let mut text = serde_json::to_vec(&header).expect("JSON");
    text.resize(text.len().next_multiple_of(8), b' ');
    std::fs::write(path, [&(text.len() as u64).to_le_bytes()[..], &text, &data].concat()).expect("the file");
}

fn is_strategy(name: &str) -> bool {
    ["prr", "prr_foreseen", "foreseen"].contains(&name)
}

/// Every strategy is slower than SERIAL.
pub fn never(name: &str, _: usize) -> Option<f32> {
    if is_strategy(name) { Some(1000.0) } else { (name == "serial").then_some(1.0) }
}

/// Every strategy is faster than SERIAL.
pub fn always(name: &str, _: usize) -> Option<f32> {
    if is_strategy(name) { Some(1.0) } else { (name == "serial").then_some(1000.0) }
}
