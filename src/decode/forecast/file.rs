//! Maps in a safetensors file; docs/forecast.md has the format.

use super::map::{Map, Matrix};
use super::{DEFAULT_RIDGE, Shape};
use crate::core::status::{Code, Error, Result};
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use std::fmt::{Display, Write as _};
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const FORMAT: &str = "vanward.forecast";
const VERSION: &str = "1";

type Maps = Vec<Option<Arc<Map>>>;

// --- save ------------------------------------------------------------------------------------------------------------

pub fn save(path: &str, shape: &Shape, ridge: f32, maps: &Maps) -> Result<()> {
    if let Some(layer) = maps.iter().position(Option::is_none) {
        return Err(Error::argument("forecast", format!("layer {layer} has no map"), "every layer solved or loaded"));
    }
    let tensors = maps.iter().flatten().enumerate().flat_map(|(layer, map)| tensors(layer, map));
    replace(path, |file| write(file, shape, ridge, tensors)).map_err(|error| io(path, error))
}

/// Names and values of a map.
fn tensors(layer: usize, map: &Map) -> Vec<(String, &Matrix)> {
    match map {
        Map::Whole(weight) => vec![(format!("layer.{layer}.weight"), weight)],
        Map::Cut { down, up } => vec![(format!("layer.{layer}.down"), down), (format!("layer.{layer}.up"), up)],
    }
}

/// The crate's own writer orders the metadata at random; the same maps shall make the same bytes.
fn write<'a>(
    file: &mut impl Write,
    shape: &Shape,
    ridge: f32,
    tensors: impl Iterator<Item = (String, &'a Matrix)> + Clone,
) -> std::io::Result<()> {
    let Shape { layers, input_dim, q_heads, head_dim } = shape;
    let mut header = format!(
        r#"{{"__metadata__":{{"format":"{FORMAT}","version":"{VERSION}","layers":"{layers}","input_dim":"{input_dim}","q_heads":"{q_heads}","head_dim":"{head_dim}","ridge":"{ridge}"}}"#
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

/// Writes a file beside `path` and renames it, so that `path` is never half written.
fn replace(path: &str, write: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>) -> std::io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let beside = format!("{path}.{}-{}.tmp", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let file = OpenOptions::new().write(true).create_new(true).open(&beside)?;
    let mut buffer = BufWriter::with_capacity(1 << 20, file);
    let outcome = write(&mut buffer)
        .and_then(|()| buffer.into_inner().map_err(|error| error.into_error()))
        .and_then(|file| file.sync_all())
        .and_then(|()| std::fs::rename(&beside, path));
    if outcome.is_err() {
        // The first error is the one to tell.
        let _ = std::fs::remove_file(&beside);
    }
    outcome
}

// --- load ------------------------------------------------------------------------------------------------------------

pub fn load(path: &str) -> Result<(Shape, f32, Maps)> {
    let bytes = read(path)?;
    let file = SafeTensors::deserialize(&bytes).map_err(|error| io(path, error))?;
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|error| io(path, error))?;
    let metadata = header.metadata().as_ref();
    let field = |name: &str| metadata.and_then(|metadata| metadata.get(name)).map(String::as_str);
    for (name, expected) in [("format", FORMAT), ("version", VERSION)] {
        if field(name) != Some(expected) {
            let found = field(name).unwrap_or("nothing");
            return Err(io(path, format!("metadata {name:?} is {found:?}; expected {expected:?}")));
        }
    }
    let number = |name: &str| -> Result<usize> {
        let text = field(name).unwrap_or("nothing");
        text.parse().map_err(|_| io(path, format!("metadata {name:?} is {text:?}; expected a number")))
    };
    let shape = Shape {
        layers: number("layers")?,
        input_dim: number("input_dim")?,
        q_heads: number("q_heads")?,
        head_dim: number("head_dim")?,
    };
    let shape = shape
        .checked(|name, value, expected| io(path, format!("metadata {name:?} is {value}; expected {expected}")))?;
    let ridge = match field("ridge") {
        None => DEFAULT_RIDGE,
        Some(text) => match text.parse::<f32>() {
            Ok(ridge) if ridge > 0.0 && ridge.is_finite() => ridge,
            _ => return Err(io(path, format!("metadata \"ridge\" is {text:?}; expected a number above 0"))),
        },
    };
    // One tensor a layer at least: a file that promises more layers than it has tensors ends here.
    let mut maps = Maps::new();
    let mut used = 0;
    for layer in 0..shape.layers {
        let map = load_map(&file, layer, &shape).map_err(|error| match error.code {
            Code::OutOfMemory => error,
            _ => io(path, error),
        })?;
        used += if map.rank() == 0 { 1 } else { 2 };
        maps.push(Some(Arc::new(map)));
    }
    if used != file.len() {
        return Err(io(path, format!("{} tensors; expected {used}", file.len())));
    }
    Ok((shape, ridge, maps))
}

fn load_map(file: &SafeTensors, layer: usize, shape: &Shape) -> Result<Map> {
    let (inputs, outputs) = (shape.inputs(), shape.outputs());
    let name = |part: &str| format!("layer.{layer}.{part}");
    let Ok(down) = file.tensor(&name("down")) else {
        return Ok(Map::Whole(load_matrix(file, &name("weight"), outputs, inputs)?));
    };
    let rank = down.shape().first().copied().unwrap_or(0);
    if rank == 0 || rank > inputs.min(outputs) {
        let expected = format!("a rank of 1 to {}", inputs.min(outputs));
        return Err(Error::argument(&name("down"), format!("shape {:?}", down.shape()), expected));
    }
    let down = load_matrix(file, &name("down"), rank, inputs)?;
    Ok(Map::Cut { down, up: load_matrix(file, &name("up"), outputs, rank)? })
}

fn load_matrix(file: &SafeTensors, name: &str, rows: usize, columns: usize) -> Result<Matrix> {
    let tensor = file.tensor(name).map_err(|_| Error::argument(name, "no such tensor", "every layer's map"))?;
    if tensor.shape() != [rows, columns] {
        return Err(Error::argument(name, format!("shape {:?}", tensor.shape()), format!("[{rows}, {columns}]")));
    }
    let width = match tensor.dtype() {
        Dtype::F32 => 4,
        Dtype::F16 | Dtype::BF16 => 2,
        other => return Err(Error::argument(name, format!("dtype {other}"), "F32, F16 or BF16")),
    };
    let mut matrix = Matrix::zeros(rows, columns)?;
    for (i, row) in tensor.data().chunks_exact(columns * width).enumerate() {
        let values = matrix.row_mut(i).iter_mut();
        match tensor.dtype() {
            Dtype::F16 => decode(values, row, |bytes| f16::from_le_bytes(bytes).to_f32()),
            Dtype::BF16 => decode(values, row, |bytes| bf16::from_le_bytes(bytes).to_f32()),
            _ => decode(values, row, f32::from_le_bytes),
        }
    }
    if matrix.is_finite() { Ok(matrix) } else { Err(Error::argument(name, "a value is not finite", "finite values")) }
}

fn decode<'a, const N: usize>(to: impl Iterator<Item = &'a mut f32>, from: &[u8], read: impl Fn([u8; N]) -> f32) {
    to.zip(from.as_chunks::<N>().0).for_each(|(value, &bytes)| *value = read(bytes));
}

fn read(path: &str) -> Result<Vec<u8>> {
    let open = || -> std::io::Result<(File, u64)> {
        let file = File::open(path)?;
        let about = file.metadata()?;
        if !about.is_file() {
            return Err(std::io::Error::other("not a regular file"));
        }
        Ok((file, about.len()))
    };
    let (file, length) = open().map_err(|error| io(path, error))?;
    let mut bytes = Vec::new();
    let size = usize::try_from(length).unwrap_or(usize::MAX);
    bytes.try_reserve_exact(size).map_err(|_| Error::out_of_memory(size, "a forecast's file"))?;
    file.take(length).read_to_end(&mut bytes).map_err(|error| io(path, error))?;
    Ok(bytes)
}

fn io(path: &str, what: impl Display) -> Error {
    Error::new(Code::Io, format!("{path}: {what}"))
}
