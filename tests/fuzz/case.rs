//! One call with random arguments, as a description draws it: its structs, its tensors, its numbers.

use crate::content::Content;
use crate::support::*;
use std::ffi::c_void;
use std::fmt::{Display, Formatter};
use vanward::abi::*;
use vanward::capi::vwd_session;

/// The place of a field, with its name as messages have it: `of!(args, vwd_attention_args, kv)`.
macro_rules! of {
    ($place:expr, $type:ty, $field:ident) => {
        $place.field(stringify!($field), std::mem::offset_of!($type, $field))
    };
}
pub(crate) use of;

/// Where something stands in a struct of the call.
#[derive(Clone, Debug, PartialEq)]
pub struct Place {
    pub block: usize,
    pub offset: usize,
    pub name: String,
}

impl Place {
    pub fn field(&self, name: &str, offset: usize) -> Place {
        let dot = if self.name.is_empty() { "" } else { "." };
        Place { block: self.block, offset: self.offset + offset, name: format!("{}{dot}{name}", self.name) }
    }
}

/// Memory that the call reads: its argument struct, or what that points to.
pub struct Block {
    pub name: String,
    pub bytes: Vec<u8>,
    /// Where the pointer to it stands; the argument struct has none.
    pub home: Option<Place>,
    pub is_versioned: bool,
    pub pointer: Pointer,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Pointer {
    Sound,
    Null,
    Misaligned,
    /// Just below the end of the address space.
    Top,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Role {
    In,
    Out,
    /// Read, and written in its place.
    InOut,
}

/// A tensor argument.
pub struct Field {
    pub place: Place,
    pub role: Role,
    pub is_given: bool,
    /// The call would be accepted without it, and need not look at it if it is given.
    pub is_spare: bool,
    /// All but its address.
    pub tensor: vwd_tensor,
    pub content: Content,
    pub pointer: Pointer,
    /// Lies at the address of another field; where that is allowed, true.
    pub shares: Option<(usize, bool)>,
}

impl Field {
    pub fn rank(&self) -> usize {
        self.tensor.ndim.clamp(0, 5) as usize
    }

    pub fn shape(&self) -> &[i64] {
        &self.tensor.shape[..self.rank()]
    }

    pub fn strides(&self) -> &[i64] {
        &self.tensor.strides[..self.rank()]
    }

    /// Bytes of an element.
    pub fn width(&self) -> usize {
        (self.tensor.dtype_bits as usize).div_ceil(8).max(1)
    }

    /// Elements, as far as the description makes sense.
    pub fn count(&self) -> i128 {
        self.shape().iter().map(|&n| n.max(0) as i128).fold(1, i128::saturating_mul)
    }

    /// The lowest and the highest offset of an element, in elements.
    pub fn reach(&self) -> (i128, i128) {
        let reach = |(&n, &s): (&i64, &i64)| (n as i128 - 1).max(0) * s as i128;
        let all = || self.shape().iter().zip(self.strides()).map(reach);
        let sum = |a: i128, b: i128| a.saturating_add(b);
        (all().map(|r| r.min(0)).fold(0, sum), all().map(|r| r.max(0)).fold(0, sum))
    }
}

/// A number argument, as its bits.
pub struct Number {
    pub place: Place,
    pub value: u32,
    pub kind: Kind,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    Whole,
    Real,
    /// The length of an array; any that is larger than this is refused, without a look at the array.
    Length(u32),
}

/// What a call answered: its status, and results that are in no tensor.
pub type Answer = (vwd_status, Vec<u8>);
pub type Invoke = Box<dyn Fn(&Session, *const c_void) -> Answer>;

pub struct Case {
    pub rng: Rng,
    pub invoke: Invoke,
    pub blocks: Vec<Block>,
    pub fields: Vec<Field>,
    pub numbers: Vec<Number>,
    /// An output, and an input in whose place it may be.
    pub may_overlap: Vec<[usize; 2]>,
    /// What was broken, in words.
    pub broken: Vec<String>,
    /// Some extents are 0, others beyond any memory.
    is_degenerate: bool,
}

impl Case {
    pub fn new(seed: u64, describe: impl Fn(&mut Case)) -> Case {
        let mut rng = Rng::new(seed);
        let is_degenerate = rng.one_in(8);
        let invoke: Invoke = Box::new(|_, _| unreachable!("described without a function"));
        let (blocks, fields, numbers, may_overlap, broken) = (vec![], vec![], vec![], vec![], vec![]);
        let mut case = Case { rng, invoke, blocks, fields, numbers, may_overlap, broken, is_degenerate };
        describe(&mut case);
        case
    }

    // --- structs -------------------------------------------------------------------------------------------------

    /// The argument struct, and the function that takes it.
    pub fn call<T: Versioned + 'static>(
        &mut self,
        function: unsafe extern "C" fn(*const vwd_session, *const T, vwd_stream) -> vwd_status,
    ) -> Place {
        self.call_with::<T>(move |session, args| {
            // SAFETY: the arguments are what the case describes, in memory that is there.
            (unsafe { function(session.raw(), args.cast(), std::ptr::null_mut()) }, vec![])
        })
    }

    /// The same of a call that has a twin, which tells what scratch it would need. The twin checks as the call does,
    /// and a CPU session needs none.
    pub fn call_with_scratch<T: Versioned + 'static>(
        &mut self,
        function: unsafe extern "C" fn(*const vwd_session, *const T, vwd_stream) -> vwd_status,
        twin: unsafe extern "C" fn(*const vwd_session, *const T, *mut u64) -> vwd_status,
    ) -> Place {
        self.call_with::<T>(move |session, args| {
            let mut bytes = u64::MAX;
            // SAFETY: as above, and bytes is a place.
            let (told, status) = unsafe {
                let told = twin(session.raw(), args.cast(), &mut bytes);
                (told, function(session.raw(), args.cast(), std::ptr::null_mut()))
            };
            match status {
                VWD_OK => assert_eq!((told, bytes), (VWD_OK, 0), "scratch of a call that is accepted"),
                // A session that checks contents has refused an element, "list.ids[0, 1]: …", which the twin does not read.
                VWD_ERROR_INVALID_ARGUMENT if last_error().contains("]: ") => assert_eq!((told, bytes), (VWD_OK, 0)),
                VWD_ERROR_INVALID_ARGUMENT => {
                    assert_eq!((told, bytes), (status, u64::MAX), "scratch of one that is not")
                }
                _ => {}
            }
            (status, vec![])
        })
    }

    /// A call that takes an array and no struct: the places of its elements.
    pub fn call_with_array<T>(
        &mut self,
        name: &str,
        length: usize,
        invoke: impl Fn(&Session, *const c_void) -> Answer + 'static,
    ) -> Vec<Place> {
        self.invoke = Box::new(invoke);
        self.elements::<T>(name, None, length)
    }

    pub fn call_with<T: Versioned>(&mut self, invoke: impl Fn(&Session, *const c_void) -> Answer + 'static) -> Place {
        self.invoke = Box::new(invoke);
        self.block::<T>("args", "", None)
    }

    /// The struct of a call that has no arguments but these.
    pub fn options<T: Versioned>(
        &mut self,
        name: &str,
        invoke: impl Fn(&Session, *const c_void) -> Answer + 'static,
    ) -> Place {
        self.invoke = Box::new(invoke);
        self.block::<T>(name, name, None)
    }

    /// A struct with its name, and as what the names of its fields begin.
    fn block<T: Versioned>(&mut self, name: &str, prefix: &str, home: Option<Place>) -> Place {
        let mut bytes = vec![0; size_of::<T>()];
        bytes[..4].copy_from_slice(&(size_of::<T>() as u32).to_le_bytes());
        self.blocks.push(Block { name: name.into(), bytes, home, is_versioned: true, pointer: Pointer::Sound });
        let name = prefix.to_string();
        let place = Place { block: self.blocks.len() - 1, offset: 0, name };
        // Every versioned struct has its flags after its size.
        self.number(place.field("flags", size_of::<u32>()), 0);
        place
    }

    /// A struct that the arguments point to.
    pub fn nested<T: Versioned>(&mut self, home: Place) -> Place {
        let name = home.name.clone();
        self.block::<T>(&name, &name, Some(home))
    }

    /// A host array that the arguments point to: the places of its elements.
    pub fn array<T>(&mut self, home: Place, length: usize) -> Vec<Place> {
        let name = home.name.clone();
        self.elements::<T>(&name, Some(home), length)
    }

    fn elements<T>(&mut self, name: &str, home: Option<Place>, length: usize) -> Vec<Place> {
        let block = self.blocks.len();
        let element = |n| Place { block, offset: n * size_of::<T>(), name: format!("{name}[{n}]") };
        let places = (0..length).map(element).collect();
        let bytes = vec![0; length * size_of::<T>()];
        self.blocks.push(Block { name: name.into(), bytes, home, is_versioned: false, pointer: Pointer::Sound });
        places
    }

    /// The last struct that was described is not given.
    pub fn leave_out(&mut self) {
        self.blocks.last_mut().unwrap().pointer = Pointer::Null;
    }

    // --- numbers -------------------------------------------------------------------------------------------------

    pub fn number(&mut self, place: Place, value: u32) {
        self.numbers.push(Number { place, value, kind: Kind::Whole });
    }

    pub fn real(&mut self, place: Place, value: f32) {
        self.numbers.push(Number { place, value: value.to_bits(), kind: Kind::Real });
    }

    /// The length of an array, of which `most` is the largest that is accepted.
    pub fn length(&mut self, place: Place, value: usize, most: u32) {
        self.numbers.push(Number { place, value: value as u32, kind: Kind::Length(most) });
    }

    // --- tensors -------------------------------------------------------------------------------------------------

    /// An extent; in a degenerate case perhaps 0, or beyond any memory.
    pub fn extent(&mut self, range: std::ops::RangeInclusive<usize>) -> i64 {
        if self.is_degenerate && self.rng.one_in(5) {
            return 0;
        }
        if self.is_degenerate && self.rng.one_in(6) {
            return self.rng.pick(&[1 << 21, 1 << 30, 1 << 31, (1 << 32) + 1, 1 << 40, 1 << 60, 1 << 62, i64::MAX]);
        }
        self.rng.size(range) as i64
    }

    pub fn tensor(&mut self, place: Place, role: Role, dtype: DType, shape: &[i64], content: Content) -> usize {
        let mut tensor = vwd_tensor { device_type: self.rng.pick(&[1, 1, 1, 3]), ..absent() };
        (tensor.dtype_code, tensor.dtype_bits, tensor.lanes) = (dtype.code, dtype.bits, self.rng.pick(&[1, 1, 1, 0]));
        tensor.ndim = shape.len() as i32;
        tensor.shape[..shape.len()].copy_from_slice(shape);
        tensor.strides = self.strides(shape, role);
        let field = Field {
            place,
            role,
            is_given: true,
            is_spare: false,
            tensor,
            content,
            pointer: Pointer::Sound,
            shares: None,
        };
        self.fields.push(field);
        self.fields.len() - 1
    }

    pub fn input(&mut self, place: Place, dtype: DType, shape: &[i64], content: Content) -> usize {
        self.tensor(place, Role::In, dtype, shape, content)
    }

    pub fn output(&mut self, place: Place, dtype: DType, shape: &[i64]) -> usize {
        self.tensor(place, Role::Out, dtype, shape, Content::Bytes)
    }

    /// Says whether a tensor is given that need not be.
    pub fn optional(&mut self, is_given: bool, field: usize) {
        (self.fields[field].is_given, self.fields[field].is_spare) = (is_given, !is_given);
    }

    /// A tensor that is given or not.
    pub fn maybe_input(&mut self, place: Place, dtype: DType, shape: &[i64], content: Content) {
        let (field, is_given) = (self.input(place, dtype, shape, content), self.rng.one_in(2));
        self.optional(is_given, field);
    }

    pub fn maybe_output(&mut self, place: Place, dtype: DType, shape: &[i64]) {
        let (field, is_given) = (self.output(place, dtype, shape), self.rng.one_in(2));
        self.optional(is_given, field);
    }

    /// Any layout in which the elements of outputs are distinct.
    fn strides(&mut self, shape: &[i64], role: Role) -> [i64; 5] {
        let mut strides = [0; 5];
        if shape.iter().any(|&n| !(1..1 << 20).contains(&n)) {
            shape.iter().zip(&mut strides).for_each(|(_, s)| *s = self.rng.pick(&[0, 1, -1, 8, 1 << 31, 1 << 61]));
            return strides;
        }
        let mut layout = Layout::random(&mut self.rng, shape.len());
        if role == Role::In && self.rng.one_in(8) {
            layout.expanded = (0..shape.len()).filter(|_| self.rng.one_in(2)).collect();
        }
        let extents: Vec<usize> = shape.iter().map(|&n| n as usize).collect();
        strides[..shape.len()].copy_from_slice(&layout.place(&extents).0);
        strides
    }

    // --- words ---------------------------------------------------------------------------------------------------

    /// What a message may begin with: a struct, its size, a field, or what several fields have in common.
    pub fn names(&self) -> Vec<String> {
        let common = |field: &Field| field.place.name.rsplit_once('.').map(|(common, _)| common.to_string());
        let blocks = self.blocks.iter().flat_map(|block| [block.name.clone(), format!("{}.struct_size", block.name)]);
        let fields = self.fields.iter().map(|field| field.place.name.clone());
        let common = self.fields.iter().filter_map(common);
        blocks.chain(fields).chain(common).chain(self.numbers.iter().map(|number| number.place.name.clone())).collect()
    }
}

impl Display for Case {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        for number in self.numbers.iter().filter(|number| number.value != 0) {
            match number.kind {
                Kind::Real => writeln!(f, "  {} = {:?}", number.place.name, f32::from_bits(number.value))?,
                _ => writeln!(f, "  {} = {}", number.place.name, number.value)?,
            }
        }
        for field in self.fields.iter().filter(|field| field.is_given) {
            let (dtype, role) = (
                (field.tensor.dtype_code, field.tensor.dtype_bits),
                match field.role {
                    Role::In => "in",
                    Role::Out => "out",
                    Role::InOut => "in and out",
                },
            );
            let (name, shape, strides) = (&field.place.name, field.shape(), field.strides());
            writeln!(f, "  {name} {shape:?} strides {strides:?}, {role}, dtype {dtype:?}, {:?}", field.content)?;
        }
        match &self.broken[..] {
            [] => writeln!(f, "  nothing is broken"),
            broken => writeln!(f, "  broken: {}", broken.join("; ")),
        }
    }
}
