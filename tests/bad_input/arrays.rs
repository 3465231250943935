//! Arrays of tensors of one form: each is checked as if it stood alone, wherever it stands and in whatever order the
//! tensors lie in memory.

use crate::support::*;
use std::ptr::null_mut;
use vanward::abi::*;
use vanward::capi::*;

const TENSORS: usize = 5;
const BATCH: usize = 2;
const GAMMA: usize = 3;
const DIM: usize = 4;
/// Room of one tensor; rows and packed have as many bytes: [B, γ, D] and [B·γ, D] of float32.
const ROOM: usize = 128;
const BYTES: usize = BATCH * GAMMA * DIM * 4;

/// Tensors of one form, a call that takes them, and one allocation for all.
struct Pack {
    memory: Vec<u64>,
    rows: [vwd_tensor; TENSORS],
    packed: [vwd_tensor; TENSORS],
    offsets: vwd_tensor,
}

impl Pack {
    /// `places` are those of rows, of packed and of offsets in the allocation, in rooms.
    fn new(places: [usize; 2 * TENSORS + 1]) -> Pack {
        let mut memory = vec![0u64; 64 * ROOM / 8];
        let start = memory.as_mut_ptr();
        let at = |room: usize| start.wrapping_byte_add(room * ROOM).cast();
        let tensor = |room, code, bits, shape: &[i64]| {
            let mut t = vwd_tensor { data: at(room), device_type: 1, lanes: 1, ..absent() };
            (t.dtype_code, t.dtype_bits, t.ndim) = (code, bits, shape.len() as i32);
            t.shape[..shape.len()].copy_from_slice(shape);
            (0..shape.len()).for_each(|d| t.strides[d] = shape[d + 1..].iter().product());
            t
        };
        let (batch, gamma, dim) = (BATCH as i64, GAMMA as i64, DIM as i64);
        Pack {
            rows: std::array::from_fn(|n| tensor(places[n], 2, 32, &[batch, gamma, dim])),
            packed: std::array::from_fn(|n| tensor(places[TENSORS + n], 2, 32, &[batch * gamma, dim])),
            offsets: tensor(places[2 * TENSORS], 0, 32, &[batch + 1]),
            memory,
        }
    }

    /// Calls; what the message names and finds, or "" where there is nothing wrong.
    fn call(&self, session: &Session) -> String {
        let accepted = [GAMMA as i32; BATCH];
        let mut counts = vwd_tensor { shape: [BATCH as i64; 5], strides: [1; 5], ..self.offsets };
        counts.data = accepted.as_ptr().cast_mut().cast();
        let args = vwd_pack_args {
            tensor_count: TENSORS as u32,
            rows: self.rows.as_ptr(),
            packed: self.packed.as_ptr(),
            accepted: counts,
            offsets: self.offsets,
            ..args()
        };
        let before = self.memory.clone();
        // SAFETY: what is not refused lies in the allocation.
        let status = unsafe { vwd_pack(session.raw(), &args, null_mut()) };
        if status == VWD_OK {
            return String::new();
        }
        assert_eq!(status, VWD_ERROR_INVALID_ARGUMENT);
        assert!(self.memory == before, "written in spite of an error");
        last_error()
    }
}

fn in_order() -> [usize; 2 * TENSORS + 1] {
    std::array::from_fn(|n| 2 * n)
}

/// The third tensor differs from the second in one thing.
pub fn tensors_of_one_form_are_checked_one_by_one() {
    let session = Session::cpu(1);
    type Change = (&'static str, fn(&mut vwd_tensor));
    let refused: [Change; 12] = [
        ("data is NULL", |t| t.data = null_mut()),
        ("is misaligned", |t| t.data = t.data.wrapping_byte_add(1)),
        ("63 bits", |t| t.data = (i64::MAX - 7) as *mut _),
        ("device_type 2", |t| t.device_type = 2),
        ("lanes", |t| t.lanes = 2),
        ("bits", |t| t.dtype_bits = 31),
        ("dtype", |t| t.dtype_code = 0),
        ("dtype", |t| t.dtype_bits = 16),
        ("ndim", |t| t.ndim = 6),
        ("shape", |t| t.ndim = 1),
        ("shape", |t| t.shape[1] += 1),
        ("63 bits", |t| t.strides[0] = i64::MAX),
    ];
    for n in 1..TENSORS {
        for (found, change) in refused {
            for name in ["rows", "packed"] {
                let mut pack = Pack::new(in_order());
                change(if name == "rows" { &mut pack.rows[n] } else { &mut pack.packed[n] });
                let text = pack.call(&session);
                let named = text.starts_with(&format!("{name}[{n}]: ")) || text.starts_with(&format!("packed[{n}]: "));
                assert!(named && text.contains(found), "{name}[{n}], {found}: {text:?}");
            }
        }
        let mut pack = Pack::new(in_order());
        pack.packed[n].strides[0] = 1;
        assert!(pack.call(&session).starts_with(&format!("packed[{n}]: shape [6, 4] with strides [1, 1] overlaps")));
    }
}

pub fn tensors_of_one_form_may_differ_in_what_is_ignored() {
    let session = Session::cpu(1);
    let mut pack = Pack::new(in_order());
    (pack.rows[2].device_id, pack.rows[3].lanes, pack.packed[2].device_type) = (7, 0, 3);
    (pack.rows[2].shape[3], pack.rows[4].strides[4], pack.packed[1].shape[2], pack.packed[3].strides[2]) =
        (-1, 9, -1, 9);
    assert_eq!(pack.call(&session), "");
}

/// Every pair of tensors of which one is written, in ascending, descending and random order of addresses.
pub fn overlap_is_found_in_any_order_of_addresses() {
    let session = Session::cpu(1);
    rounds(20, |rng| {
        let mut places = in_order();
        match rng.size(0..=3) {
            0 => {}
            1 => places.reverse(),
            _ => rng.shuffle(&mut places),
        }
        let right = Pack::new(places);
        assert_eq!(right.call(&session), "", "places {places:?}");
        let name = |n: usize| match n {
            0..TENSORS => format!("rows[{n}]"),
            n if n < 2 * TENSORS => format!("packed[{}]", n - TENSORS),
            _ => "offsets".into(),
        };
        for written in TENSORS..=2 * TENSORS {
            for other in (0..=2 * TENSORS).filter(|&other| other != written) {
                let mut wrong = Pack::new(places);
                // The first or the last element of the other is in reach of the written one.
                let bytes = |n| if n == 2 * TENSORS { (BATCH + 1) * 4 } else { BYTES };
                let shift = if rng.one_in(2) { bytes(other) as isize - 4 } else { 4 - bytes(written) as isize };
                let at = wrong.memory.as_ptr().wrapping_byte_add(places[other] * ROOM);
                let data = at.wrapping_byte_offset(shift).cast_mut().cast();
                match written {
                    n if n < 2 * TENSORS => wrong.packed[n - TENSORS].data = data,
                    _ => wrong.offsets.data = data,
                }
                let text = wrong.call(&session);
                let both = text.contains(&name(written)) && text.contains(&name(other));
                assert!(both && text.contains(" overlaps "), "{} in {}: {text:?}", name(written), name(other));
            }
        }
    });
}

/// Tensors are columns of two buffers: apart, unless one moves by half its width.
pub fn interleaved_tensors_are_told_from_overlapping_ones() {
    let session = Session::cpu(1);
    rounds(20, |rng| {
        let mut columns: Vec<usize> = (0..TENSORS).collect();
        rng.shuffle(&mut columns);
        let interleaved = || {
            let mut pack = Pack::new(in_order());
            let (rows, packed) = (pack.memory.as_mut_ptr(), pack.memory[30 * ROOM / 8..].as_mut_ptr());
            let width = (TENSORS * DIM) as i64;
            for (n, column) in columns.iter().enumerate() {
                pack.rows[n].data = rows.wrapping_byte_add(column * DIM * 4).cast();
                pack.rows[n].strides = [GAMMA as i64 * width, width, 1, 0, 0];
                pack.packed[n].data = packed.wrapping_byte_add(column * DIM * 4).cast();
                pack.packed[n].strides = [width, 1, 0, 0, 0];
            }
            pack.offsets.data = pack.memory[60 * ROOM / 8..].as_mut_ptr().cast();
            pack
        };
        assert_eq!(interleaved().call(&session), "");
        for n in 0..TENSORS {
            let mut pack = interleaved();
            let right = rng.one_in(2);
            pack.packed[n].data = pack.packed[n].data.wrapping_byte_offset(if right { 8 } else { -8 });
            let text = pack.call(&session);
            let is_outermost = columns[n] == if right { TENSORS - 1 } else { 0 };
            let found = text.contains(&format!("packed[{n}]")) && text.contains(" overlaps packed[");
            assert!(found || is_outermost, "packed[{n}], columns {columns:?}: {text:?}");
        }
    });
}
