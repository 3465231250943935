//! Maps in a safetensors file; docs/forecast.md gives the format.

use super::map::{Map, Matrix};
use super::replace::{open, replace};
use super::{DEFAULT_RIDGE, Shape};
use crate::core::allocate::zeros;
use crate::core::status::{Code, Error, Result};
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use std::fmt::{Display, Write as _};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

const FORMAT: &str = "vanward.forecast";
/// The format's versions. Version 1 has no flags.
const VERSIONS: [&str; 2] = ["1", "2"];

type Maps = Vec<Option<Arc<Map>>>;

// --- save ------------------------------------------------------------------------------------------------------------

pub fn save(path: &str, shape: &Shape, ridge: f32, maps: &Maps) -> Result<()> {
    if let Some(layer) = maps.iter().position(Option::is_none) {
        return Err(Error::argument("forecast", format!("layer {layer} has no map"), "every layer solved or loaded"));
    }
    let tensors = maps.iter().flatten().enumerate().flat_map(|(layer, map)| tensors(layer, map));
    replace(path, |file| write(file, shape, ridge, tensors)).map_err(|error| io(path, error))
}

/// The names and matrices of a map's tensors.
fn tensors(layer: usize, map: &Map) -> Vec<(String, &Matrix)> {
    match map {
        Map::FullRank(weight) => vec![(format!("layer.{layer}.weight"), weight)],
        Map::LowRank { down, up } => vec![(format!("layer.{layer}.down"), down), (format!("layer.{layer}.up"), up)],
    }
}

/// Writes the file. The crate's own writer orders the metadata at random; this function writes the same bytes for the same
/// maps.
fn write<'a>(
    file: &mut impl Write,
    shape: &Shape,
    ridge: f32,
    tensors: impl Iterator<Item = (String, &'a Matrix)> + Clone,
) -> std::io::Result<()> {
    let Shape { flags, layers, input_dim, q_heads, head_dim } = shape;
    let [.., version] = VERSIONS;
    let mut header = format!(
        r#"{{"__metadata__":{{"format":"{FORMAT}","version":"{version}","flags":"{flags}","layers":"{layers}","input_dim":"{input_dim}","q_heads":"{q_heads}","head_dim":"{head_dim}","ridge":"{ridge}"}}"#
    );
    let mut end = 0;
    for (name, Matrix { rows, columns, .. }) in tensors.clone() {
        let start = end;
        end += rows * columns * 4;
        let entry = format!(r#","{name}":{{"dtype":"F32","shape":[{rows},{columns}],"data_offsets":[{start},{end}]}}"#);
        header.push_str(&entry);
    }
    header.push('}');
    let padded = header.len().next_multiple_of(8);
    write!(header, "{:1$}", "", padded - header.len()).expect("strings grow");
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    for (_, matrix) in tensors {
        for value in (0..matrix.rows).flat_map(|i| matrix.row(i)) {
            file.write_all(&value.to_le_bytes())?;
        }
    }
    Ok(())
}

// --- load ------------------------------------------------------------------------------------------------------------

pub fn load(path: &str) -> Result<(Shape, f32, Maps)> {
    let reader = Reader::open(path)?;
    let (shape, ridge) = reader.metadata()?;
    // The whole header is checked before the first value is read.
    let layers = (0..shape.layers).map(|layer| reader.parts(layer, &shape)).collect::<Result<Vec<_>>>()?;
    let count = reader.header.offset_keys().len();
    let used: usize = layers.iter().map(Vec::len).sum();
    if count != used {
        return Err(io(path, format!("{count} tensors; expected {used}")));
    }
    let maps = layers.iter().map(|parts| Ok(Some(Arc::new(reader.map(parts)?)))).collect::<Result<Maps>>()?;
    Ok((shape, ridge, maps))
}

/// A file whose header was read and fits its size.
struct Reader<'p> {
    path: &'p str,
    file: File,
    header: Metadata,
    /// The offset in the file at which the tensors begin.
    data: u64,
}

impl Reader<'_> {
    fn open(path: &str) -> Result<Reader<'_>> {
        /// The longest header that the format allows.
        const LONGEST: u64 = 100_000_000;
        let (file, size) = open(path)
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
        let mut text: Vec<u8> = zeros(length as usize, "a forecast file's header")?;
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

    /// The shape and ridge of the maps, from the metadata.
    fn metadata(&self) -> Result<(Shape, f32)> {
        let metadata = self.header.metadata().as_ref();
        let field = |name: &str| metadata.and_then(|metadata| metadata.get(name)).map_or("nothing", String::as_str);
        let refuse = |name: &str, found: &str, expected: &str| {
            io(self.path, format!("metadata {name:?} is {found:?}; expected {expected}"))
        };
        let one_of = |name: &str, known: &[&str]| match field(name) {
            found if known.contains(&found) => Ok(found),
            found => Err(refuse(name, found, &known.join(" or "))),
        };
        one_of("format", &[FORMAT])?;
        let version = one_of("version", &VERSIONS)?;
        let number = |name: &str| -> Result<usize> {
            let text = field(name);
            text.parse().map_err(|_| refuse(name, text, "a number"))
        };
        let shape = Shape {
            flags: if version == VERSIONS[0] { 0 } else { number("flags")? },
            layers: number("layers")?,
            input_dim: number("input_dim")?,
            q_heads: number("q_heads")?,
            head_dim: number("head_dim")?,
        };
        let shape = shape.checked(|name, value, expected| refuse(name, &value.to_string(), &expected))?;
        let ridge = match field("ridge") {
            "nothing" => DEFAULT_RIDGE,
            text => match text.parse::<f32>() {
                Ok(ridge) if ridge > 0.0 && ridge.is_finite() => ridge,
                _ => return Err(refuse("ridge", text, "a number above 0")),
            },
        };
        Ok((shape, ridge))
    }

    /// The tensors of a layer: one, or two if its map has low rank.
    fn parts(&self, layer: usize, shape: &Shape) -> Result<Vec<Part<'_>>> {
        let (inputs, outputs) = (shape.inputs(), shape.outputs());
        let name = |part: &str| format!("layer.{layer}.{part}");
        let Some(down) = self.header.info(&name("down")) else {
            return Ok(vec![self.part(name("weight"), outputs, inputs)?]);
        };
        let rank = down.shape.first().copied().unwrap_or(0);
        if rank == 0 || rank > inputs.min(outputs) {
            let expected = format!("a rank of 1 to {}", inputs.min(outputs));
            return Err(self.refuse(&name("down"), format!("shape {:?}", down.shape), expected));
        }
        Ok(vec![self.part(name("down"), rank, inputs)?, self.part(name("up"), outputs, rank)?])
    }

    fn part(&self, name: String, rows: usize, columns: usize) -> Result<Part<'_>> {
        let Some(info) = self.header.info(&name) else {
            return Err(self.refuse(&name, "no such tensor", "every layer's map"));
        };
        if info.shape != [rows, columns] {
            return Err(self.refuse(&name, format!("shape {:?}", info.shape), format!("[{rows}, {columns}]")));
        }
        let width = match info.dtype {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::BF16 => 2,
            other => return Err(self.refuse(&name, format!("dtype {other}"), "F32, F16 or BF16")),
        };
        Ok(Part { name, info, rows, columns, row_bytes: columns * width })
    }

    fn map(&self, parts: &[Part]) -> Result<Map> {
        match parts {
            [down, up] => Ok(Map::LowRank { down: self.matrix(down)?, up: self.matrix(up)? }),
            _ => Ok(Map::FullRank(self.matrix(&parts[0])?)),
        }
    }

    fn matrix(&self, part: &Part) -> Result<Matrix> {
        /// The number of bytes that are read at once.
        const PIECE: usize = 1 << 20;
        let Part { info, rows, columns, row_bytes, .. } = *part;
        let mut matrix = Matrix::zeros(rows, columns)?;
        let together = (PIECE / row_bytes).clamp(1, rows);
        let mut piece: Vec<u8> = zeros(together * row_bytes, "a piece of a forecast's file")?;
        for first in (0..rows).step_by(together) {
            let piece = &mut piece[..together.min(rows - first) * row_bytes];
            let at = self.data + (info.data_offsets.0 + first * row_bytes) as u64;
            self.file.read_exact_at(piece, at).map_err(|error| io(self.path, error))?;
            for (i, row) in piece.chunks_exact(row_bytes).enumerate() {
                let values = matrix.row_mut(first + i).iter_mut();
                match info.dtype {
                    Dtype::F16 => decode(values, row, |bytes| f16::from_le_bytes(bytes).to_f32()),
                    Dtype::BF16 => decode(values, row, |bytes| bf16::from_le_bytes(bytes).to_f32()),
                    _ => decode(values, row, f32::from_le_bytes),
                }
            }
        }
        if matrix.is_finite() {
            Ok(matrix)
        } else {
            Err(self.refuse(&part.name, "a value is not finite", "finite values"))
        }
    }

    fn refuse(&self, name: &str, found: impl Display, expected: impl Display) -> Error {
        io(self.path, format!("{name}: {found}; expected {expected}"))
    }
}

/// A tensor of the file whose shape and dtype fit the maps.
struct Part<'h> {
    name: String,
    info: &'h TensorInfo,
    rows: usize,
    columns: usize,
    row_bytes: usize,
}

fn decode<'a, const N: usize>(to: impl Iterator<Item = &'a mut f32>, from: &[u8], read: impl Fn([u8; N]) -> f32) {
    to.zip(from.as_chunks::<N>().0).for_each(|(value, &bytes)| *value = read(bytes));
}

fn io(path: &str, what: impl Display) -> Error {
    Error::new(Code::Io, format!("{path}: {what}"))
}
