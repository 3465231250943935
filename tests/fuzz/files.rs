//! Files for `vwd_forecast_load`: saved ones with something changed, and what is no file at all.

use crate::check::{Lab, Verdict, processor_time};
use crate::forecasts::Forecast;
use crate::support::*;
use serde_json::Value;
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::time::Duration;
use vanward::abi::*;
use vanward::capi::*;

/// Time of the processor that a load may take.
const MOST_TIME: Duration = Duration::from_secs(1);

/// What is loaded, and how it came to be, in words.
struct Made {
    path: PathBuf,
    words: String,
}

pub fn describe(seed: u64, folder: &Path) -> String {
    make(&mut Rng::new(seed), &Session::cpu(1), folder).words
}

/// Makes a file in `folder`, and leaves nothing there.
pub fn check(lab: &Lab, seed: u64, folder: &Path) -> Result<Verdict, String> {
    let folder = folder.join("files");
    std::fs::create_dir(&folder).expect("a folder for the file");
    let verdict = check_in(&folder, lab, seed);
    std::fs::remove_dir_all(&folder).expect("the folder");
    verdict
}

fn check_in(folder: &Path, lab: &Lab, seed: u64) -> Result<Verdict, String> {
    let made = make(&mut Rng::new(seed), lab.session(), folder);
    let begin = processor_time();
    let loaded = load(lab.session(), &made.path);
    let took = processor_time() - begin;
    if took > MOST_TIME {
        return Err(format!("took {took:?}"));
    }
    match loaded {
        Ok(forecast) => survives(&forecast, lab.session(), folder),
        Err((VWD_ERROR_IO, text)) if text.starts_with(made.path.to_str().expect("UTF-8")) => Ok(Verdict::Refused),
        Err((VWD_ERROR_INVALID_ARGUMENT, text)) if text.contains("; expected ") => Ok(Verdict::Refused),
        Err((status, text)) => Err(format!("status {status}: {text}")),
    }
}

fn load(session: &Session, path: &Path) -> Result<Forecast, (vwd_status, String)> {
    let path = CString::new(path.to_str().expect("UTF-8")).expect("no NUL");
    let mut forecast = null_mut();
    // SAFETY: all pointers are valid.
    match unsafe { vwd_forecast_load(session.raw(), path.as_ptr(), &mut forecast) } {
        VWD_OK => Ok(Forecast(forecast)),
        status => Err((status, last_error())),
    }
}

/// What was loaded projects, and projects the same once saved and loaded again.
fn survives(forecast: &Forecast, session: &Session, folder: &Path) -> Result<Verdict, String> {
    let details = forecast.details();
    let again = folder.join("again");
    let path = CString::new(again.to_str().expect("UTF-8")).expect("no NUL");
    // SAFETY: the handle is live, and the path a string.
    let status = unsafe { vwd_forecast_save(forecast.0, path.as_ptr()) };
    if status != VWD_OK {
        return Err(format!("loaded but not saved: status {status}: {}", last_error()));
    }
    let again = load(session, &again).map_err(|(status, text)| format!("not loaded again: status {status}: {text}"))?;
    let differs = |&layer: &u32| forecast.project(layer, 1) != again.project(layer, 1);
    match (0..details.layers).find(differs) {
        Some(layer) => Err(format!("layer {layer} projects differently once saved and loaded")),
        None => Ok(Verdict::Worked),
    }
}

// --- files -----------------------------------------------------------------------------------------------------------

fn make(rng: &mut Rng, session: &Session, folder: &Path) -> Made {
    let path = folder.join("forecast");
    if rng.one_in(16) {
        let words = no_file(rng, &path).into();
        return Made { path, words };
    }
    let mut words = vec![saved(rng, session, &path)];
    let mut bytes = std::fs::read(&path).expect("what was saved");
    for _ in 0..rng.pick(&[0, 0, 1, 1, 2]) {
        words.push(match rng.size(0..=5) {
            0 => flip(rng, &mut bytes),
            1 => cut(rng, &mut bytes),
            2 => header_length(rng, &mut bytes),
            3 => other_type(rng, &mut bytes),
            _ => field(rng, &mut bytes),
        });
    }
    std::fs::write(&path, &bytes).expect("the file");
    if rng.one_in(12) {
        let length = rng.pick(&[1 << 20, 3 << 30, 1 << 40]);
        let file = std::fs::OpenOptions::new().write(true).open(&path).expect("the file");
        // Not every file system has such files.
        if file.set_len(length).is_ok() {
            words.push(format!("{length} bytes, of which the last are a hole"));
        }
    }
    Made { path, words: words.join("; ") }
}

/// A forecast's own file.
fn saved(rng: &mut Rng, session: &Session, path: &Path) -> String {
    let mut size = |most| rng.size(1..=most) as u32;
    let (layers, input_dim, q_heads, head_dim) = (size(3), size(12), size(3), size(8));
    let options = vwd_forecast_options { layers, input_dim, q_heads, head_dim, ..args() };
    let flags = rng.pick(&[0, VWD_FORECAST_MEMORY]);
    let forecast = Forecast::create(session, &vwd_forecast_options { flags, ..options })
        .or_else(|_| Forecast::create(session, &options))
        .unwrap_or_else(|status| panic!("status {status}: {}", last_error()));
    let most = (input_dim + 1).min(q_heads * head_dim) as usize;
    for layer in 0..layers {
        forecast.accumulate(layer, layer as u64);
        // Each layer has a rank of its own.
        assert_ok(forecast.solve(rng.size(0..=most) as u32));
    }
    let text = CString::new(path.to_str().expect("UTF-8")).expect("no NUL");
    // SAFETY: the handle is live, and the path a string.
    assert_ok(unsafe { vwd_forecast_save(forecast.0, text.as_ptr()) });
    format!("layers {layers}, input_dim {input_dim}, q_heads {q_heads}, head_dim {head_dim}, flags {flags}")
}

/// Something at the path that is no regular file.
fn no_file(rng: &mut Rng, path: &Path) -> &'static str {
    let link = |to: &str| std::os::unix::fs::symlink(to, path).expect("a link");
    match rng.size(0..=6) {
        0 => "nothing",
        1 => {
            std::fs::create_dir(path).expect("a folder");
            "a folder"
        }
        2 => {
            let text = CString::new(path.to_str().expect("UTF-8")).expect("no NUL");
            // SAFETY: the path is a string.
            assert_eq!(unsafe { libc::mkfifo(text.as_ptr(), 0o600) }, 0);
            "a FIFO that nobody writes to"
        }
        3 => {
            link("nowhere");
            "a link to nothing"
        }
        4 => {
            link("forecast");
            "a link to itself"
        }
        5 => {
            link("/dev/zero");
            "a link to /dev/zero"
        }
        _ => {
            std::fs::write(path, []).expect("a file");
            "an empty file"
        }
    }
}

// --- changes ---------------------------------------------------------------------------------------------------------

fn flip(rng: &mut Rng, bytes: &mut [u8]) -> String {
    let mut words = vec![];
    for _ in 0..rng.size(1..=4) {
        // The header decides more than the values.
        let most = if rng.one_in(3) { bytes.len() } else { bytes.len().min(400) };
        if most > 0 {
            let (at, bit) = (rng.size(0..=most - 1), rng.size(0..=7));
            bytes[at] ^= 1 << bit;
            words.push(format!("bit {bit} of byte {at}"));
        }
    }
    format!("flipped {}", words.join(", "))
}

fn cut(rng: &mut Rng, bytes: &mut Vec<u8>) -> String {
    let length = match rng.one_in(3) {
        true => bytes.len() + rng.size(1..=100),
        false => rng.size(0..=bytes.len()),
    };
    bytes.resize(length, 0);
    format!("{length} bytes")
}

fn header_length(rng: &mut Rng, bytes: &mut [u8]) -> String {
    let Some(place) = bytes.first_chunk_mut::<8>() else { return "too short for a length".into() };
    let length = u64::from_le_bytes(*place);
    let others =
        [0, 1, length.wrapping_sub(1), length.wrapping_add(8), 1 << 20, 100_000_000, 1 << 32, 1 << 63, u64::MAX];
    let other = rng.pick(&others);
    *place = other.to_le_bytes();
    format!("a header of {other} bytes instead of {length}")
}

/// The header, and where the values begin.
fn header(bytes: &[u8]) -> Option<(Value, usize)> {
    let length = usize::try_from(u64::from_le_bytes(*bytes.first_chunk::<8>()?)).ok()?;
    let end = length.checked_add(8)?;
    Some((serde_json::from_slice(bytes.get(8..end)?).ok()?, end))
}

fn write_header(bytes: &mut Vec<u8>, header: &Value, end: usize) {
    let text = serde_json::to_vec(header).expect("JSON");
    let mut other = (text.len() as u64).to_le_bytes().to_vec();
    other.extend(text);
    other.extend(&bytes[end..]);
    *bytes = other;
}

/// Every tensor in sixteen bits, as training scripts write them.
fn other_type(rng: &mut Rng, bytes: &mut Vec<u8>) -> String {
    let Some((mut header, end)) = header(bytes) else { return "no header to rewrite".into() };
    let dtype = rng.pick(&["F16", "BF16"]);
    for (_, tensor) in header.as_object_mut().into_iter().flatten().filter(|(name, _)| *name != "__metadata__") {
        for offset in tensor["data_offsets"].as_array_mut().into_iter().flatten() {
            *offset = (offset.as_u64().unwrap_or(0) / 2).into();
        }
        if let Some(tensor) = tensor.as_object_mut() {
            tensor.insert("dtype".into(), dtype.into());
        }
    }
    bytes.truncate(end + (bytes.len() - end) / 2);
    // Any bits: some are no numbers, most are.
    bytes[end..].iter_mut().for_each(|byte| *byte &= 0x3f);
    write_header(bytes, &header, end);
    format!("of {dtype}")
}

/// One value somewhere in the header is another, or gone, or there under another name.
fn field(rng: &mut Rng, bytes: &mut Vec<u8>) -> String {
    let Some((mut header, end)) = header(bytes) else { return "no header to change".into() };
    let words = change(rng, &mut header);
    write_header(bytes, &header, end);
    words
}

fn change(rng: &mut Rng, value: &mut Value) -> String {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            let names: Vec<String> = fields.keys().cloned().collect();
            let name = rng.pick(&names);
            if !rng.one_in(8) {
                return format!("{name} {}", change(rng, &mut fields[&name]));
            }
            let value = fields.remove(&name).expect("a field of that name");
            let other = rng.pick(&["", "layer.9.weight", "layer.-1.up", "format"]);
            if rng.one_in(2) {
                return format!("{name} is gone");
            }
            fields.insert(other.into(), value);
            format!("{name} is called {other:?}")
        }
        Value::Array(values) if !values.is_empty() => {
            let n = rng.size(0..=values.len() - 1);
            format!("[{n}] {}", change(rng, &mut values[n]))
        }
        _ => {
            *value = other_value(rng, value);
            format!("= {value}")
        }
    }
}

fn other_value(rng: &mut Rng, value: &Value) -> Value {
    let texts =
        ["", "0", "1", "2", "-1", "1e9", "65536", "1048576", "18446744073709551616", "nan", "inf", "F64", "1 ", "ü"];
    let numbers = [0, 1, 2, 3, 1 << 20, 1 << 32, 1 << 62, u64::MAX];
    match value {
        Value::String(_) if !rng.one_in(6) => rng.pick(&texts).into(),
        Value::Number(n) if !rng.one_in(6) => match n.as_u64() {
            Some(n) if rng.one_in(2) => rng.pick(&[n.wrapping_sub(1), n.wrapping_add(1), n.wrapping_mul(2)]).into(),
            _ => rng.pick(&numbers).into(),
        },
        _ => rng.pick(&[Value::Null, Value::Bool(true), (-1).into(), 1.5.into(), "x".into(), Value::Array(vec![])]),
    }
}
