//! What an op call asks of the driver: launches, and to know its context. CUPTI reports every driver call.

use crate::Case;
use crate::support::calls::sampled_calls;
use crate::support::*;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::Mutex;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = &[
    ("op_calls_ask_the_driver_for_launches_alone", op_calls_ask_the_driver_for_launches_alone),
    ("sampling_trees_and_compaction_ask_for_launches_alone", sampling_trees_and_compaction_ask_for_launches_alone),
    (
        "what_a_pack_cannot_take_is_refused_before_its_first_launch",
        what_a_pack_cannot_take_is_refused_before_its_first_launch,
    ),
    ("repair_refuses_lists_that_no_shared_memory_holds", repair_refuses_lists_that_no_shared_memory_holds),
];

pub const ALLOWED: &[&str] =
    &["cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuLaunchKernel", "cuLaunchKernelEx"];

/// Names of the driver calls since recording began.
static SEEN: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// The first fields of CUpti_CallbackData.
#[repr(C)]
struct CallbackData {
    /// 0 on entry, 1 on exit.
    site: c_int,
    function_name: *const c_char,
}

extern "C" fn record(_user: *mut c_void, _domain: c_int, _id: u32, data: *const CallbackData) {
    // SAFETY: CUPTI passes valid data; the name is static text.
    unsafe {
        if (*data).site == 0 {
            SEEN.lock().unwrap().push(CStr::from_ptr((*data).function_name).to_string_lossy().into_owned());
        }
    }
}

/// CUPTI, as far as this test needs it.
pub struct Cupti {
    subscriber: *mut c_void,
    enable_domain: extern "C" fn(u32, *mut c_void, c_int) -> c_int,
    unsubscribe: extern "C" fn(*mut c_void) -> c_int,
}

impl Cupti {
    /// `VANWARD_CUPTI` names the library where the loader does not find it.
    pub fn open() -> Cupti {
        type Subscribe = extern "C" fn(
            *mut *mut c_void,
            extern "C" fn(*mut c_void, c_int, u32, *const CallbackData),
            *mut c_void,
        ) -> c_int;
        let named = std::env::var("VANWARD_CUPTI").ok();
        let names = ["libcupti.so", "libcupti.so.13", "libcupti.so.12"].map(String::from);
        let library = named.into_iter().chain(names).find_map(|name| {
            let name = CString::new(name).unwrap();
            // SAFETY: loads a library by name.
            let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
            (!library.is_null()).then_some(library)
        });
        let library = library.expect("libcupti: set VANWARD_CUPTI to its path");
        let symbol = |name: &CStr| {
            // SAFETY: the library is open.
            let address = unsafe { libc::dlsym(library, name.as_ptr()) };
            assert!(!address.is_null(), "{name:?}");
            address
        };
        let mut subscriber = std::ptr::null_mut();
        // SAFETY: the symbols have these types in every version of CUPTI.
        unsafe {
            let subscribe: Subscribe = std::mem::transmute(symbol(c"cuptiSubscribe"));
            assert_eq!(subscribe(&mut subscriber, record, std::ptr::null_mut()), 0, "cuptiSubscribe");
            Cupti {
                subscriber,
                enable_domain: std::mem::transmute::<*mut c_void, extern "C" fn(u32, *mut c_void, c_int) -> c_int>(
                    symbol(c"cuptiEnableDomain"),
                ),
                unsubscribe: std::mem::transmute::<*mut c_void, extern "C" fn(*mut c_void) -> c_int>(symbol(
                    c"cuptiUnsubscribe",
                )),
            }
        }
    }

    /// The driver calls that `body` makes.
    pub fn calls_of(&self, body: impl FnOnce()) -> Vec<String> {
        const DRIVER_API: c_int = 1;
        SEEN.lock().unwrap().clear();
        assert_eq!((self.enable_domain)(1, self.subscriber, DRIVER_API), 0, "cuptiEnableDomain");
        body();
        assert_eq!((self.enable_domain)(0, self.subscriber, DRIVER_API), 0, "cuptiEnableDomain");
        std::mem::take(&mut SEEN.lock().unwrap())
    }
}

impl Drop for Cupti {
    fn drop(&mut self) {
        (self.unsubscribe)(self.subscriber);
    }
}

fn op_calls_ask_the_driver_for_launches_alone(backend: &Backend) {
    let cupti = Cupti::open();
    let (session, stream) = (backend.session(), backend.stream());
    for (batch, gamma, width) in [(1, 1, 8), (32, 8, 128), (1024, 128, 64), (5000, 2, 3)] {
        let plain = Layout::default();
        let tokens = |width| Array::from_fn(&[batch, width], |at| (at[0] + at[1]) as i64);
        let draft = Tensor::ints(backend, I32, &tokens(gamma), &plain);
        let target = Tensor::ints(backend, I32, &tokens(gamma + 1), &plain);
        let poisoned = |dtype, shape: &[usize]| Tensor::poisoned(backend, dtype, shape, &plain);
        let (accepted, next_token) = (poisoned(I32, &[batch]), poisoned(I32, &[batch]));
        let (rows, packed) = (poisoned(F16, &[batch, gamma, width]), poisoned(F16, &[batch * gamma, width]));
        let offsets = poisoned(I32, &[batch + 1]);
        let (from, to) = ([rows.c()], [packed.c()]);
        let verify = vwd_verify_args {
            draft: draft.c(),
            target: target.c(),
            accepted: accepted.c(),
            next_token: next_token.c(),
            ..args()
        };
        let pack = vwd_pack_args {
            tensor_count: 1,
            rows: from.as_ptr(),
            packed: to.as_ptr(),
            accepted: accepted.c(),
            offsets: offsets.c(),
            ..args()
        };
        let both = vwd_verify_pack_args {
            tensor_count: 1,
            rows: from.as_ptr(),
            packed: to.as_ptr(),
            draft: draft.c(),
            target: target.c(),
            accepted: accepted.c(),
            next_token: next_token.c(),
            offsets: offsets.c(),
            ..args()
        };
        // SAFETY: the tensors outlive the calls.
        let calls: [(&str, &dyn Fn() -> i32); 3] = unsafe {
            [
                ("vwd_verify", &|| vwd_verify(session, &verify, stream)),
                ("vwd_pack", &|| vwd_pack(session, &pack, stream)),
                ("vwd_verify_pack", &|| vwd_verify_pack(session, &both, stream)),
            ]
        };
        for (name, call) in calls {
            asks_for_launches_alone(&cupti, &format!("{name} of {batch} × {gamma}"), call);
        }
        backend.finish(0);
    }
}

fn asks_for_launches_alone(cupti: &Cupti, name: &str, call: &dyn Fn() -> i32) {
    let seen = cupti.calls_of(|| assert_ok(call()));
    let launches = seen.iter().filter(|call| call.starts_with("cuLaunchKernel")).count();
    println!("{name}: {}", seen.join(", "));
    assert!((1..=3).contains(&launches), "{name}: {seen:?}");
    for asked in &seen {
        assert!(ALLOWED.contains(&asked.as_str()), "{name} asks for {asked}");
    }
}

/// Few rows and many, of a segment or of several.
fn sampling_trees_and_compaction_ask_for_launches_alone(backend: &Backend) {
    let cupti = Cupti::open();
    let many = backend.times(300);
    for (batch, gamma, vocabulary) in [(1, 0, 40), (2, 3, 8200), (many, 4, 304)] {
        for (name, call) in sampled_calls(backend, batch, gamma, vocabulary) {
            // The first call that needs scratch makes the stream's.
            assert_ok(call());
            asks_for_launches_alone(&cupti, &format!("{name}, of {batch} × {gamma}"), &call);
            backend.finish(0);
        }
    }
}

/// The second tensor is for a launch of its own, and its rows have more pieces than a kernel counts.
fn what_a_pack_cannot_take_is_refused_before_its_first_launch(backend: &Backend) {
    const BYTES: i64 = (1 << 31) + 1;
    let plain = Layout::default();
    let rows = Tensor::floats(backend, F16, &Array::filled(&[2, 2, 8], 1.0), &plain);
    let packed = Tensor::poisoned(backend, F16, &[4, 8], &plain);
    let accepted = Tensor::ints(backend, I32, &Array::filled(&[2], 2), &plain);
    let offsets = Tensor::poisoned(backend, I32, &[3], &plain);
    // Nothing is there: what is refused is not read.
    let far = |address: usize, shape: &[i64], strides: &[i64]| {
        let mut tensor = vwd_tensor { data: address as *mut _, ndim: shape.len() as i32, ..rows.c() };
        (tensor.dtype_code, tensor.dtype_bits) = (U8.code, U8.bits);
        tensor.shape[..shape.len()].copy_from_slice(shape);
        tensor.strides[..strides.len()].copy_from_slice(strides);
        tensor
    };
    let from = [rows.c(), far(0x1_0000_0001, &[2, 2, BYTES], &[0, 0, 1])];
    let to = [packed.c(), far(0x10_0000_0001, &[3, BYTES], &[BYTES, 1])];
    for verifies in [false, true] {
        let tokens = |width| Tensor::ints(backend, I32, &Array::filled(&[2, width], 1), &plain);
        let (draft, target, next_token) = (tokens(2), tokens(3), Tensor::poisoned(backend, I32, &[2], &plain));
        let written = Tensor::poisoned(backend, I32, &[2], &plain);
        let pack = vwd_pack_args {
            tensor_count: 2,
            rows: from.as_ptr(),
            packed: to.as_ptr(),
            accepted: accepted.c(),
            offsets: offsets.c(),
            ..args()
        };
        let both = vwd_verify_pack_args {
            tensor_count: 2,
            rows: from.as_ptr(),
            packed: to.as_ptr(),
            draft: draft.c(),
            target: target.c(),
            accepted: written.c(),
            next_token: next_token.c(),
            offsets: offsets.c(),
            ..args()
        };
        // SAFETY: what is read outlives the calls.
        let status = unsafe {
            match verifies {
                false => vwd_pack(backend.session(), &pack, backend.stream()),
                true => vwd_verify_pack(backend.session(), &both, backend.stream()),
            }
        };
        assert_fails(status, VWD_ERROR_UNSUPPORTED, &["rows[1]", "2^31"]);
        backend.finish(0);
        packed.assert_untouched("packed[0]");
        offsets.assert_untouched("offsets");
        written.assert_untouched("accepted");
        next_token.assert_untouched("next_token");
    }
}

/// Lists and what was kept are expanded with stride 0, so that any length takes no memory.
fn repair_refuses_lists_that_no_shared_memory_holds(backend: &Backend) {
    let plain = Layout::default();
    let ones = |shape: &[usize]| Tensor::floats(backend, F16, &Array::filled(shape, 1.0), &plain);
    let ints = |shape: &[usize]| Tensor::ints(backend, I32, &Array::filled(shape, 0), &plain);
    let (q, k) = (ones(&[1, 1, 16]), ones(&[1, 16, 1, 16]));
    let (table, lens, counts, id) = (ints(&[1, 1]), ints(&[1]), ints(&[1, 1]), ints(&[1, 1, 1]));
    let floats = |shape: &[usize]| Tensor::floats(backend, F32, &Array::filled(shape, 0.0), &plain);
    let (acc, sum) = (floats(&[1, 1, 1, 16]), floats(&[1, 1, 1]));
    let out = Tensor::poisoned(backend, F16, &[1, 1, 16], &plain);
    let kv = vwd_paged_kv { k: k.c(), v: k.c(), page_table: table.c(), seq_lens: lens.c(), ..args() };
    let long = |tensor: &Tensor, length: i64| {
        let mut c = tensor.c();
        (c.shape[2], c.strides[2]) = (length, 0);
        c
    };
    for (predicted, selected, piece) in
        [(1, 1 << 24, "do not fit"), (1 << 56, 1, "do not fit"), (1, 1 << 56, "lists of")]
    {
        let list = |length| vwd_block_list { ids: long(&id, length), counts: counts.c(), slots: absent() };
        let call = vwd_repair_args {
            mode: VWD_REPAIR_EXACT,
            block_size: 16,
            q: q.c(),
            kv: kept(kv),
            predicted: list(predicted),
            selected: list(selected),
            predicted_partials: vwd_attention_partials {
                acc: long(&acc, predicted),
                m: long(&sum, predicted),
                l: long(&sum, predicted),
            },
            out: out.c(),
            ..args()
        };
        // SAFETY: the tensors outlive the call.
        let status = unsafe { vwd_repair(backend.session(), &call, backend.stream()) };
        assert_fails(status, VWD_ERROR_UNSUPPORTED, &[piece]);
    }
    backend.finish(0);
    out.assert_untouched("out");
}
