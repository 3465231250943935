//! The table: every argument of a call × every way in which it can be wrong.
//!
//! A call is described once (`calls.rs`): its tensors with symbolic shapes, its scalars with values that are not allowed.
//! Each row starts from arguments that the call accepts, breaks one thing, and checks the status, that the message names
//! the argument and says what was found and expected, and that not one byte of any tensor was written.

use crate::support::backend::Memory;
use crate::support::*;
use std::collections::HashMap;
use std::ffi::c_void;
use vanward::abi::Versioned;
use vanward::abi::*;

/// Bytes of every tensor's memory: more than any tensor of the table needs, so that a defect found here is a message and
/// not a crash.
const ROOM: usize = 1 << 14;

#[derive(Clone, Copy, PartialEq)]
pub enum Role {
    In,
    Out,
}

/// One tensor argument.
pub struct Field<'b> {
    /// As messages call it.
    name: &'static str,
    role: Role,
    /// May be left out. A member of a group that is given whole or not at all counts as required.
    optional: bool,
    /// Symbols of its dimensions. `?` after a symbol: any extent will do.
    shape: Vec<&'static str>,
    /// Takes any dtype that its partner has.
    any_dtype: bool,
    /// An argument that goes with one form of this one, so that either may be the one that does not fit.
    pair: Option<&'static str>,
    /// Where the call finds it.
    at: *mut vwd_tensor,
    memory: Memory<'b>,
    before: Vec<u8>,
}

/// One call with arguments that it accepts.
pub struct Call<'b> {
    backend: &'b Backend,
    pub name: &'static str,
    /// The argument struct: its memory, its size, and the sizes it had in earlier versions.
    args: Vec<u64>,
    args_size: usize,
    known_sizes: &'static [usize],
    /// No earlier version of the struct describes the call.
    is_new: bool,
    sizes: HashMap<&'static str, usize>,
    fields: Vec<Field<'b>>,
    /// (name, address, values that are not allowed)
    scalars: Vec<(&'static str, *mut u32, Vec<u32>)>,
    /// (name, address): host arrays, which must not be NULL
    arrays: Vec<(&'static str, *mut *const c_void)>,
    /// (name, address): tensors that must be absent.
    refused: Vec<(&'static str, *mut vwd_tensor)>,
    /// Outputs that may share memory.
    may_overlap: Vec<[&'static str; 2]>,
    handle: (&'static str, *const c_void),
    /// The parameter that is the struct, or the member of an array that is.
    args_name: &'static str,
    /// What stands before the names of its fields.
    prefix: String,
    takes_stream: bool,
    invoke: Box<dyn Fn(*const c_void, *const c_void, vwd_stream) -> vwd_status + 'b>,
}

impl<'b> Call<'b> {
    pub fn new<T: Versioned + 'b>(
        backend: &'b Backend,
        name: &'static str,
        sizes: &[(&'static str, usize)],
        invoke: unsafe extern "C" fn(*const vanward::capi::vwd_session, *const T, vwd_stream) -> vwd_status,
    ) -> Call<'b> {
        let handle = ("session", backend.session().cast());
        // SAFETY: the table passes a session (or NULL) and a T (or less), as C might.
        Call::with::<T>(backend, name, sizes, handle, move |handle, args, stream| unsafe {
            invoke(handle.cast(), args.cast(), stream)
        })
    }

    pub fn with<T: Versioned>(
        backend: &'b Backend,
        name: &'static str,
        sizes: &[(&'static str, usize)],
        handle: (&'static str, *const c_void),
        invoke: impl Fn(*const c_void, *const c_void, vwd_stream) -> vwd_status + 'b,
    ) -> Call<'b> {
        // Room for later versions of the struct.
        let mut memory = vec![0u64; size_of::<T>() / 8 + 64];
        memory[0] = size_of::<T>() as u64;
        Call {
            backend,
            name,
            args: memory,
            args_size: size_of::<T>(),
            known_sizes: T::KNOWN_SIZES,
            is_new: false,
            sizes: sizes.iter().copied().collect(),
            fields: vec![],
            scalars: vec![],
            arrays: vec![],
            refused: vec![],
            may_overlap: vec![],
            handle,
            args_name: "args",
            prefix: String::new(),
            takes_stream: true,
            invoke: Box::new(invoke),
        }
    }

    /// The function that tells the call's scratch: it accepts and refuses what the call does, in the same words.
    pub fn has_scratch<T: Versioned + 'b>(
        &mut self,
        scratch: unsafe extern "C" fn(*const vanward::capi::vwd_session, *const T, *mut u64) -> vwd_status,
    ) {
        const UNTOUCHED: u64 = 77;
        let invoke = std::mem::replace(&mut self.invoke, Box::new(|_, _, _| VWD_OK));
        self.invoke = Box::new(move |handle, args, stream| {
            let mut bytes = UNTOUCHED;
            // SAFETY: as for the call itself.
            let (told, words) = (unsafe { scratch(handle.cast(), args.cast(), &mut bytes) }, last_error());
            // SAFETY: NULL is an error.
            let nowhere = unsafe { scratch(handle.cast(), args.cast(), std::ptr::null_mut()) };
            assert_eq!(nowhere, VWD_ERROR_INVALID_ARGUMENT);
            let status = invoke(handle, args, stream);
            if stream.is_null() {
                assert_eq!(told, status, "its scratch: {words}");
                assert!(told == VWD_OK || words == last_error(), "its scratch: {words}");
                assert_eq!(bytes, if told == VWD_OK { 0 } else { UNTOUCHED }, "scratch of a CPU session");
            }
            status
        });
    }

    /// Address of a field of the argument struct.
    pub fn address<T>(&mut self, offset: usize) -> *mut T {
        self.args.as_mut_ptr().cast::<u8>().wrapping_add(offset).cast()
    }

    // --- description ---------------------------------------------------------------------------------------------

    pub fn input(&mut self, name: &'static str, offset: usize, dtype: DType, shape: &'static str) -> &mut Field<'b> {
        let at = self.address(offset);
        self.field(name, at, Role::In, dtype, shape)
    }

    pub fn output(&mut self, name: &'static str, offset: usize, dtype: DType, shape: &'static str) -> &mut Field<'b> {
        let at = self.address(offset);
        self.field(name, at, Role::Out, dtype, shape)
    }

    /// A tensor at any address: in the argument struct, or in a host array that it points to.
    pub fn field(
        &mut self,
        name: &'static str,
        at: *mut vwd_tensor,
        role: Role,
        dtype: DType,
        shape: &'static str,
    ) -> &mut Field<'b> {
        let symbols: Vec<&'static str> = shape.split_whitespace().collect();
        let extents: Vec<usize> = symbols.iter().map(|s| self.sizes[s.trim_end_matches('?')]).collect();
        let poison = vec![0xfb; ROOM];
        let memory = self.backend.place(&poison);
        let mut tensor = absent();
        let (device_type, device_id) = self.backend.device();
        (tensor.device_type, tensor.device_id, tensor.lanes) = (device_type, device_id, 1);
        (tensor.dtype_code, tensor.dtype_bits) = (dtype.code, dtype.bits);
        tensor.data = memory.address() as *mut c_void;
        tensor.ndim = extents.len() as i32;
        let mut stride = 1;
        for d in (0..extents.len()).rev() {
            (tensor.shape[d], tensor.strides[d]) = (extents[d] as i64, stride);
            stride *= extents[d] as i64;
        }
        assert!(stride as usize * dtype.bytes() <= ROOM, "{name} needs more room");
        // SAFETY: `at` lies in the argument struct or in an array of tensors.
        unsafe { at.write(tensor) };
        let (optional, any_dtype, pair) = (false, false, None);
        let field = Field { name, role, optional, shape: symbols, any_dtype, pair, at, memory, before: poison };
        self.fields.push(field);
        self.fields.last_mut().unwrap()
    }

    /// A number that is set to `value` and must not be any of `bad`.
    pub fn scalar(&mut self, name: &'static str, offset: usize, value: u32, bad: &[u32]) {
        let at = self.address::<u32>(offset);
        // SAFETY: a u32 or f32 field of the argument struct.
        unsafe { at.write(value) };
        self.scalars.push((name, at, bad.to_vec()));
    }

    pub fn float(&mut self, name: &'static str, offset: usize, value: f32, bad: &[f32]) {
        self.scalar(name, offset, value.to_bits(), &bad.iter().map(|x| x.to_bits()).collect::<Vec<u32>>());
    }

    /// A struct that the arguments point to: its base, to which the offsets of its fields are added.
    pub fn nested<T: Versioned>(&mut self, names: [&'static str; 3], offset: usize) -> usize {
        let nested = args::<T>();
        let place: *mut T = Box::leak(Box::new(nested));
        self.array(names[0], offset, place.cast_const());
        let base = (place as usize).wrapping_sub(self.args.as_ptr() as usize);
        let size = size_of::<T>() as u32;
        self.scalar(names[1], base, size, &[0, 4, size - 1, u32::MAX]);
        self.scalar(names[2], base + size_of::<u32>(), 0, &[1, 1 << 31]);
        base
    }

    /// A pointer to a host array that outlives the call.
    pub fn array<T>(&mut self, name: &'static str, offset: usize, array: *const T) {
        let at = self.address::<*const c_void>(offset);
        // SAFETY: a pointer field of the argument struct.
        unsafe { at.write(array.cast()) };
        self.arrays.push((name, at));
    }

    pub fn may_overlap(&mut self, a: &'static str, b: &'static str) {
        self.may_overlap.push([a, b]);
    }

    /// A tensor that must not be given.
    pub fn refused(&mut self, name: &'static str, offset: usize) {
        let at = self.address(offset);
        self.refused.push((name, at));
    }

    /// A pointer that need not be given.
    pub fn may_be_null(&mut self, name: &str) {
        self.arrays.retain(|array| array.0 != name);
    }

    /// No earlier version of the struct can describe the call.
    pub fn is_new_to_its_struct(&mut self) {
        self.is_new = true;
    }

    /// The parameter that is the struct has this name.
    pub fn args_are_called(&mut self, name: &'static str) {
        self.args_name = name;
    }

    /// The struct is this member of an array of such structs.
    pub fn args_are_a_member(&mut self, name: &'static str) {
        self.args_name = name;
        self.prefix = format!("{name}.");
    }

    pub fn takes_no_stream(&mut self) {
        self.takes_stream = false;
    }

    // --- rows ----------------------------------------------------------------------------------------------------

    /// The call as it stands, over poisoned outputs.
    fn invoke(&self) -> vwd_status {
        self.invoke_with(self.handle.1, self.args.as_ptr().cast(), self.backend.stream())
    }

    fn invoke_with(&self, handle: *const c_void, args: *const c_void, stream: vwd_stream) -> vwd_status {
        for field in self.fields.iter().filter(|field| field.role == Role::Out) {
            field.memory.write(&field.before);
        }
        (self.invoke)(handle, args, stream)
    }

    /// Runs every row; the rows that failed, in words, and how many there were.
    pub fn run(mut self) -> (Vec<String>, usize) {
        let mut table = Table { call: self.name, rows: 0, failures: vec![] };
        let accepted = self.invoke();
        assert_eq!(accepted, VWD_OK, "{}: the arguments to start from: {}", self.name, last_error());
        self.pointers(&mut table);
        self.struct_sizes(&mut table);
        self.scalar_rows(&mut table);
        for n in 0..self.fields.len() {
            self.tensor_rows(n, &mut table);
        }
        self.refused_rows(&mut table);
        self.overlap_rows(&mut table);
        let accepted = self.invoke();
        assert_eq!(accepted, VWD_OK, "{}: every row restores what it broke: {}", self.name, last_error());
        (table.failures, table.rows)
    }

    /// The call with something broken: it must name one of `names`, say what it expected, and write nothing.
    fn expect(&self, table: &mut Table, what: &str, names: &[&str], status: vwd_status) {
        let text = last_error();
        let parameters = [self.handle.0, "stream"];
        let begins_with = |name: &&str| {
            let is_whole = parameters.contains(name) || name.starts_with(self.args_name);
            let own = text.strip_prefix(if is_whole { "" } else { &self.prefix });
            own.and_then(|own| own.strip_prefix(name)).is_some_and(|rest| rest.starts_with([':', '.', '[', ' ']))
        };
        let written = self.fields.iter().find(|field| field.memory.read() != field.before);
        let wrong = match written {
            _ if status != VWD_ERROR_INVALID_ARGUMENT => format!("status {status}"),
            _ if !last_message().starts_with(&format!("{}: ", self.name)) => "does not name the call".into(),
            _ if !names.iter().any(begins_with) => format!("does not begin with any of {names:?}"),
            _ if !text.contains("; expected ") => "does not say what was expected".into(),
            Some(field) => format!("{} was written", field.name),
            None => return table.holds(),
        };
        table.fails(what, wrong);
    }

    /// The call as it stands must be accepted.
    fn expect_ok(&self, table: &mut Table, what: &str) {
        match self.invoke() {
            VWD_OK => table.holds(),
            status => table.fails(what, format!("status {status}")),
        }
    }

    fn pointers(&mut self, table: &mut Table) {
        let (args, stream) = (self.args.as_ptr().cast::<c_void>(), self.backend.stream());
        let status = self.invoke_with(std::ptr::null(), args, stream);
        self.expect(table, "no handle", &[self.handle.0], status);
        let status = self.invoke_with(self.handle.1, std::ptr::null(), stream);
        self.expect(table, "no arguments", &[self.args_name], status);
        let status = self.invoke_with(self.handle.1, args.wrapping_byte_add(1), stream);
        self.expect(table, "misaligned arguments", &[self.args_name], status);
        if self.takes_stream && !self.backend.is_cuda() {
            let status = self.invoke_with(self.handle.1, args, 64 as vwd_stream);
            self.expect(table, "a stream on a CPU session", &["stream"], status);
        }
        for (name, at) in self.arrays.clone() {
            // SAFETY: a pointer field of the argument struct.
            let valid = unsafe { at.replace(std::ptr::null()) };
            let status = self.invoke();
            self.expect(table, &format!("{name} NULL"), &[name], status);
            // SAFETY: as above.
            unsafe { at.write(valid.wrapping_byte_add(1)) };
            let status = self.invoke();
            self.expect(table, &format!("{name} misaligned"), &[name], status);
            // SAFETY: as above.
            unsafe { at.write(valid) };
        }
    }

    fn set_struct_size(&mut self, size: usize) {
        // SAFETY: every argument struct starts with its size.
        unsafe { self.address::<u32>(0).write(size as u32) };
    }

    fn struct_sizes(&mut self, table: &mut Table) {
        let full = self.args_size;
        let mut unknown = vec![0, 1, 4, full - 8, full - 1, (1 << 16) + 8, u32::MAX as usize];
        unknown.retain(|size| !self.known_sizes.contains(size));
        for size in unknown {
            self.set_struct_size(size);
            let status = self.invoke();
            let name = format!("{}.struct_size", self.args_name);
            self.expect(table, &format!("struct_size {size}"), &[&name], status);
        }
        // A later version's struct: accepted while what it adds is zero.
        self.set_struct_size(full + 16);
        self.expect_ok(table, "a larger struct with zeros");
        let last = full / 8 + 1;
        self.args[last] = 1 << 63;
        let status = self.invoke();
        self.expect(table, "a larger struct with a field set", &[self.args_name], status);
        self.args[last] = 0;
        // An earlier version's struct: what follows it is not read.
        let earlier = if self.is_new { &[] } else { self.known_sizes };
        for &size in earlier.iter().filter(|&&size| size < full) {
            let valid = self.args.clone();
            self.set_struct_size(size);
            // SAFETY: the argument struct's memory.
            unsafe { self.address::<u8>(size).write_bytes(0xfb, full - size) };
            self.expect_ok(table, &format!("struct_size {size} of an earlier version"));
            self.args.copy_from_slice(&valid);
        }
        self.set_struct_size(full);
    }

    fn scalar_rows(&mut self, table: &mut Table) {
        for (name, at, bad) in self.scalars.clone() {
            for value in bad {
                // SAFETY: a field of the argument struct.
                let valid = unsafe { at.replace(value) };
                let status = self.invoke();
                self.expect(table, &format!("{name} = {value:#x}"), &[name], status);
                // SAFETY: as above.
                unsafe { at.write(valid) };
            }
        }
    }

    fn tensor_rows(&mut self, n: usize, table: &mut Table) {
        let Field { name, at, optional, any_dtype, pair, ref shape, .. } = self.fields[n];
        let shape = shape.clone();
        // SAFETY: the field's place.
        let valid = unsafe { at.read() };
        // Arguments in which it may show, too, that this one does not fit them.
        let mut related = self.related(n, &shape);
        related.extend(pair);
        let mut expect = |what: String, names: &[&str], bad: vwd_tensor| {
            // SAFETY: the field's place.
            unsafe { at.write(bad) };
            let status = self.invoke();
            self.expect(table, &format!("{name}: {what}"), names, status);
            // SAFETY: as above.
            unsafe { at.write(valid) };
        };
        let own = &[name][..];
        let of_form = &[name, pair.unwrap_or(name)];
        if !optional {
            expect("NULL".into(), of_form, vwd_tensor { data: std::ptr::null_mut(), ..valid });
        }
        let names = if any_dtype { &related[..] } else { own };
        expect("float64".into(), names, vwd_tensor { dtype_code: 2, dtype_bits: 64, ..valid });
        expect("complex64".into(), names, vwd_tensor { dtype_code: 5, dtype_bits: 64, ..valid });
        expect("12 bits".into(), own, vwd_tensor { dtype_bits: 12, ..valid });
        expect("0 bits".into(), own, vwd_tensor { dtype_bits: 0, ..valid });
        expect("2 lanes".into(), own, vwd_tensor { lanes: 2, ..valid });
        expect("on a GPU".into(), own, vwd_tensor { device_type: 2, ..valid });
        expect("on device 7 of type 7".into(), own, vwd_tensor { device_type: 7, device_id: 7, ..valid });
        for ndim in [-1, 6, i32::MAX, i32::MIN] {
            expect(format!("ndim {ndim}"), of_form, vwd_tensor { ndim, ..valid });
        }
        for ndim in [valid.ndim - 1, valid.ndim + 1].into_iter().filter(|n| (0..=5).contains(n)) {
            let mut bad = vwd_tensor { ndim, ..valid };
            bad.shape[ndim.max(1) as usize - 1] = 2;
            expect(format!("rank {ndim}"), &related, bad);
        }
        for (d, symbol) in shape.iter().enumerate() {
            let with = |extent: i64| {
                let mut bad = valid;
                bad.shape[d] = extent;
                bad
            };
            for extent in [-1, i64::MIN, i64::MAX] {
                expect(format!("shape[{d}] = {extent}"), own, with(extent));
            }
            if !symbol.ends_with('?') {
                // Odd, so that it is no number of heads, nor of channels.
                for extent in [0, valid.shape[d] - 1, valid.shape[d] + 1, (1 << 20) + 1] {
                    expect(format!("shape[{d}] = {extent}"), &related, with(extent));
                }
            }
            // The stride of a single element is never taken.
            for stride in [i64::MAX, i64::MIN].into_iter().filter(|_| valid.shape[d] > 1) {
                let mut bad = valid;
                bad.strides[d] = stride;
                expect(format!("strides[{d}] = {stride}"), own, bad);
            }
        }
        let width = valid.dtype_bits as usize / 8;
        if width > 1 {
            let data = valid.data.wrapping_byte_add(width / 2);
            expect(format!("{} bytes off its alignment", width / 2), own, vwd_tensor { data, ..valid });
        }
    }

    fn refused_rows(&mut self, table: &mut Table) {
        // As good as any tensor that is given.
        let given = self.fields.first().map(|field| field.at);
        for (name, at) in self.refused.clone() {
            // SAFETY: fields of the argument struct.
            let absent = unsafe { at.replace(*given.expect("a call with tensors")) };
            let status = self.invoke();
            self.expect(table, &format!("{name} given"), &[name], status);
            // SAFETY: as above.
            unsafe { at.write(absent) };
        }
    }

    /// Names of the arguments whose shape depends on the same symbols.
    fn related(&self, n: usize, shape: &[&str]) -> Vec<&'static str> {
        let base = |symbol: &str| symbol.trim_end_matches('?').split(['+', '/']).next().unwrap().to_owned();
        let symbols: Vec<String> = shape.iter().map(|s| base(s)).collect();
        let mut names = vec![self.fields[n].name];
        names.extend(self.fields.iter().filter(|f| f.shape.iter().any(|s| symbols.contains(&base(s)))).map(|f| f.name));
        names
    }

    fn overlap_rows(&mut self, table: &mut Table) {
        for n in (0..self.fields.len()).filter(|&n| self.fields[n].role == Role::Out) {
            let (out, at) = (self.fields[n].name, self.fields[n].at);
            // SAFETY: the field's place.
            let valid = unsafe { at.read() };
            for other in (0..self.fields.len()).filter(|&other| other != n) {
                let other = &self.fields[other];
                if self.may_overlap.contains(&[out, other.name]) || self.may_overlap.contains(&[other.name, out]) {
                    continue;
                }
                // SAFETY: the fields' places.
                unsafe { at.write(vwd_tensor { data: (*other.at).data, ..valid }) };
                let status = self.invoke();
                self.expect(table, &format!("{out} in the memory of {}", other.name), &[out, other.name], status);
            }
            for d in (0..valid.ndim as usize).filter(|&d| valid.shape[d] > 1) {
                let mut bad = valid;
                bad.strides[d] = 0;
                // SAFETY: the field's place.
                unsafe { at.write(bad) };
                let status = self.invoke();
                self.expect(table, &format!("{out} with stride 0 in dimension {d}"), &[out], status);
            }
            // SAFETY: as above.
            unsafe { at.write(valid) };
        }
    }
}

impl Field<'_> {
    pub fn optional(&mut self) -> &mut Self {
        self.optional = true;
        self
    }

    pub fn any_dtype(&mut self) -> &mut Self {
        self.any_dtype = true;
        self
    }

    /// The other argument is given with this form of this one alone.
    pub fn goes_with(&mut self, other: &'static str) -> &mut Self {
        self.pair = Some(other);
        self
    }

    /// Fills the tensor (it is contiguous) with these int32 values.
    pub fn values(&mut self, values: &[i32]) -> &mut Self {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.before[..bytes.len()].copy_from_slice(&bytes);
        self.memory.write(&self.before);
        self
    }
}

struct Table {
    call: &'static str,
    rows: usize,
    failures: Vec<String>,
}

impl Table {
    fn holds(&mut self) {
        self.rows += 1;
    }

    fn fails(&mut self, what: &str, wrong: String) {
        self.rows += 1;
        self.failures.push(format!("{}, {what}: {wrong}; the last message is: {}", self.call, last_error()));
    }
}
