//! The two 8-bit float formats of DLPack and OCP. The library reads them, and writes scales in e4m3.

use super::dtype::{DType, Element, Float};

/// float8_e4m3fn: largest value 448, no infinity, NaN where all of exponent and mantissa are ones.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct F8E4M3(pub u8);

/// float8_e5m2: the upper half of a float16.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct F8E5M2(pub u8);

impl Element for F8E4M3 {
    const DTYPE: DType = DType::F8E4M3;
}

impl Element for F8E5M2 {
    const DTYPE: DType = DType::F8E5M2;
}

impl Float for F8E4M3 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        E4M3[self.0 as usize]
    }
}

impl F8E4M3 {
    pub const NAN: F8E4M3 = F8E4M3(0x7f);
    const LARGEST: u8 = 0x7e;

    /// The number nearest to `x`, which is finite and not below 0: ties to even, 448 at most.
    pub fn nearest(x: f32) -> F8E4M3 {
        // The smallest normal number is 2⁻⁶, and below it numbers are 2⁻⁹ apart.
        if x < power_of_two(-6) {
            return F8E4M3((x * power_of_two(9)).round_ties_even() as u8);
        }
        // Three bits of the mantissa stay, and a carry goes to the exponent, whose bias becomes 7.
        let bits = x.to_bits();
        let rounded = bits + 0x7ffff + (bits >> 20 & 1);
        F8E4M3(((rounded >> 20) - ((127 - 7) << 3)).min(F8E4M3::LARGEST.into()) as u8)
    }
}

impl Float for F8E5M2 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        E5M2[self.0 as usize]
    }
}

static E4M3: [f32; 256] = table(4, 3, 7, false);
static E5M2: [f32; 256] = table(5, 2, 15, true);

/// The values of all codes. With `ieee` the largest exponent stands for infinities and NaN; without it only its last code is NaN.
const fn table(exponent_bits: u32, mantissa_bits: u32, bias: i32, ieee: bool) -> [f32; 256] {
    let (most, ones) = ((1 << exponent_bits) - 1, (1 << mantissa_bits) - 1);
    let mut values = [0.0; 256];
    let mut code = 0usize;
    while code < 256 {
        let (exponent, mantissa) = (code >> mantissa_bits & most, code & ones);
        let is_last = exponent == most;
        let magnitude = if is_last && ieee && mantissa == 0 {
            f32::INFINITY
        } else if is_last && (ieee || mantissa == ones) {
            f32::NAN
        } else if exponent == 0 {
            mantissa as f32 * power_of_two(1 - bias - mantissa_bits as i32)
        } else {
            (mantissa + ones + 1) as f32 * power_of_two(exponent as i32 - bias - mantissa_bits as i32)
        };
        values[code] = if code >= 128 { -magnitude } else { magnitude };
        code += 1;
    }
    values
}

const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn e5m2_is_the_upper_half_of_float16() {
        for code in 0..=255u8 {
            let (value, half) = (F8E5M2(code).to_f32(), f16::from_bits((code as u16) << 8).to_f32());
            assert!(value == half || value.is_nan() && half.is_nan(), "{code:#x}: {value} instead of {half}");
        }
    }

    #[test]
    fn nearest_e4m3_is_nearest_and_even_where_two_are() {
        let check = |x: f32| {
            let found = F8E4M3::nearest(x);
            let distance = |code: u8| (F8E4M3(code).to_f32() as f64 - x as f64).abs();
            let least = (0..=0x7e).map(distance).fold(f64::INFINITY, f64::min);
            assert_eq!(distance(found.0), least, "{x}: {:#x}", found.0);
            let ties = (0..=0x7e).filter(|&code| distance(code) == least).count();
            assert!(ties == 1 || found.0.is_multiple_of(2), "{x} is between two, and {:#x} is odd", found.0);
        };
        for code in 0..0x7e {
            let [low, high] = [code, code + 1].map(|code| F8E4M3(code).to_f32());
            for x in [low, high, (low + high) / 2.0, ((low + high) / 2.0).next_up(), ((low + high) / 2.0).next_down()] {
                check(x);
            }
        }
        for x in [1e-30, f32::MIN_POSITIVE, 449.0, 480.0, 1e30, f32::MAX] {
            check(x);
        }
    }

    #[test]
    fn e4m3_has_the_values_of_its_definition() {
        let known =
            [(0x00, 0.0), (0x01, 2f32.powi(-9)), (0x07, 7.0 * 2f32.powi(-9)), (0x08, 2f32.powi(-6)), (0x38, 1.0)];
        for (code, value) in known.into_iter().chain([(0x3c, 1.5), (0x7e, 448.0), (0xfe, -448.0), (0xb8, -1.0)]) {
            assert_eq!(F8E4M3(code).to_f32(), value, "{code:#x}");
        }
        let nans: Vec<u8> = (0..=255).filter(|&code| F8E4M3(code).to_f32().is_nan()).collect();
        assert_eq!(nans, [0x7f, 0xff]);
    }
}
