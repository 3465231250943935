//! Element types, in DLPack's encoding.

use half::{bf16, f16};
use std::fmt;

/// The values of DLPack's `DLDataTypeCode` that Vanward knows.
pub mod code {
    pub const INT: u8 = 0;
    pub const UINT: u8 = 1;
    pub const FLOAT: u8 = 2;
    pub const BFLOAT: u8 = 4;
    pub const BOOL: u8 = 6;
    pub const FLOAT8_E4M3FN: u8 = 10;
    pub const FLOAT8_E5M2: u8 = 12;
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub struct DType {
    pub code: u8,
    pub bits: u8,
}

impl DType {
    pub const F32: DType = DType { code: code::FLOAT, bits: 32 };
    pub const F16: DType = DType { code: code::FLOAT, bits: 16 };
    pub const BF16: DType = DType { code: code::BFLOAT, bits: 16 };
    pub const I32: DType = DType { code: code::INT, bits: 32 };
    pub const I64: DType = DType { code: code::INT, bits: 64 };
    pub const U8: DType = DType { code: code::UINT, bits: 8 };
    pub const U32: DType = DType { code: code::UINT, bits: 32 };
    pub const U64: DType = DType { code: code::UINT, bits: 64 };
    pub const BOOL: DType = DType { code: code::BOOL, bits: 8 };

    pub const F8E4M3: DType = DType { code: code::FLOAT8_E4M3FN, bits: 8 };
    pub const F8E5M2: DType = DType { code: code::FLOAT8_E5M2, bits: 8 };

    /// The element types of queries and outputs.
    pub const FLOATS: &'static [DType] = &[DType::F32, DType::F16, DType::BF16];
    /// The element types of keys and values.
    pub const KEYS: &'static [DType] = &[DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2];
    pub const TOKENS: &'static [DType] = &[DType::I32, DType::I64];

    /// Whether values of this type come with scales.
    pub fn is_float8(self) -> bool {
        self == DType::F8E4M3 || self == DType::F8E5M2
    }

    pub fn bytes(self) -> usize {
        self.bits as usize / 8
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code {
            code::INT => write!(f, "int{}", self.bits),
            code::UINT => write!(f, "uint{}", self.bits),
            code::FLOAT => write!(f, "float{}", self.bits),
            code::BFLOAT => write!(f, "bfloat{}", self.bits),
            code::BOOL => f.write_str("bool"),
            code::FLOAT8_E4M3FN => f.write_str("float8_e4m3fn"),
            code::FLOAT8_E5M2 => f.write_str("float8_e5m2"),
            other => write!(f, "DLPack type code {other}, {} bits", self.bits),
        }
    }
}

impl fmt::Debug for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A Rust type that stands for one `DType`.
pub trait Element: Copy + Send + Sync + 'static {
    const DTYPE: DType;
}

/// A floating-point element: the CPU backend computes in f32.
pub trait Float: Element {
    fn to_f32(self) -> f32;
}

/// A floating-point element that the library also writes.
pub trait Rounded: Float {
    /// Rounds to nearest, ties to even.
    fn from_f32(x: f32) -> Self;
}

/// A token id.
pub trait Token: Element + PartialEq {
    fn is_negative(self) -> bool;
    const NONE: Self;
}

macro_rules! elements {
    ($($t:ty => $d:ident),*) => { $(impl Element for $t { const DTYPE: DType = DType::$d; })* };
}
elements!(f32 => F32, f16 => F16, bf16 => BF16, i32 => I32, i64 => I64, u8 => U8, u32 => U32, u64 => U64);

impl Float for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

impl Rounded for f32 {
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }
}

impl Float for f16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
}

impl Rounded for f16 {
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        f16::from_f32(x)
    }
}

impl Float for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
}

impl Rounded for bf16 {
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }
}

impl Token for i32 {
    const NONE: i32 = -1;
    fn is_negative(self) -> bool {
        self < 0
    }
}

impl Token for i64 {
    const NONE: i64 = -1;
    fn is_negative(self) -> bool {
        self < 0
    }
}

/// Evaluates `$body` with `$T` bound to the Rust type of a checked dtype of queries or outputs ([`DType::FLOATS`]).
#[macro_export]
#[doc(hidden)]
macro_rules! with_float {
    ($dtype:expr, $T:ident => $body:expr) => {
        $crate::with_type!($dtype, $T, $body, [F32: f32, F16: half::f16, BF16: half::bf16])
    };
}

/// Evaluates `$body` with `$T` bound to the Rust type of a checked dtype of keys or values ([`DType::KEYS`]).
#[macro_export]
#[doc(hidden)]
macro_rules! with_key {
    ($dtype:expr, $T:ident => $body:expr) => {
        $crate::with_type!($dtype, $T, $body, [
            F32: f32, F16: half::f16, BF16: half::bf16,
            F8E4M3: $crate::core::float8::F8E4M3, F8E5M2: $crate::core::float8::F8E5M2
        ])
    };
}

#[macro_export]
#[doc(hidden)]
macro_rules! with_type {
    ($dtype:expr, $T:ident, $body:expr, [$($name:ident: $type:ty),*]) => {{
        use $crate::core::dtype::DType;
        match $dtype {
            $(DType::$name => {
                type $T = $type;
                $body
            })*
            other => unreachable!("dtype {other} passed its check"),
        }
    }};
}
