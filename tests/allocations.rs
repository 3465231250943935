//! A call allocates nothing, however many tensors it takes and wherever they lie.

use std::alloc::{GlobalAlloc, Layout as Size, System};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use vanward::abi::*;
use vanward::capi::*;

mod support;
use support::*;

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: forwards to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, size: Size) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: forwarded to the caller.
        unsafe { System.alloc(size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, size: Size) {
        // SAFETY: forwarded to the caller.
        unsafe { System.dealloc(pointer, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn calls_allocate_nothing() {
    let backend = Backend::cpu(1);
    let tokens = |width| Tensor::ints(&backend, I32, &Array::filled(&[3, width], 7), &Layout::default());
    let place = |dtype, shape: &[usize]| Tensor::poisoned(&backend, dtype, shape, &Layout::default());
    let (draft, target) = (tokens(4), tokens(5));
    let (accepted, next_token, offsets) = (place(I32, &[3]), place(I32, &[3]), place(I64, &[4]));
    rounds(3, |rng| {
        for count in [1, 2, 64, 256] {
            // Of one form or of several, in any order of addresses.
            let forms = rng.size(1..=3);
            let mut pairs: Vec<_> = (0..count)
                .map(|n| 8 + n % forms)
                .map(|width| (place(F16, &[3, 4, width]), place(F16, &[12, width])))
                .collect();
            rng.shuffle(&mut pairs);
            let (rows, packed): (Vec<_>, Vec<_>) = pairs.iter().map(|(rows, packed)| (rows.c(), packed.c())).unzip();
            let args = vwd_verify_pack_args {
                tensor_count: count as u32,
                rows: rows.as_ptr(),
                packed: packed.as_ptr(),
                draft: draft.c(),
                target: target.c(),
                accepted: accepted.c(),
                next_token: next_token.c(),
                offsets: offsets.c(),
                ..args()
            };
            let before = ALLOCATIONS.load(Relaxed);
            // SAFETY: the tensors outlive the call.
            let status = unsafe { vwd_verify_pack(backend.session(), &args, null_mut()) };
            let made = ALLOCATIONS.load(Relaxed) - before;
            assert_ok(status);
            assert_eq!(made, 0, "{count} tensors of {forms} forms");
        }
    });
}
