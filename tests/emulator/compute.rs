//! The functions of instructions that compute, by their names. As PTX has it: rounding to the nearest even where no other is named, shifts by 32 or
//! more give nothing, conversions to integers saturate.

use crate::values::{Computed, binary, insert, split, ternary, unary};
use half::{bf16, f16};
use std::cmp::Ordering;

macro_rules! compare {
    ($type:ty, $comparison:expr) => {
        Some(match $comparison {
            "eq" => binary(|a: $type, b: $type| a == b),
            "ne" => binary(|a: $type, b: $type| a != b),
            "lt" => binary(|a: $type, b: $type| a < b),
            "le" => binary(|a: $type, b: $type| a <= b),
            "gt" => binary(|a: $type, b: $type| a > b),
            "ge" => binary(|a: $type, b: $type| a >= b),
            _ => return None,
        })
    };
}

macro_rules! compare_floats {
    ($type:ty, $comparison:expr) => {
        Some(match $comparison {
            "eq" => binary(|a: $type, b: $type| a == b),
            "ne" => binary(|a: $type, b: $type| a.partial_cmp(&b).is_some_and(Ordering::is_ne)),
            "lt" => binary(|a: $type, b: $type| a < b),
            "le" => binary(|a: $type, b: $type| a <= b),
            "gt" => binary(|a: $type, b: $type| a > b),
            "ge" => binary(|a: $type, b: $type| a >= b),
            "equ" => binary(|a: $type, b: $type| a.partial_cmp(&b).is_none_or(Ordering::is_eq)),
            "neu" => binary(|a: $type, b: $type| a != b),
            "ltu" => binary(|a: $type, b: $type| a.partial_cmp(&b).is_none_or(Ordering::is_lt)),
            "leu" => binary(|a: $type, b: $type| a.partial_cmp(&b).is_none_or(Ordering::is_le)),
            "gtu" => binary(|a: $type, b: $type| a.partial_cmp(&b).is_none_or(Ordering::is_gt)),
            "geu" => binary(|a: $type, b: $type| a.partial_cmp(&b).is_none_or(Ordering::is_ge)),
            "num" => binary(|a: $type, b: $type| a.partial_cmp(&b).is_some()),
            "nan" => binary(|a: $type, b: $type| a.partial_cmp(&b).is_none()),
            _ => return None,
        })
    };
}

/// `name` without what changes nothing here: in this emulator approximations are exact.
pub fn computed(name: &str, results: usize, operands: usize) -> Option<Computed> {
    let parts: Vec<&str> = name.split('.').collect();
    if parts[0] == "setp" {
        return match parts[1..] {
            [comparison, "u32" | "b32"] => compare!(u32, comparison),
            [comparison, "s32"] => compare!(i32, comparison),
            [comparison, "u64" | "b64"] => compare!(u64, comparison),
            [comparison, "s64"] => compare!(i64, comparison),
            [comparison, "u16" | "b16"] => compare!(u16, comparison),
            [comparison, "s16"] => compare!(i16, comparison),
            [comparison, "f32"] => compare_floats!(f32, comparison),
            [comparison, "f64"] => compare_floats!(f64, comparison),
            _ => None,
        };
    }
    if parts[0] == "mov" {
        return Some(match (parts[1], results, operands) {
            ("pred", 1, 1) => unary(|a: bool| a),
            ("u16" | "b16" | "s16" | "u32" | "s32" | "b32" | "f32", 1, 1) => unary(|a: u32| a),
            ("u64" | "s64" | "b64" | "f64", 1, 1) => unary(|a: u64| a),
            ("b32", 1, 2) => binary(|a: u16, b: u16| a as u32 | (b as u32) << 16),
            ("b64", 1, 2) => binary(|a: u32, b: u32| a as u64 | (b as u64) << 32),
            ("b32", 2, 1) => split(|a: u32| (a as u16, (a >> 16) as u16)),
            ("b64", 2, 1) => split(|a: u64| (a as u32, (a >> 32) as u32)),
            _ => return None,
        });
    }
    Some(match name {
        "add.s32" | "add.u32" => binary(|a: u32, b: u32| a.wrapping_add(b)),
        "add.s64" | "add.u64" => binary(|a: u64, b: u64| a.wrapping_add(b)),
        "add.s16" | "add.u16" => binary(|a: u16, b: u16| a.wrapping_add(b)),
        "add.f32" | "add.rn.f32" => binary(|a: f32, b: f32| a + b),
        "add.f64" | "add.rn.f64" => binary(|a: f64, b: f64| a + b),
        "sub.s32" | "sub.u32" => binary(|a: u32, b: u32| a.wrapping_sub(b)),
        "sub.s64" | "sub.u64" => binary(|a: u64, b: u64| a.wrapping_sub(b)),
        "sub.s16" | "sub.u16" => binary(|a: u16, b: u16| a.wrapping_sub(b)),
        "add.rm.f32" => binary(add_down),
        "sub.f32" | "sub.rn.f32" => binary(|a: f32, b: f32| a - b),
        "sub.f64" | "sub.rn.f64" => binary(|a: f64, b: f64| a - b),
        "mul.lo.s32" | "mul.lo.u32" => binary(|a: u32, b: u32| a.wrapping_mul(b)),
        "mul.lo.s64" | "mul.lo.u64" => binary(|a: u64, b: u64| a.wrapping_mul(b)),
        "mul.lo.s16" | "mul.lo.u16" => binary(|a: u16, b: u16| a.wrapping_mul(b)),
        "mul.hi.u32" => binary(|a: u32, b: u32| ((a as u64 * b as u64) >> 32) as u32),
        "mul.hi.s32" => binary(|a: i32, b: i32| ((a as i64 * b as i64) >> 32) as i32),
        "mul.hi.u64" => binary(|a: u64, b: u64| ((a as u128 * b as u128) >> 64) as u64),
        "mul.wide.u32" => binary(|a: u32, b: u32| a as u64 * b as u64),
        "mul.wide.s32" => binary(|a: i32, b: i32| a as i64 * b as i64),
        "mul.wide.u16" => binary(|a: u16, b: u16| a as u32 * b as u32),
        "mul.wide.s16" => binary(|a: i16, b: i16| a as i32 * b as i32),
        "mul.f32" | "mul.rn.f32" => binary(|a: f32, b: f32| a * b),
        "mul.f64" | "mul.rn.f64" => binary(|a: f64, b: f64| a * b),
        "mad.lo.s32" | "mad.lo.u32" => ternary(|a: u32, b: u32, c: u32| a.wrapping_mul(b).wrapping_add(c)),
        "mad.lo.s64" | "mad.lo.u64" => ternary(|a: u64, b: u64, c: u64| a.wrapping_mul(b).wrapping_add(c)),
        "mad.wide.u32" => ternary(|a: u32, b: u32, c: u64| (a as u64 * b as u64).wrapping_add(c)),
        "fma.rn.f32" => ternary(f32::mul_add),
        "fma.rn.f64" => ternary(f64::mul_add),
        "fma.rn.f16x2" => ternary(|a: u32, b: u32, c: u32| {
            let low = fma_f16(a as u16, b as u16, c as u16);
            low as u32 | (fma_f16((a >> 16) as u16, (b >> 16) as u16, (c >> 16) as u16) as u32) << 16
        }),
        "div.u32" => binary(|a: u32, b: u32| a.checked_div(b).unwrap_or(!0)),
        "div.u64" => binary(|a: u64, b: u64| a.checked_div(b).unwrap_or(!0)),
        "div.s32" => binary(|a: i32, b: i32| a.checked_div(b).unwrap_or(-1)),
        "rem.u32" => binary(|a: u32, b: u32| a.checked_rem(b).unwrap_or(a)),
        "rem.u64" => binary(|a: u64, b: u64| a.checked_rem(b).unwrap_or(a)),
        "div.rn.f32" | "div.approx.f32" => binary(|a: f32, b: f32| a / b),
        "div.rn.f64" => binary(|a: f64, b: f64| a / b),
        "rcp.rn.f32" | "rcp.approx.f32" | "rcp.approx.ftz.f32" => unary(|a: f32| 1.0 / a),
        "rcp.rz.f32" => unary(reciprocal_towards_zero),
        "sqrt.rn.f32" | "sqrt.approx.f32" => unary(f32::sqrt),
        "sqrt.rn.f64" => unary(f64::sqrt),
        "rsqrt.approx.f32" => unary(|a: f32| (1.0 / (a as f64).sqrt()) as f32),
        "rsqrt.approx.f64" => unary(|a: f64| 1.0 / a.sqrt()),
        "ex2.approx.f32" => unary(|a: f32| (a as f64).exp2() as f32),
        "ex2.approx.ftz.f32" => unary(|a: f32| flushed(flushed(a).exp2())),
        "lg2.approx.f32" => unary(|a: f32| (a as f64).log2() as f32),
        "lg2.approx.ftz.f32" => unary(|a: f32| flushed(a).log2()),
        "neg.s32" => unary(|a: i32| a.wrapping_neg()),
        "neg.s64" => unary(|a: i64| a.wrapping_neg()),
        "neg.f32" => unary(|a: f32| -a),
        "neg.f64" => unary(|a: f64| -a),
        "abs.s32" => unary(|a: i32| a.wrapping_abs()),
        "abs.f32" => unary(f32::abs),
        "abs.f64" => unary(f64::abs),
        "min.u32" => binary(|a: u32, b: u32| a.min(b)),
        "min.s32" => binary(|a: i32, b: i32| a.min(b)),
        "min.u64" => binary(|a: u64, b: u64| a.min(b)),
        "min.s64" => binary(|a: i64, b: i64| a.min(b)),
        "min.u16" => binary(|a: u16, b: u16| a.min(b)),
        "max.u32" => binary(|a: u32, b: u32| a.max(b)),
        "max.s32" => binary(|a: i32, b: i32| a.max(b)),
        "max.u64" => binary(|a: u64, b: u64| a.max(b)),
        "max.s64" => binary(|a: i64, b: i64| a.max(b)),
        "max.u16" => binary(|a: u16, b: u16| a.max(b)),
        "max.u16x2" => binary(|a: u32, b: u32| (a & 0xffff).max(b & 0xffff) | (a >> 16).max(b >> 16) << 16),
        "min.f32" => binary(|a: f32, b: f32| -larger(-a, -b)),
        "max.f32" => binary(larger),
        "max.NaN.f32" => binary(larger_or_nan),
        "add.rn.f16x2" => binary(|a: u32, b: u32| pairs(a, b, |x, y| narrow_f16(widen_f16(x) + widen_f16(y)))),
        "sub.rn.f16x2" => binary(|a: u32, b: u32| pairs(a, b, |x, y| narrow_f16(widen_f16(x) - widen_f16(y)))),
        "mul.rn.f16x2" => binary(|a: u32, b: u32| pairs(a, b, |x, y| narrow_f16(widen_f16(x) * widen_f16(y)))),
        "max.NaN.f16x2" => {
            binary(|a: u32, b: u32| pairs(a, b, |x, y| narrow_f16(larger_or_nan(widen_f16(x), widen_f16(y)))))
        }
        "max.NaN.bf16x2" => {
            binary(|a: u32, b: u32| pairs(a, b, |x, y| to_bf16(larger_or_nan(widen_bf16(x), widen_bf16(y))).to_bits()))
        }
        "min.f64" => binary(f64::min),
        "max.f64" => binary(f64::max),
        "and.b32" => binary(|a: u32, b: u32| a & b),
        "and.b64" => binary(|a: u64, b: u64| a & b),
        "and.b16" => binary(|a: u16, b: u16| a & b),
        "and.pred" => binary(|a: bool, b: bool| a & b),
        "or.b32" => binary(|a: u32, b: u32| a | b),
        "or.b64" => binary(|a: u64, b: u64| a | b),
        "or.b16" => binary(|a: u16, b: u16| a | b),
        "or.pred" => binary(|a: bool, b: bool| a | b),
        "xor.b32" => binary(|a: u32, b: u32| a ^ b),
        "xor.b64" => binary(|a: u64, b: u64| a ^ b),
        "xor.b16" => binary(|a: u16, b: u16| a ^ b),
        "xor.pred" => binary(|a: bool, b: bool| a ^ b),
        "not.b32" => unary(|a: u32| !a),
        "not.b64" => unary(|a: u64| !a),
        "not.b16" => unary(|a: u16| !a),
        "not.pred" => unary(|a: bool| !a),
        "shl.b32" => binary(|a: u32, n: u32| if n < 32 { a << n } else { 0 }),
        "shl.b64" => binary(|a: u64, n: u32| if n < 64 { a << n } else { 0 }),
        "shl.b16" => binary(|a: u16, n: u32| if n < 16 { a << n } else { 0 }),
        "shr.u32" | "shr.b32" => binary(|a: u32, n: u32| if n < 32 { a >> n } else { 0 }),
        "shr.u64" | "shr.b64" => binary(|a: u64, n: u32| if n < 64 { a >> n } else { 0 }),
        "shr.u16" | "shr.b16" => binary(|a: u16, n: u32| if n < 16 { a >> n } else { 0 }),
        "shr.s32" => binary(|a: i32, n: u32| a >> n.min(31)),
        "shr.s64" => binary(|a: i64, n: u32| a >> n.min(63)),
        "shf.l.wrap.b32" => {
            ternary(|low: u32, high: u32, n: u32| (((high as u64) << 32 | low as u64) << (n % 32) >> 32) as u32)
        }
        "shf.r.wrap.b32" => {
            ternary(|low: u32, high: u32, n: u32| (((high as u64) << 32 | low as u64) >> (n % 32)) as u32)
        }
        "bfi.b32" => insert(|a: u32, b: u32, at, count| {
            let mask = ((1u64 << count.min(32)) - 1).checked_shl(at).unwrap_or(0) as u32;
            b & !mask | a.checked_shl(at).unwrap_or(0) & mask
        }),
        "bfi.b64" => insert(|a: u64, b: u64, at, count| {
            let mask = ((1u128 << count.min(64)) - 1).checked_shl(at).unwrap_or(0) as u64;
            b & !mask | a.checked_shl(at).unwrap_or(0) & mask
        }),
        "bfe.u32" => ternary(|a: u32, at: u32, count: u32| {
            ((a as u64).checked_shr(at).unwrap_or(0) & ((1u64 << count.min(32)) - 1)) as u32
        }),
        "brev.b32" => unary(u32::reverse_bits),
        "clz.b32" => unary(u32::leading_zeros),
        "popc.b32" => unary(u32::count_ones),
        "bfind.shiftamt.u32" => unary(|a: u32| if a == 0 { !0 } else { a.leading_zeros() }),
        "bfind.u32" => unary(|a: u32| if a == 0 { !0 } else { 31 - a.leading_zeros() }),
        "prmt.b32" => ternary(permute),
        "dp4a.u32.u32" => ternary(|a: u32, b: u32, c: u32| {
            (0..4).fold(c, |sum, n| sum.wrapping_add((a >> (n * 8) & 255) * (b >> (n * 8) & 255)))
        }),
        "selp.b16" | "selp.u16" | "selp.s16" | "selp.b32" | "selp.u32" | "selp.s32" | "selp.f32" => {
            ternary(|a: u32, b: u32, take: bool| if take { a } else { b })
        }
        "selp.b64" | "selp.u64" | "selp.s64" | "selp.f64" => {
            ternary(|a: u64, b: u64, take: bool| if take { a } else { b })
        }
        "cvta.to.global.u64" | "cvta.global.u64" | "cvta.param.u64" | "cvta.to.param.u64" => unary(|a: u64| a),
        "cvta.shared.u64" => unary(|a: u64| a | crate::memory::SHARED_WINDOW),
        "cvta.to.shared.u64" => unary(|a: u64| a & !crate::memory::SHARED_WINDOW),
        _ => return conversion(&parts),
    })
}

fn conversion(parts: &[&str]) -> Option<Computed> {
    Some(match parts {
        ["cvt", "u64" | "s64", "u32"] => unary(|a: u32| a as u64),
        ["cvt", "u64" | "s64", "s32"] => unary(|a: i32| a as i64),
        ["cvt", "u32" | "s32", "u64" | "s64"] => unary(|a: u64| a as u32),
        ["cvt", "u16" | "s16", "u64" | "s64"] => unary(|a: u64| a as u16),
        ["cvt", "u16" | "s16", "u32" | "s32"] => unary(|a: u32| a as u16),
        ["cvt", "u32" | "s32", "u16"] => unary(|a: u16| a as u32),
        ["cvt", "u32" | "s32", "s16"] => unary(|a: i16| a as i32),
        ["cvt", "u64" | "s64", "u16"] => unary(|a: u16| a as u64),
        ["cvt", "s32" | "u32", "s8"] => unary(|a: i8| a as i32),
        ["cvt", "s16" | "u16", "s8"] => unary(|a: i8| a as i16),
        ["cvt", "u32" | "s32", "u8"] => unary(|a: u8| a as u32),
        ["cvt", "u16" | "s16", "u8"] => unary(|a: u8| a as u16),
        ["cvt", "u64" | "s64", "u8"] => unary(|a: u8| a as u64),
        ["cvt", "s64", "s8"] => unary(|a: i8| a as i64),
        ["cvt", "rn", "f32", "u32"] => unary(|a: u32| a as f32),
        ["cvt", "rn", "f32", "s32"] => unary(|a: i32| a as f32),
        ["cvt", "rn", "f32", "u64"] => unary(|a: u64| a as f32),
        ["cvt", "rn", "f32", "s64"] => unary(|a: i64| a as f32),
        ["cvt", "rn", "f32", "u16"] => unary(|a: u16| a as f32),
        ["cvt", "rn", "f32", "s16"] => unary(|a: i16| a as f32),
        ["cvt", "rn", "f32", "s8"] => unary(|a: i8| a as f32),
        ["cvt", "rn", "f32", "u8"] => unary(|a: u8| a as f32),
        ["cvt", "rn", "f64", "u32"] => unary(|a: u32| a as f64),
        ["cvt", "rn", "f64", "s32"] => unary(|a: i32| a as f64),
        ["cvt", "rn", "f64", "u64"] => unary(|a: u64| a as f64),
        ["cvt", "rn", "f64", "s64"] => unary(|a: i64| a as f64),
        ["cvt", "f64", "f32"] => unary(|a: f32| a as f64),
        ["cvt", "rn", "f32", "f64"] => unary(|a: f64| a as f32),
        ["cvt", "f32", "f16"] => unary(|a: f16| a.to_f32()),
        ["cvt", "f64", "f16"] => unary(|a: f16| a.to_f64()),
        ["cvt", "f32", "bf16"] => unary(|a: bf16| a.to_f32()),
        ["cvt", "rn", "f16", "f32"] => unary(f16::from_f32),
        ["cvt", "rn", "bf16", "f32"] => unary(to_bf16),
        ["cvt", "rn", "f16x2", "f32"] => {
            binary(|a: f32, b: f32| (f16::from_f32(a).to_bits() as u32) << 16 | f16::from_f32(b).to_bits() as u32)
        }
        ["cvt", "rn", "bf16x2", "f32"] => {
            binary(|a: f32, b: f32| (to_bf16(a).to_bits() as u32) << 16 | to_bf16(b).to_bits() as u32)
        }
        ["cvt", "rn", "f16x2", "e4m3x2"] => unary(|a: u16| e4m3(a as u8) | e4m3((a >> 8) as u8) << 16),
        ["cvt", "rzi", "u32", "f32"] => unary(|a: f32| a as u32),
        ["cvt", "rzi", "u64", "f32"] => unary(|a: f32| a as u64),
        ["cvt", "rzi", "s32", "f32"] => unary(|a: f32| a as i32),
        ["cvt", "rni", "s32", "f32"] => unary(|a: f32| a.round_ties_even() as i32),
        ["cvt", "rni", "u32", "f32"] => unary(|a: f32| a.round_ties_even() as u32),
        ["cvt", "rmi", "s32", "f32"] => unary(|a: f32| a.floor() as i32),
        ["cvt", "rni", "f32", "f32"] => unary(f32::round_ties_even),
        ["cvt", "rzi", "f32", "f32"] => unary(f32::trunc),
        ["cvt", "rzi", "s64", "f64"] => unary(|a: f64| a as i64),
        ["cvt", "rzi", "u64", "f64"] => unary(|a: f64| a as u64),
        ["cvt", "rzi", "s32", "f64"] => unary(|a: f64| a as i32),
        ["cvt", "rzi", "u32", "f64"] => unary(|a: f64| a as u32),
        ["cvt", "rpi", "u32", "f64"] => unary(|a: f64| a.ceil() as u32),
        ["cvt", "rni", "f64", "f64"] => unary(f64::round_ties_even),
        ["cvt", "rpi", "f64", "f64"] => unary(f64::ceil),
        ["cvt", "rzi", "f64", "f64"] => unary(f64::trunc),
        _ => return None,
    })
}

fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

/// A number rather than a NaN; +0 rather than −0.
fn larger(a: f32, b: f32) -> f32 {
    if a.is_nan() {
        return b;
    }
    if a == b {
        return if a.is_sign_negative() { b } else { a };
    }
    if b.is_nan() || a > b { a } else { b }
}

/// NaN where either is; +0 rather than −0.
fn larger_or_nan(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { f32::from_bits(0x7fff_ffff) } else { larger(a, b) }
}

/// A function of each half of two words.
fn pairs(a: u32, b: u32, of: impl Fn(u16, u16) -> u16) -> u32 {
    of(a as u16, b as u16) as u32 | (of((a >> 16) as u16, (b >> 16) as u16) as u32) << 16
}

fn widen_f16(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32()
}

fn widen_bf16(bits: u16) -> f32 {
    bf16::from_bits(bits).to_f32()
}

/// As for [`to_bf16`].
fn narrow_f16(x: f32) -> u16 {
    if x.is_nan() { 0x7fff } else { f16::from_f32(x).to_bits() }
}

/// The sum, rounded down.
fn add_down(a: f32, b: f32) -> f32 {
    let (wide, sum) = (a as f64 + b as f64, a + b);
    // What the sum in float64 lacks of the exact one.
    let of_b = wide - a as f64;
    let rest = (a as f64 - (wide - of_b)) + (b as f64 - of_b);
    let is_above = sum as f64 > wide || sum as f64 == wide && rest < 0.0;
    if is_above { sum.next_down() } else { sum }
}

/// A reciprocal in the range of normal numbers, rounded towards zero.
fn reciprocal_towards_zero(x: f32) -> f32 {
    let nearest = 1.0 / x;
    let is_too_far = nearest.is_finite() && (-nearest).mul_add(x, 1.0) < 0.0;
    if is_too_far { f32::from_bits(nearest.to_bits() - 1) } else { nearest }
}

/// The product is exact in float64, and rarely is the sum not.
fn fma_f16(a: u16, b: u16, c: u16) -> u16 {
    let [a, b, c] = [a, b, c].map(|bits| widen_f16(bits) as f64);
    let sum = a * b + c;
    if sum.is_nan() { 0x7fff } else { f16::from_f64(sum).to_bits() }
}

/// NaN is the one that the hardware gives.
fn to_bf16(x: f32) -> bf16 {
    if x.is_nan() { bf16::from_bits(0x7fff) } else { bf16::from_f32(x) }
}

fn e4m3(x: u8) -> u32 {
    let sign = (x as u32 & 0x80) << 8;
    let magnitude = x as u32 & 0x7f;
    if magnitude == 0x7f {
        return 0x7fff;
    }
    // As a float16 a value lacks a factor of 2^8.
    sign | f16::from_f32(f16::from_bits((magnitude << 7) as u16).to_f32() * 256.0).to_bits() as u32
}

fn permute(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = (b as u64) << 32 | a as u64;
    (0..4).fold(0, |word, n| {
        let which = selector >> (n * 4) & 15;
        let byte = (bytes >> ((which & 7) * 8)) as u8;
        let byte = if which & 8 != 0 { (byte as i8 >> 7) as u8 } else { byte };
        word | (byte as u32) << (n * 8)
    })
}
