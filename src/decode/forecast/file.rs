//! Maps in a safetensors file; docs/forecast.md gives the format.

use super::map::{Map, Matrix};
use super::{DEFAULT_RIDGE, Shape};
use crate::core::allocate::zeros;
use crate::core::status::{Error, Result};
use crate::decode::tensor_file::{self, Floats, Reader};
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
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
    let tensors: Vec<Floats> = maps.iter().flatten().enumerate().flat_map(|(layer, map)| tensors(layer, map)).collect();
    let Shape { flags, layers, input_dim, q_heads, head_dim } = shape;
    let [.., version] = VERSIONS;
    let metadata = [
        ("format", FORMAT.to_owned()),
        ("version", version.to_owned()),
        ("flags", flags.to_string()),
        ("layers", layers.to_string()),
        ("input_dim", input_dim.to_string()),
        ("q_heads", q_heads.to_string()),
        ("head_dim", head_dim.to_string()),
        ("ridge", ridge.to_string()),
    ];
    tensor_file::save(path, &metadata, &tensors)
}

/// A map's tensors.
fn tensors(layer: usize, map: &Map) -> Vec<Floats<'_>> {
    let parts: Vec<(&str, &Matrix)> = match map {
        Map::FullRank(weight) => vec![("weight", weight)],
        Map::LowRank { down, up } => vec![("down", down), ("up", up)],
    };
    parts
        .into_iter()
        .map(|(part, matrix)| {
            let (name, shape) = (format!("layer.{layer}.{part}"), vec![matrix.rows, matrix.columns]);
            Floats { name, shape, pieces: (0..matrix.rows).map(|i| matrix.row(i)).collect() }
        })
        .collect()
}

// --- load ------------------------------------------------------------------------------------------------------------

pub fn load(path: &str) -> Result<(Shape, f32, Maps)> {
    let reader = Reader::open(path)?;
    let (shape, ridge) = metadata(&reader)?;
    // The whole header is checked before the first value is read.
    let layers = (0..shape.layers).map(|layer| parts(&reader, layer, &shape)).collect::<Result<Vec<_>>>()?;
    let count = reader.count();
    let used: usize = layers.iter().map(Vec::len).sum();
    if count != used {
        return Err(reader.refuse_file(format!("{count} tensors"), used));
    }
    let maps = layers.iter().map(|parts| Ok(Some(Arc::new(map(&reader, parts)?)))).collect::<Result<Maps>>()?;
    Ok((shape, ridge, maps))
}

/// The shape and ridge of the maps, from the metadata.
fn metadata(reader: &Reader) -> Result<(Shape, f32)> {
    reader.one_of("format", &[FORMAT])?;
    let version = reader.one_of("version", &VERSIONS)?;
    let shape = Shape {
        flags: if version == VERSIONS[0] { 0 } else { reader.number("flags")? },
        layers: reader.number("layers")?,
        input_dim: reader.number("input_dim")?,
        q_heads: reader.number("q_heads")?,
        head_dim: reader.number("head_dim")?,
    };
    let shape = shape.checked(|name, value, expected| reader.refuse_field(name, &value.to_string(), expected))?;
    let ridge = match reader.field("ridge") {
        "nothing" => DEFAULT_RIDGE,
        text => match text.parse::<f32>() {
            Ok(ridge) if ridge > 0.0 && ridge.is_finite() => ridge,
            _ => return Err(reader.refuse_field("ridge", text, "a number above 0")),
        },
    };
    Ok((shape, ridge))
}

/// A tensor of the file whose shape and dtype fit the maps.
struct Part<'h> {
    name: String,
    info: &'h TensorInfo,
    rows: usize,
    columns: usize,
    row_bytes: usize,
}

/// The tensors of a layer: one, or two if its map has low rank.
fn parts<'r>(reader: &'r Reader, layer: usize, shape: &Shape) -> Result<Vec<Part<'r>>> {
    let (inputs, outputs) = (shape.inputs(), shape.outputs());
    let name = |part: &str| format!("layer.{layer}.{part}");
    let Some(down) = reader.info(&name("down")) else {
        return Ok(vec![part(reader, name("weight"), outputs, inputs)?]);
    };
    let rank = down.shape.first().copied().unwrap_or(0);
    if rank == 0 || rank > inputs.min(outputs) {
        let expected = format!("a rank of 1 to {}", inputs.min(outputs));
        return Err(reader.refuse(&name("down"), format!("shape {:?}", down.shape), expected));
    }
    Ok(vec![part(reader, name("down"), rank, inputs)?, part(reader, name("up"), outputs, rank)?])
}

fn part<'r>(reader: &'r Reader, name: String, rows: usize, columns: usize) -> Result<Part<'r>> {
    let Some(info) = reader.info(&name) else {
        return Err(reader.refuse(&name, "no such tensor", "every layer's map"));
    };
    if info.shape != [rows, columns] {
        return Err(reader.refuse(&name, format!("shape {:?}", info.shape), format!("[{rows}, {columns}]")));
    }
    let width = match info.dtype {
        Dtype::F32 => 4,
        Dtype::F16 | Dtype::BF16 => 2,
        other => return Err(reader.refuse(&name, format!("dtype {other}"), "F32, F16 or BF16")),
    };
    Ok(Part { name, info, rows, columns, row_bytes: columns * width })
}

fn map(reader: &Reader, parts: &[Part]) -> Result<Map> {
    match parts {
        [down, up] => Ok(Map::LowRank { down: matrix(reader, down)?, up: matrix(reader, up)? }),
        _ => Ok(Map::FullRank(matrix(reader, &parts[0])?)),
    }
}

fn matrix(reader: &Reader, part: &Part) -> Result<Matrix> {
    /// The number of bytes that are read at once.
    const PIECE: usize = 1 << 20;
    let Part { info, rows, columns, row_bytes, .. } = *part;
    let mut matrix = Matrix::zeros(rows, columns)?;
    let together = (PIECE / row_bytes).clamp(1, rows);
    let mut piece: Vec<u8> = zeros(together * row_bytes, "a piece of a forecast's file")?;
    for first in (0..rows).step_by(together) {
        let piece = &mut piece[..together.min(rows - first) * row_bytes];
        reader.read(info, first * row_bytes, piece)?;
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
        Err(reader.refuse(&part.name, "a value is not finite", "finite values"))
    }
}

fn decode<'a, const N: usize>(to: impl Iterator<Item = &'a mut f32>, from: &[u8], read: impl Fn([u8; N]) -> f32) {
    to.zip(from.as_chunks::<N>().0).for_each(|(value, &bytes)| *value = read(bytes));
}
