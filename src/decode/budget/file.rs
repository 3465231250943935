//! Budgets in a safetensors file; docs/budget.md gives the format.

use super::ask::ascending;
use super::costs::Costs;
use super::options::Shape;
use super::table::{Grid, Kind, MOST_DRAFT, MOST_RATIOS, MOST_SHARES, Table};
use crate::core::allocate::zeros;
use crate::core::status::{Error, Result};
use crate::decode::tensor_file::{self, Floats, Reader};
use safetensors::Dtype;

const FORMAT: &str = "vanward.budget";
const VERSION: &str = "3";
/// Versions whose times of strategies are absent, or those of launches.
const OLDER: [&str; 2] = ["1", "2"];
/// The most values of an axis of the grid.
const LONGEST_AXIS: usize = 64;

/// The names of the axes and their values.
fn axes(grid: &Grid) -> [(&'static str, &[f32]); 4] {
    [("contexts", &grid.contexts), ("batches", &grid.batches), ("ratios", &grid.ratios), ("missed", &grid.shares)]
}

pub fn save(path: &str, costs: &Costs) -> Result<()> {
    let Costs { shape, device, table } = costs;
    let grid = &table.grid;
    let floats = |name: &str, shape: Vec<usize>, values| Floats { name: name.to_owned(), shape, pieces: vec![values] };
    let mut tensors: Vec<Floats> =
        axes(grid).into_iter().map(|(name, values)| floats(name, vec![values.len()], values)).collect();
    for kind in Kind::ALL {
        let extents = [&grid.points()[..], &grid.inner(kind)].concat();
        tensors.push(floats(kind.name(), extents, &table.times[kind as usize]));
    }
    let mut metadata = vec![
        ("format", FORMAT.to_owned()),
        ("version", VERSION.to_owned()),
        ("library", env!("CARGO_PKG_VERSION").to_owned()),
        ("device", device.clone()),
        ("max_draft", grid.max_draft.to_string()),
    ];
    metadata.extend(shape.fields());
    let mut sum = Checksum::new();
    metadata.iter().for_each(|(_, value)| sum.add(value.as_bytes()));
    tensors.iter().flat_map(|tensor| &tensor.pieces).for_each(|piece| sum.add_floats(piece));
    metadata.push(("checksum", sum.text()));
    tensor_file::save(path, &metadata, &tensors)
}

/// The table of a file that was measured for this shape on this device.
pub fn load(path: &str, shape: &Shape, device: &str) -> Result<Table> {
    let reader = Reader::open(path)?;
    reader.one_of("format", &[FORMAT])?;
    let version = reader.field("version");
    if OLDER.contains(&version) {
        let expected = format!("{VERSION}, which has times of each strategy in a graph: profile again");
        return Err(reader.refuse_field("version", version, expected));
    }
    reader.one_of("version", &[VERSION])?;
    let mut sum = Checksum::new();
    for name in ["format", "version", "library", "device", "max_draft"] {
        sum.add(reader.field(name).as_bytes());
    }
    for (name, _) in shape.fields() {
        sum.add(reader.field(name).as_bytes());
    }
    let max_draft = match reader.number("max_draft")? {
        n @ 1..=MOST_DRAFT => n,
        n => return Err(reader.refuse_field("max_draft", &n.to_string(), format!("1 to {MOST_DRAFT}"))),
    };
    let mut axis = |name: &str, most: usize| -> Result<Vec<f32>> {
        let count = match reader.info(name).map(|info| &info.shape[..]) {
            Some(&[count]) if (1..=most).contains(&count) => count,
            Some(other) => return Err(reader.refuse(name, format!("shape {other:?}"), format!("[1 to {most}]"))),
            None => return Err(reader.refuse(name, "no such tensor", "a grid")),
        };
        values(&reader, &mut sum, name, &[count])
    };
    let grid = Grid {
        contexts: axis("contexts", LONGEST_AXIS)?,
        batches: axis("batches", LONGEST_AXIS)?,
        ratios: axis("ratios", MOST_RATIOS)?,
        shares: axis("missed", MOST_SHARES)?,
        max_draft,
    };
    let mut times = [const { Vec::new() }; Kind::COUNT];
    for kind in Kind::ALL {
        let extents = [&grid.points()[..], &grid.inner(kind)].concat();
        times[kind as usize] = values(&reader, &mut sum, kind.name(), &extents)?;
    }
    let expected = axes(&grid).len() + Kind::ALL.len();
    if reader.count() != expected {
        return Err(reader.refuse_file(format!("{} tensors", reader.count()), expected));
    }
    if reader.field("checksum") != sum.text() {
        let expected = format!("{:?}, the checksum of what is in the file", sum.text());
        return Err(reader.refuse_field("checksum", reader.field("checksum"), expected));
    }
    let table = Table { grid, times };
    check(&reader, &table)?;
    // The file is sound; is it of the caller's shape?
    for (name, found) in shape.fields() {
        let measured = reader.field(name);
        if measured != found {
            let expected = format!("{measured}, with which {path} was measured");
            return Err(Error::argument(&format!("options.{name}"), found, expected));
        }
    }
    if reader.field("device") != device {
        let expected = format!("{}, on which {path} was measured", reader.field("device"));
        return Err(Error::argument("session", device, expected));
    }
    Ok(table)
}

/// Checks that axes ascend and times are above 0.
fn check(reader: &Reader, table: &Table) -> Result<()> {
    for (name, values) in axes(&table.grid) {
        // The share of missed blocks begins at 0, where a list would end.
        let (values, least) = if name == "missed" { (&values[1..], f32::MIN_POSITIVE) } else { (values, 1.0) };
        if ascending(name, values, least).map(<[f32]>::len).ok() != Some(values.len()) {
            return Err(reader.refuse(name, format!("{values:?}"), format!("ascending values from {least} on")));
        }
    }
    let Grid { ratios, shares, .. } = &table.grid;
    if ratios[0] != 1.0 {
        return Err(reader.refuse("ratios", format!("{} first", ratios[0]), 1));
    }
    if shares[0] != 0.0 || shares.last() != Some(&1.0) {
        return Err(reader.refuse("missed", format!("{shares:?}"), "0 … 1"));
    }
    for kind in Kind::ALL {
        let is_time = |time: &f32| *time > 0.0 && (time.is_finite() || kind.may_be_infinite());
        if !table.times[kind as usize].iter().all(is_time) {
            return Err(reader.refuse(kind.name(), "a time that is not above 0, or not finite", "microseconds"));
        }
    }
    Ok(())
}

/// The values of a tensor of float32.
fn values(reader: &Reader, sum: &mut Checksum, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
    let Some(info) = reader.info(name) else {
        return Err(reader.refuse(name, "no such tensor", "times"));
    };
    if info.shape != shape {
        return Err(reader.refuse(name, format!("shape {:?}", info.shape), format!("{shape:?}")));
    }
    if info.dtype != Dtype::F32 {
        return Err(reader.refuse(name, format!("dtype {}", info.dtype), "F32"));
    }
    let mut bytes: Vec<u8> = zeros(shape.iter().product::<usize>() * size_of::<f32>(), "a budget's file")?;
    reader.read(info, 0, &mut bytes)?;
    let values: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
    sum.add_floats(&values);
    Ok(values)
}

/// FNV-1a of 64 bits.
struct Checksum(u64);

impl Checksum {
    fn new() -> Checksum {
        Checksum(0xcbf29ce484222325)
    }

    /// The bytes and where they end.
    fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes.iter().chain(&[0]) {
            self.0 = (self.0 ^ byte as u64).wrapping_mul(0x100000001b3);
        }
    }

    fn add_floats(&mut self, values: &[f32]) {
        values.iter().for_each(|value| self.add(&value.to_le_bytes()));
    }

    fn text(&self) -> String {
        format!("{:016x}", self.0)
    }
}
