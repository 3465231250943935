//! A warp's registers, and instructions that compute lane by lane from registers to registers.

use half::{bf16, f16};

pub const LANES: usize = 32;
pub const ALL: u32 = !0;

/// Which registers: predicates, those of up to 32 bits, those of 64.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    Predicate,
    Word,
    Double,
}

/// Rows of a value per lane. Predicates are a bit per lane.
#[derive(Clone)]
pub struct Registers {
    pub predicates: Vec<u32>,
    pub words: Vec<[u32; LANES]>,
    pub doubles: Vec<[u64; LANES]>,
}

/// Something a register holds.
pub trait Value: Copy + Default {
    const CLASS: Class;
    fn get(registers: &Registers, at: u32) -> [Self; LANES];
    /// Writes the lanes of `mask`.
    fn set(registers: &mut Registers, at: u32, row: [Self; LANES], mask: u32);
}

macro_rules! value {
    ($type:ty, $bank:ident, $class:ident, $bits:ty, $from:expr, $to:expr) => {
        impl Value for $type {
            const CLASS: Class = Class::$class;
            #[inline(always)]
            fn get(registers: &Registers, at: u32) -> [$type; LANES] {
                let row = &registers.$bank[at as usize];
                std::array::from_fn(|lane| $from(row[lane]))
            }
            #[inline(always)]
            fn set(registers: &mut Registers, at: u32, row: [$type; LANES], mask: u32) {
                let to = &mut registers.$bank[at as usize];
                let bits: [$bits; LANES] = std::array::from_fn(|lane| $to(row[lane]));
                if mask == ALL {
                    *to = bits;
                    return;
                }
                for lane in 0..LANES {
                    to[lane] = if mask >> lane & 1 != 0 { bits[lane] } else { to[lane] };
                }
            }
        }
    };
}

value!(u32, words, Word, u32, |x: u32| x, |x: u32| x);
value!(i32, words, Word, u32, |x: u32| x as i32, |x: i32| x as u32);
value!(f32, words, Word, u32, f32::from_bits, f32::to_bits);
value!(u16, words, Word, u32, |x: u32| x as u16, |x: u16| x as u32);
value!(i16, words, Word, u32, |x: u32| x as i16, |x: i16| x as u16 as u32);
value!(u8, words, Word, u32, |x: u32| x as u8, |x: u8| x as u32);
value!(i8, words, Word, u32, |x: u32| x as i8, |x: i8| x as i32 as u32);
value!(f16, words, Word, u32, |x: u32| f16::from_bits(x as u16), |x: f16| x.to_bits() as u32);
value!(bf16, words, Word, u32, |x: u32| bf16::from_bits(x as u16), |x: bf16| x.to_bits() as u32);
value!(u64, doubles, Double, u64, |x: u64| x, |x: u64| x);
value!(i64, doubles, Double, u64, |x: u64| x as i64, |x: i64| x as u64);
value!(f64, doubles, Double, u64, f64::from_bits, f64::to_bits);

impl Value for bool {
    const CLASS: Class = Class::Predicate;
    #[inline(always)]
    fn get(registers: &Registers, at: u32) -> [bool; LANES] {
        let bits = registers.predicates[at as usize];
        std::array::from_fn(|lane| bits >> lane & 1 != 0)
    }
    #[inline(always)]
    fn set(registers: &mut Registers, at: u32, row: [bool; LANES], mask: u32) {
        let bits = row.iter().rev().fold(0, |bits, &x| bits << 1 | x as u32);
        let to = &mut registers.predicates[at as usize];
        *to = *to & !mask | bits & mask;
    }
}

/// Computes an instruction's results from its operands, results first, in the lanes of a mask.
pub type Compute = fn(&mut Registers, &[u32], u32);

/// An instruction that computes, with the classes of its results and operands.
pub struct Computed {
    pub compute: Compute,
    pub results: Vec<Class>,
    pub operands: Vec<Class>,
}

/// The function that a type without size stands for.
fn function<F: Copy>() -> F {
    const { assert!(size_of::<F>() == 0) };
    // SAFETY: there is nothing to read.
    unsafe { std::ptr::NonNull::<F>::dangling().read() }
}

pub fn unary<A: Value, D: Value, F: Fn(A) -> D + Copy>(_: F) -> Computed {
    let compute: Compute = |registers, r, mask| {
        let f = function::<F>();
        let a = A::get(registers, r[1]);
        D::set(registers, r[0], std::array::from_fn(|lane| f(a[lane])), mask);
    };
    Computed { compute, results: vec![D::CLASS], operands: vec![A::CLASS] }
}

pub fn binary<A: Value, B: Value, D: Value, F: Fn(A, B) -> D + Copy>(_: F) -> Computed {
    let compute: Compute = |registers, r, mask| {
        let f = function::<F>();
        let (a, b) = (A::get(registers, r[1]), B::get(registers, r[2]));
        D::set(registers, r[0], std::array::from_fn(|lane| f(a[lane], b[lane])), mask);
    };
    Computed { compute, results: vec![D::CLASS], operands: vec![A::CLASS, B::CLASS] }
}

pub fn ternary<A: Value, B: Value, C: Value, D: Value, F: Fn(A, B, C) -> D + Copy>(_: F) -> Computed {
    let compute: Compute = |registers, r, mask| {
        let f = function::<F>();
        let (a, b, c) = (A::get(registers, r[1]), B::get(registers, r[2]), C::get(registers, r[3]));
        D::set(registers, r[0], std::array::from_fn(|lane| f(a[lane], b[lane], c[lane])), mask);
    };
    Computed { compute, results: vec![D::CLASS], operands: vec![A::CLASS, B::CLASS, C::CLASS] }
}

/// Base, value, position, length.
pub fn insert<T: Value, F: Fn(T, T, u32, u32) -> T + Copy>(_: F) -> Computed {
    let compute: Compute = |registers, r, mask| {
        let f = function::<F>();
        let (a, b) = (T::get(registers, r[1]), T::get(registers, r[2]));
        let (c, d) = (u32::get(registers, r[3]), u32::get(registers, r[4]));
        T::set(registers, r[0], std::array::from_fn(|lane| f(a[lane], b[lane], c[lane], d[lane])), mask);
    };
    Computed { compute, results: vec![T::CLASS], operands: vec![T::CLASS, T::CLASS, Class::Word, Class::Word] }
}

/// Cuts a value in two, the lower part first.
pub fn split<A: Value, D: Value, F: Fn(A) -> (D, D) + Copy>(_: F) -> Computed {
    let compute: Compute = |registers, r, mask| {
        let f = function::<F>();
        let a = A::get(registers, r[2]);
        D::set(registers, r[0], std::array::from_fn(|lane| f(a[lane]).0), mask);
        D::set(registers, r[1], std::array::from_fn(|lane| f(a[lane]).1), mask);
    };
    Computed { compute, results: vec![D::CLASS, D::CLASS], operands: vec![A::CLASS] }
}
