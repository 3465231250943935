//! Element types, in DLPack's encoding.

use half::{bf16, f16};
use std::fmt;

/// DLPack's `DLDataTypeCode`, as far as Vanward names them.
pub mod code {
    pub const INT: u8 = 0;
    pub const UINT: u8 = 1;
    pub const FLOAT: u8 = 2;
    pub const BFLOAT: u8 = 4;
    pub const BOOL: u8 = 6;
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
    pub const BOOL: DType = DType { code: code::BOOL, bits: 8 };

    /// The element types of keys, values and queries.
    pub const FLOATS: &'static [DType] = &[DType::F32, DType::F16, DType::BF16];
    pub const TOKENS: &'static [DType] = &[DType::I32, DType::I64];

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
elements!(f32 => F32, f16 => F16, bf16 => BF16, i32 => I32, i64 => I64, u8 => U8);

impl Float for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
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

/// Calls `$body` with `$T` bound to the Rust type of a float dtype that has been checked already.
#[macro_export]
#[doc(hidden)]
macro_rules! with_float {
    ($dtype:expr, $T:ident => $body:expr) => {{
        use $crate::core::dtype::DType;
        match $dtype {
            DType::F32 => {
                type $T = f32;
                $body
            }
            DType::F16 => {
                type $T = half::f16;
                $body
            }
            DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            other => unreachable!("dtype {other} passed its check"),
        }
    }};
}
