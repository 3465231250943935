//! Instructions that compute, against numbers worked out by hand or by a formula.

use super::{check, word, words};

#[test]
fn integers_wrap() {
    words(&[
        ("add.s32 %r10, 0xffffffff, 2", 1),
        ("sub.s32 %r10, 1, 2", !0),
        ("mul.lo.s32 %r10, 0x10001, 0x10001", 0x20001),
        ("mul.hi.u32 %r10, 0xffffffff, 0xffffffff", 0xffff_fffe),
        ("mul.hi.s32 %r10, -1, 5", !0),
        ("mul.wide.s32 %rd10, -3, 5; cvt.u32.u64 %r10, %rd10", -15i32 as u32),
        ("mul.wide.s32 %rd10, -3, 5; shr.u64 %rd10, %rd10, 32; cvt.u32.u64 %r10, %rd10", !0),
        ("mad.lo.s32 %r10, 7, 6, 0xffffffff", 41),
        ("div.u32 %r10, 17, 5", 3),
        ("rem.u32 %r10, 17, 5", 2),
        ("neg.s32 %r10, 5", -5i32 as u32),
        ("abs.s32 %r10, -5", 5),
        ("min.s32 %r10, -1, 1", !0),
        ("min.u32 %r10, -1, 1", 1),
        ("max.s32 %r10, -1, 1", 1),
        ("max.u32 %r10, -1, 1", !0),
        ("max.u16x2 %r10, 0x00050009, 0x00060001", 0x0006_0009),
        ("max.NaN.bf16x2 %r10, 0x3f807fc1, 0xbf80ff80", 0x3f80_7fff),
        ("max.NaN.bf16x2 %r10, 0xff808000, 0xff800000", 0xff80_0000),
        ("add.rn.f16x2 %r10, 0x4bffbc00, 0x4400bc00", 0x4d00_c000),
        ("sub.rn.f16x2 %r10, 0x544f5400, 0x54785478", 0xc120_c780),
        // 15 · 2^-20 · 2^11 − 7.5 / 512 and 2^-24 · 2^15 − 7.5 / 512.
        ("fma.rn.f16x2 %r10, 0x00f00001, 0x68007800, 0xa380a380", 0x2380_a280),
        ("fma.rn.f16x2 %r10, 0x3c007c00, 0x3c010000, 0x80003c00", 0x3c01_7fff),
        ("max.NaN.f16x2 %r10, 0x3c00fc00, 0x7e008001", 0x7fff_8001),
        ("dp4a.u32.u32 %r10, 0x01020304, 0x05060708, 100", 100 + 5 + 12 + 21 + 32),
        // 1 + 2^23 + 2^22 − 2^-24, and reciprocals of 7 and 11.
        ("add.rm.f32 %r10, 0f4b400001, 0fb3800000", 0x4b40_0000),
        ("add.rm.f32 %r10, 0f4b400001, 0f33800000", 0x4b40_0001),
        ("rcp.rz.f32 %r10, 0f40e00000", 0x3e12_4924),
        ("rcp.rz.f32 %r10, 0f41300000", 0x3dba_2e8b),
    ]);
}

#[test]
fn shifts_by_the_width_or_more_shift_everything_out() {
    words(&[
        ("shl.b32 %r10, 3, 31", 1 << 31),
        ("shl.b32 %r10, 3, 32", 0),
        ("shr.u32 %r10, 0x80000000, 32", 0),
        ("shr.s32 %r10, 0x80000000, 40", !0),
        ("shr.s32 %r10, 0x80000000, 4", 0xf800_0000),
        ("shl.b64 %rd10, 1, 64; cvt.u32.u64 %r10, %rd10", 0),
        ("shf.l.wrap.b32 %r10, 0x80000001, 0x00000002, 33", 5),
        ("shf.r.wrap.b32 %r10, 0x80000001, 0x00000003, 1", 0xc000_0000),
    ]);
}

#[test]
fn bits_are_counted_found_and_moved() {
    words(&[
        ("popc.b32 %r10, 0xf00f0001", 9),
        ("clz.b32 %r10, 1", 31),
        ("clz.b32 %r10, 0", 32),
        ("brev.b32 %r10, 0x00000003", 0xc000_0000),
        ("bfind.u32 %r10, 0x00012345", 16),
        ("bfind.u32 %r10, 0", !0),
        ("bfind.shiftamt.u32 %r10, 0x00012345", 15),
        ("bfe.u32 %r10, 0xabcd1234, 8, 8", 0x12),
        ("bfe.u32 %r10, 0xabcd1234, 28, 8", 0xa),
        ("bfe.u32 %r10, 0xabcd1234, 0, 0", 0),
        ("bfi.b32 %r10, 0xff, 0xabcd1234, 8, 4", 0xabcd_1f34),
        ("bfi.b32 %r10, 0xff, 0xabcd1234, 32, 4", 0xabcd_1234),
        ("prmt.b32 %r10, 0x44332211, 0x88776655, 0x7410", 0x8855_2211),
        ("prmt.b32 %r10, 0x44332211, 0x88776655, 0xfffb", 0xffff_ff00),
        ("and.b32 %r10, 12, 10", 8),
        ("or.b32 %r10, 12, 10", 14),
        ("xor.b32 %r10, 12, 10", 6),
        ("not.b32 %r10, 12", !12),
    ]);
}

#[test]
fn comparisons_know_of_signs_and_of_nan() {
    let taken = |comparison: &str, a: &str, b: &str| {
        word(&format!("setp.{comparison} %p1, {a}, {b}; selp.b32 %r10, 1, 0, %p1")) == 1
    };
    assert!(taken("lt.s32", "-1", "1") && !taken("lt.u32", "-1", "1"));
    assert!(taken("ge.s64", "1", "-1") && !taken("ge.u64", "1", "-1"));
    let (one, nan) = ("0f3f800000", "0f7fc00000");
    for (comparison, of_equals, of_nan) in [
        ("eq", true, false),
        ("ne", false, false),
        ("lt", false, false),
        ("le", true, false),
        ("ge", true, false),
        ("equ", true, true),
        ("neu", false, true),
        ("ltu", false, true),
        ("geu", true, true),
        ("num", true, false),
        ("nan", false, true),
    ] {
        let comparison = format!("{comparison}.f32");
        assert_eq!((taken(&comparison, one, one), taken(&comparison, one, nan)), (of_equals, of_nan), "{comparison}");
    }
}

fn float(instruction: &str, operands: &[f32]) -> f32 {
    let operands: Vec<String> = operands.iter().map(|x| format!("0f{:08x}", x.to_bits())).collect();
    f32::from_bits(word(&format!("{instruction} %f1, {}; mov.b32 %r10, %f1", operands.join(", "))))
}

#[test]
fn fma_rounds_once() {
    let x = 1.0 + 2f32.powi(-12);
    assert_eq!(float("fma.rn.f32", &[x, x, -1.0]), (x as f64 * x as f64 - 1.0) as f32);
    assert_ne!(float("fma.rn.f32", &[x, x, -1.0]), x * x - 1.0);
    assert_eq!(float("add.f32", &[16777216.0, 1.0]), 16777216.0);
    assert_eq!(float("div.rn.f32", &[1.0, 3.0]), 1.0 / 3.0);
}

#[test]
fn approximations_are_exact_where_the_result_is() {
    for (instruction, x, expected) in [
        ("ex2.approx.f32", 3.0, 8.0),
        ("ex2.approx.f32", f32::NEG_INFINITY, 0.0),
        ("ex2.approx.f32", -140.0, 2f32.powi(-140)),
        ("ex2.approx.ftz.f32", -140.0, 0.0),
        ("ex2.approx.ftz.f32", 1e-40, 1.0),
        ("lg2.approx.f32", 0.125, -3.0),
        ("rcp.approx.ftz.f32", 4.0, 0.25),
        ("rcp.rn.f32", 3.0, 1.0 / 3.0),
        ("rcp.rn.f32", 0.0, f32::INFINITY),
        ("rsqrt.approx.f32", 16.0, 0.25),
        ("sqrt.rn.f32", 2.0, std::f32::consts::SQRT_2),
    ] {
        assert_eq!(float(instruction, &[x]), expected, "{instruction} of {x}");
    }
}

#[test]
fn minimum_and_maximum_prefer_numbers_and_know_of_zeros() {
    assert_eq!(float("max.f32", &[f32::NAN, 1.0]), 1.0);
    assert_eq!(float("min.f32", &[1.0, f32::NAN]), 1.0);
    assert!(float("max.f32", &[f32::NAN, f32::NAN]).is_nan());
    assert!(float("max.NaN.f32", &[f32::NAN, 1.0]).is_nan() && float("max.NaN.f32", &[1.0, -f32::NAN]).is_nan());
    assert_eq!(float("max.NaN.f32", &[f32::NEG_INFINITY, 1.0]), 1.0);
    assert_eq!(float("max.f32", &[-0.0, 0.0]).to_bits(), 0);
    assert_eq!(float("min.f32", &[0.0, -0.0]).to_bits(), 1 << 31);
}

#[test]
fn conversions_to_16_bits_round_to_the_nearest_even() {
    let to = |kind: &str, x: f32| word(&format!("cvt.rn.{kind}.f32 %h1, 0f{:08x}; cvt.u32.u16 %r10, %h1", x.to_bits()));
    let f16 = [
        (1.0 + 2f32.powi(-11), 0x3c00),
        (1.0 + 3.0 * 2f32.powi(-11), 0x3c02),
        (65519.0, 0x7bff),
        (65520.0, 0x7c00),
        (2f32.powi(-24), 1),
        (2f32.powi(-25), 0),
        (-0.0, 0x8000),
    ];
    f16.into_iter().for_each(|(x, expected)| assert_eq!(to("f16", x), expected, "{x} as float16"));
    let bf16 = [
        (1.0 + 2f32.powi(-8), 0x3f80),
        (1.0 + 3.0 * 2f32.powi(-8), 0x3f82),
        (f32::MAX, 0x7f80),
        (f32::NAN, 0x7fff),
        (f32::NEG_INFINITY, 0xff80),
    ];
    bf16.into_iter().for_each(|(x, expected)| assert_eq!(to("bf16", x), expected, "{x} as bfloat16"));
    words(&[
        ("cvt.rn.f16x2.f32 %r10, 0f3f800000, 0f40000000", 0x3c00_4000),
        ("cvt.rn.bf16x2.f32 %r10, 0f3f800000, 0f40000000", 0x3f80_4000),
    ]);
}

#[test]
fn every_e4m3_is_its_value() {
    for bits in 0..256u32 {
        let found = word(&format!("mov.u16 %h1, {bits}; cvt.rn.f16x2.e4m3x2 %r10, %h1"));
        assert_eq!(found >> 16, 0, "the upper one is zero");
        let (exponent, mantissa) = ((bits >> 3 & 15) as i32, (bits & 7) as f64);
        let magnitude =
            if exponent == 0 { mantissa * 2f64.powi(-9) } else { (8.0 + mantissa) * 2f64.powi(exponent - 10) };
        let value = half::f16::from_bits(found as u16);
        match bits & 0x7f {
            0x7f => assert!(value.is_nan()),
            _ => assert_eq!(value.to_f64(), if bits & 0x80 != 0 { -magnitude } else { magnitude }, "{bits:#x}"),
        }
        assert!(value.is_nan() || value.is_sign_negative() == (bits & 0x80 != 0));
    }
}

#[test]
fn conversions_to_integers_saturate_and_round_as_they_say() {
    let float = |x: f32| format!("0f{:08x}", x.to_bits());
    for (name, x, expected) in [
        ("rzi.u32.f32", -1.0, 0),
        ("rzi.u32.f32", 5e9, !0),
        ("rzi.u32.f32", f32::NAN, 0),
        ("rzi.s32.f32", -3e9, i32::MIN as u32),
        ("rzi.s32.f32", -2.9, -2i32 as u32),
        ("rni.s32.f32", 2.5, 2),
        ("rni.s32.f32", 3.5, 4),
        ("rmi.s32.f32", -0.5, !0),
    ] {
        assert_eq!(word(&format!("cvt.{name} %r10, {}", float(x))), expected, "cvt.{name} of {x}");
    }
    words(&[
        ("cvt.rn.f32.u32 %f1, 16777217; mov.b32 %r10, %f1", 16777216f32.to_bits()),
        ("cvt.rn.f32.s32 %f1, -3; mov.b32 %r10, %f1", (-3f32).to_bits()),
        ("mov.u32 %r11, 0x80; cvt.s32.s8 %r10, %r11", -128i32 as u32),
        ("cvt.rpi.u32.f64 %r10, 0d4004000000000000", 3),
    ]);
}

#[test]
fn a_predicate_leaves_the_other_lanes_as_they_were() {
    let body = "mov.u32 %r10, 5; setp.lt.u32 %p1, %r1, 3; @%p1 mov.u32 %r10, 6; @!%p1 add.s32 %r10, %r10, %r1; \
                st.global.u32 [%rd2], %r10;";
    check(body).gives(|thread| if thread < 3 { 6 } else { 5 + thread });
}
