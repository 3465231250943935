//! Safetensors files: metadata and named tensors. A file is written whole or not at all, and checked against its size before a value
//! of it is read.

use crate::core::allocate::zeros;
use crate::core::files;
use crate::core::status::{Code, Error, Result};
use crate::core::text::any_of;
use safetensors::tensor::{Metadata, TensorInfo};
use std::fmt::{Display, Write as _};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;

/// A float32 tensor to be written.
#[derive(Clone)]
pub struct Floats<'a> {
    pub name: String,
    pub shape: Vec<usize>,
    /// All values in C order, in pieces.
    pub pieces: Vec<&'a [f32]>,
}

/// Replaces the file at `path`.
pub fn save(path: &str, metadata: &[(&str, String)], tensors: &[Floats]) -> Result<()> {
    files::replace(path, |file| write(file, metadata, tensors)).map_err(|error| io(path, error))
}

/// Writes the file. The crate's own writer orders the metadata at random; this function writes the same bytes for the same
/// contents.
fn write(file: &mut impl Write, metadata: &[(&str, String)], tensors: &[Floats]) -> std::io::Result<()> {
    let quoted = |text: &str| serde_json::to_string(text).expect("text is JSON");
    let fields: Vec<String> =
        metadata.iter().map(|(name, value)| format!("{}:{}", quoted(name), quoted(value))).collect();
    let mut header = format!(r#"{{"__metadata__":{{{}}}"#, fields.join(","));
    let mut end = 0;
    for Floats { name, shape, .. } in tensors {
        let start = end;
        end += shape.iter().product::<usize>() * size_of::<f32>();
        let shape: Vec<String> = shape.iter().map(usize::to_string).collect();
        let shape = shape.join(",");
        let entry = format!(r#","{name}":{{"dtype":"F32","shape":[{shape}],"data_offsets":[{start},{end}]}}"#);
        header.push_str(&entry);
    }
    header.push('}');
    let padded = header.len().next_multiple_of(8);
    write!(header, "{:1$}", "", padded - header.len()).expect("strings grow");
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    for value in tensors.iter().flat_map(|tensor| tensor.pieces.iter().copied().flatten()) {
        file.write_all(&value.to_le_bytes())?;
    }
    Ok(())
}

/// A file whose header was read and fits its size.
pub struct Reader<'p> {
    path: &'p str,
    file: File,
    header: Metadata,
    /// The offset in the file at which the tensors begin.
    data: u64,
}

impl Reader<'_> {
    pub fn open(path: &str) -> Result<Reader<'_>> {
        /// The longest header that the format allows.
        const LONGEST: u64 = 100_000_000;
        let (file, size) = files::open(path)
            .and_then(|file| file.metadata().map(|about| (file, about.len())))
            .map_err(|error| io(path, error))?;
        let read = |bytes: &mut [u8], at| file.read_exact_at(bytes, at).map_err(|error| io(path, error));
        let mut length = [0; 8];
        if size < 8 {
            return Err(io(path, format!("{size} bytes; expected a safetensors header")));
        }
        read(&mut length, 0)?;
        let length = u64::from_le_bytes(length);
        if length > LONGEST.min(size - 8) {
            return Err(io(path, format!("a header of {length} bytes; expected at most {}", LONGEST.min(size - 8))));
        }
        let mut text: Vec<u8> = zeros(length as usize, "the header of a safetensors file")?;
        read(&mut text, 8)?;
        let header: Metadata =
            serde_json::from_slice(&text).map_err(|error| io(path, format!("no safetensors header: {error}")))?;
        let (data, described) = (8 + length, header.data_len() as u64);
        if size - data != described {
            let found = format!("{} bytes of tensors", size - data);
            return Err(io(path, format!("{found}; expected {described}, as the header says")));
        }
        Ok(Reader { path, file, header, data })
    }

    // --- metadata ------------------------------------------------------------------------------------------------

    /// A field of the metadata; "nothing" if there is none.
    pub fn field(&self, name: &str) -> &str {
        let metadata = self.header.metadata().as_ref();
        metadata.and_then(|metadata| metadata.get(name)).map_or("nothing", String::as_str)
    }

    pub fn one_of(&self, name: &str, known: &[&str]) -> Result<&str> {
        match self.field(name) {
            found if known.contains(&found) => Ok(found),
            found => Err(self.refuse_field(name, found, any_of(known))),
        }
    }

    pub fn number(&self, name: &str) -> Result<usize> {
        let text = self.field(name);
        text.parse().map_err(|_| self.refuse_field(name, text, "a number"))
    }

    pub fn refuse_field(&self, name: &str, found: &str, expected: impl Display) -> Error {
        io(self.path, format!("metadata {name:?} is {found:?}; expected {expected}"))
    }

    // --- tensors -------------------------------------------------------------------------------------------------

    /// The number of tensors.
    pub fn count(&self) -> usize {
        self.header.offset_keys().len()
    }

    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.header.info(name)
    }

    /// Bytes of a tensor from `offset` on.
    pub fn read(&self, info: &TensorInfo, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let at = self.data + (info.data_offsets.0 + offset) as u64;
        self.file.read_exact_at(bytes, at).map_err(|error| io(self.path, error))
    }

    pub fn refuse(&self, name: &str, found: impl Display, expected: impl Display) -> Error {
        io(self.path, format!("{name}: {found}; expected {expected}"))
    }

    /// A file whose parts fit the format, but not each other.
    pub fn refuse_file(&self, found: impl Display, expected: impl Display) -> Error {
        io(self.path, format!("{found}; expected {expected}"))
    }
}

fn io(path: &str, what: impl Display) -> Error {
    Error::new(Code::Io, format!("{path}: {what}"))
}
