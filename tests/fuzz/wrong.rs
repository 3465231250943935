//! Ways to break a call that would be accepted. Some leave it acceptable, which is as good.

use crate::case::{Case, Field, Kind, Pointer, Role};
use crate::support::*;

/// Breaks nothing, one thing or two.
pub fn break_some(case: &mut Case) {
    let times = case.rng.pick(&[0, 0, 0, 0, 1, 1, 2]);
    for _ in 0..times {
        let what = match case.rng.size(0..=9) {
            0 => a_number(case),
            1 => a_struct(case),
            2 => a_pointer(case),
            3 => an_overlap(case),
            _ => a_tensor(case),
        };
        case.broken.extend(what);
    }
}

fn a_number(case: &mut Case) -> Option<String> {
    let n = pick_index(&mut case.rng, case.numbers.len())?;
    let rng = &mut case.rng;
    let number = &mut case.numbers[n];
    number.value = match number.kind {
        Kind::Real => {
            rng.pick(&[-0.0, -1.0, 1e-40, 1e30, f32::MAX, f32::NAN, f32::INFINITY, f32::NEG_INFINITY]).to_bits()
        }
        Kind::Length(most) => {
            let larger = most.checked_add(1).unwrap_or(0);
            rng.pick(&[0, larger, larger * 2])
        }
        Kind::Whole => {
            let near = [
                number.value.wrapping_sub(1),
                number.value.wrapping_add(1),
                number.value.wrapping_mul(2),
                number.value / 2,
            ];
            rng.pick(&[0, 1, 2, 3, 7, 8, 1 << 16, 1 << 31, u32::MAX, near[0], near[1], near[2], near[3]])
        }
    };
    Some(format!("{} = {:#x}", number.place.name, number.value))
}

/// Another size: an earlier version's, a later one's, or none.
fn a_struct(case: &mut Case) -> Option<String> {
    let n = pick_index(&mut case.rng, case.blocks.len())?;
    let (rng, block) = (&mut case.rng, &mut case.blocks[n]);
    if !block.is_versioned {
        return None;
    }
    let full = block.bytes.len().max(16);
    let size = rng.pick(&[
        0,
        4,
        full / 16 * 8,
        full - 8,
        full - 4,
        full + 4,
        full + 8,
        full + 800,
        1 << 17,
        u32::MAX as usize,
    ]);
    let rest = rng.pick(&[0, 0, 1]);
    block.bytes.resize(size.clamp(4, 1 << 16), rest);
    block.bytes[..4].copy_from_slice(&(size as u32).to_le_bytes());
    Some(format!("{}.struct_size = {size} of {full}, then {rest}", block.name))
}

fn a_pointer(case: &mut Case) -> Option<String> {
    let n = pick_index(&mut case.rng, case.blocks.len())?;
    let pointer = case.rng.pick(&[Pointer::Null, Pointer::Misaligned]);
    case.blocks[n].pointer = pointer;
    Some(format!("{} is {}", case.blocks[n].name, if pointer == Pointer::Null { "NULL" } else { "misaligned" }))
}

/// An output at the address of something else.
fn an_overlap(case: &mut Case) -> Option<String> {
    let is_shared = |n: usize| case.fields.iter().any(|field| field.shares.is_some_and(|(other, _)| other == n));
    let is_output = |&n: &usize| case.fields[n].role != Role::In && !is_shared(n);
    let outputs: Vec<usize> = (0..case.fields.len()).filter(is_output).collect();
    let out = outputs.get(pick_index(&mut case.rng, outputs.len())?).copied()?;
    let other = pick_index(&mut case.rng, case.fields.len())?;
    let is_allowed = case.may_overlap.contains(&[out, other]);
    if other == out || is_allowed || case.fields[out].shares.is_some() || case.fields[other].shares.is_some() {
        return None;
    }
    case.fields[out].shares = Some((other, false));
    Some(format!("{} is at {}", case.fields[out].place.name, case.fields[other].place.name))
}

fn a_tensor(case: &mut Case) -> Option<String> {
    let n = pick_index(&mut case.rng, case.fields.len())?;
    let (rng, field) = (&mut case.rng, &mut case.fields[n]);
    let what = if !field.is_given && rng.one_in(2) {
        field.is_given = true;
        "is given".into()
    } else {
        match rng.size(0..=9) {
            0 => {
                field.pointer = rng.pick(&[Pointer::Null, Pointer::Misaligned, Pointer::Top]);
                "has another address".into()
            }
            1 => dtype(rng, field),
            2 => {
                (field.tensor.device_type, field.tensor.device_id) =
                    (rng.pick(&[-1, 0, 1, 2, 3, 7, 13]), rng.pick(&[-1, 0, 1, i32::MAX]));
                format!("device {}, {}", field.tensor.device_type, field.tensor.device_id)
            }
            3 => {
                field.tensor.lanes = rng.pick(&[0, 2, u16::MAX]);
                format!("{} lanes", field.tensor.lanes)
            }
            4 => rank(rng, field),
            5..=7 => extent(rng, field),
            _ => stride(rng, field),
        }
    };
    Some(format!("{} {what}", field.place.name))
}

fn dtype(rng: &mut Rng, field: &mut Field) -> String {
    let usual = [F32, F16, BF16, F8E4M3, F8E5M2, I32, I64, U8, BOOL, U32];
    let (code, bits) = match rng.one_in(3) {
        true => (rng.pick(&[0, 1, 2, 3, 4, 5, 6, 10, 12, 17, 255]), rng.pick(&[0, 1, 8, 12, 16, 24, 32, 64, 128, 248])),
        false => rng.pick(&usual.map(|dtype| (dtype.code, dtype.bits))),
    };
    (field.tensor.dtype_code, field.tensor.dtype_bits) = (code, bits);
    format!("is of dtype {code}, {bits}")
}

fn rank(rng: &mut Rng, field: &mut Field) -> String {
    let before = field.rank();
    field.tensor.ndim = rng.pick(&[i32::MIN, -1, 0, before as i32 - 1, before as i32 + 1, 5, 6, i32::MAX]);
    for d in before..5 {
        (field.tensor.shape[d], field.tensor.strides[d]) = (rng.pick(&[1, 1, 2]), rng.pick(&[0, 1]));
    }
    format!("is of rank {}", field.tensor.ndim)
}

fn extent(rng: &mut Rng, field: &mut Field) -> String {
    let Some(d) = pick_index(rng, field.rank()) else { return "has no extent to break".into() };
    let n = field.tensor.shape[d];
    let beyond = rng.pick(&[-1, i64::MIN, i64::MAX, 1 << 31, 1 << 32, 1 << 62]);
    let near = rng.pick(&[0, 1, n.saturating_sub(1), n.saturating_add(1), n.saturating_mul(2)]);
    field.tensor.shape[d] = if rng.one_in(3) { beyond } else { near };
    format!("has shape {:?}", field.shape())
}

fn stride(rng: &mut Rng, field: &mut Field) -> String {
    let Some(d) = pick_index(rng, field.rank()) else { return "has no stride to break".into() };
    let s = field.tensor.strides[d];
    let huge = rng.pick(&[1 << 31, -(1 << 31), 1 << 61, i64::MAX, i64::MIN]);
    let near = rng.pick(&[0, 1, -1, s.saturating_neg(), s.saturating_add(1), s / 2, s.saturating_mul(2)]);
    field.tensor.strides[d] = if rng.one_in(3) { huge } else { near };
    format!("has strides {:?}", field.strides())
}

fn pick_index(rng: &mut Rng, length: usize) -> Option<usize> {
    (length > 0).then(|| rng.size(0..=length - 1))
}
