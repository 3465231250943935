//! What is in a file.

use crate::*;
use serde_json::{Value, json};

#[test]
fn what_is_saved_loads_as_it_was() {
    let backend = Backend::cpu(2);
    let folder = Folder::new("round-trip");
    rounds(12, |rng| {
        let (input, dim) = (rng.size(1..=40), 2 * rng.size(1..=9));
        let shape = Shape { layers: 3, input, heads: 2, dim, memory: rng.one_in(2) };
        let most = shape.rank() as u32;
        let rank = rng.pick(&[0, 1, most]);
        let forecast = fitted(&backend, rng, shape, rank);
        // One layer of another kind than the others.
        forecast.accumulate(1, &Activations::random(rng, &shape, 30));
        assert_ok(forecast.solve(if rank == 0 { most } else { 0 }));
        let (path, again) = (folder.file("maps.safetensors"), folder.file("again.safetensors"));
        assert_ok(forecast.save(&path));
        let loaded = Forecast::load(&backend, shape, &path).expect("what was saved loads");
        let x = Activations::random(rng, &shape, 4);
        for layer in 0..3 {
            assert_eq!(loaded.outputs(layer, &x), forecast.outputs(layer, &x));
        }
        let (a, b) = (loaded.details(), forecast.details());
        assert_eq!((a.layers, a.input_dim, a.q_heads, a.head_dim, a.rank), (3, b.input_dim, 2, b.head_dim, b.rank));
        assert_eq!((a.flags, a.solved, a.map_bytes, a.ridge), (b.flags, 3, b.map_bytes, b.ridge));
        // A loaded forecast can be fitted further, and the same maps make the same file.
        assert_ok(loaded.save(&again));
        assert_eq!(std::fs::read(&path).unwrap(), std::fs::read(&again).unwrap());
        loaded.accumulate(0, &Activations::random(rng, &shape, 30));
        assert_ok(loaded.solve(0));
        assert_ne!(loaded.outputs(0, &x), forecast.outputs(0, &x));
    });
    let left: Vec<_> = std::fs::read_dir(&folder.0).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "no temporary file stays: {left:?}");
}

#[test]
fn save_that_fails_leaves_what_was_there() {
    let backend = Backend::cpu(1);
    let folder = Folder::new("save");
    let shape = Shape { layers: 2, input: 4, heads: 1, dim: 2, memory: false };
    let forecast = Forecast::new(&backend, shape, 0.0);
    forecast.accumulate(0, &Activations::random(&mut Rng::new(1), &shape, 9));
    assert_ok(forecast.solve(0));
    let path = folder.file("maps");
    std::fs::write(&path, "before").unwrap();
    assert_fails(forecast.save(&path), VWD_ERROR_INVALID_ARGUMENT, &["layer 1 has no map"]);
    assert_eq!(std::fs::read(&path).unwrap(), b"before");
    forecast.accumulate(1, &Activations::random(&mut Rng::new(2), &shape, 9));
    assert_ok(forecast.solve(0));
    assert_fails(forecast.save(&folder.file("missing/maps")), VWD_ERROR_IO, &["missing/maps"]);
    std::fs::create_dir(folder.file("folder")).unwrap();
    assert_fails(forecast.save(&folder.file("folder")), VWD_ERROR_IO, &["folder"]);
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 2, "no temporary file stays");
    assert_ok(forecast.save(&path));
    assert!(Forecast::load(&backend, shape, &path).is_ok());
}

/// A safetensors file from its parts.
fn safetensors(header: &Value, data: &[u8]) -> Vec<u8> {
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

/// What a training script would write: [outputs, inputs] tensors of one layer, input_dim 2, one head of 2.
fn script_header(dtype: &str, bytes: usize) -> Value {
    json!({
        "__metadata__": {
            "format": "vanward.forecast", "version": "1",
            "layers": "1", "input_dim": "2", "q_heads": "1", "head_dim": "2",
        },
        "layer.0.weight": { "dtype": dtype, "shape": [2, 3], "data_offsets": [0, 6 * bytes] },
    })
}

#[test]
fn files_of_other_programs_load() {
    let backend = Backend::cpu(1);
    let folder = Folder::new("script");
    let path = folder.file("maps");
    let shape = Shape { layers: 1, input: 2, heads: 1, dim: 2, memory: false };
    let weights = [1.0, 2.0, -0.5, 0.25, -4.0, 8.0];
    for (name, dtype) in [("F32", F32), ("F16", F16), ("BF16", BF16)] {
        let values = Tensor::floats(&backend, dtype, &Array::new(&[6], weights.to_vec()), &Layout::default());
        let data = values.read_raw().data.concat();
        std::fs::write(&path, safetensors(&script_header(name, dtype.bytes()), &data)).unwrap();
        let forecast = Forecast::load(&backend, shape, &path).unwrap_or_else(|_| panic!("{}", last_error()));
        // x̂ = (1, −1, 1)
        let q = forecast.outputs(0, &Activations::of(Array::new(&[1, 2], vec![3.0, -3.0])));
        assert_eq!(q.data, [1.0 - 2.0 - 0.5, 0.25 + 4.0 + 8.0], "{name}");
    }
}

#[test]
fn flags_of_a_file_say_whether_its_maps_have_memory() {
    let backend = Backend::cpu(1);
    let folder = Folder::new("flags");
    let path = folder.file("maps");
    let plain = Shape { layers: 1, input: 2, heads: 1, dim: 2, memory: false };
    let load = |version: &str, flags: Option<&str>, weights: &[f32], shape: Shape| {
        let mut header = script_header("F32", 4);
        header["__metadata__"]["version"] = json!(version);
        if let Some(flags) = flags {
            header["__metadata__"]["flags"] = json!(flags);
        }
        header["layer.0.weight"] =
            json!({ "dtype": "F32", "shape": [2, weights.len() / 2], "data_offsets": [0, weights.len() * 4] });
        let data: Vec<u8> = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
        std::fs::write(&path, safetensors(&header, &data)).unwrap();
        Forecast::load(&backend, shape, &path).unwrap_or_else(|_| panic!("{}", last_error()))
    };
    // x̂ = (1, −1)
    let mut text = Activations::of(Array::new(&[1, 2], vec![3.0, -3.0]));
    let weights = [1.0, 2.0, -0.5, 0.25, -4.0, 8.0];
    for forecast in [load("1", None, &weights, plain), load("2", Some("0"), &weights, plain)] {
        assert_eq!(forecast.details().flags, 0);
        assert_eq!(forecast.outputs(0, &text).data, [1.0 - 2.0 - 0.5, 0.25 + 4.0 + 8.0]);
    }
    // Columns of x̂, of the queries at the token before, and of the constant.
    let weights = [1.0, 2.0, 10.0, 100.0, -0.5, 0.25, -4.0, -10.0, 0.5, 8.0];
    let forecast = load("2", Some("1"), &weights, Shape { memory: true, ..plain });
    assert_eq!(forecast.details().flags, VWD_FORECAST_MEMORY);
    text.previous = Some(Array::new(&[1, 1, 2], vec![2.0, 3.0]));
    assert_eq!(forecast.outputs(0, &text).data, [1.0 - 2.0 + 20.0 + 300.0 - 0.5, 0.25 + 4.0 - 20.0 + 1.5 + 8.0]);
    assert_ok(forecast.save(&path));
    let header = String::from_utf8_lossy(&std::fs::read(&path).unwrap()[8..]).into_owned();
    assert!(header.contains(r#""version":"2","flags":"1""#), "{header}");
}

#[test]
fn files_that_do_not_fit_the_format_are_refused_with_the_reason() {
    let backend = Backend::cpu(1);
    let folder = Folder::new("hostile");
    let path = folder.file("maps");
    let shape = Shape { layers: 1, input: 2, heads: 1, dim: 2, memory: false };
    let refuse = |bytes: &[u8], pieces: &[&str]| {
        std::fs::write(&path, bytes).unwrap();
        let status = Forecast::load(&backend, shape, &path).map(|_| VWD_OK).unwrap_or_else(|status| status);
        assert_fails(status, VWD_ERROR_IO, &[&["maps: "], pieces].concat());
    };
    let data: Vec<u8> = (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let whole = safetensors(&script_header("F32", 4), &data);
    std::fs::write(&path, &whole).unwrap();
    assert!(Forecast::load(&backend, shape, &path).is_ok());
    for length in [0, 4, 8, 20, whole.len() - 25, whole.len() - 24, whole.len() - 1] {
        refuse(&whole[..length], &[]);
    }
    refuse(&[&whole[..], &[0]].concat(), &["25 bytes of tensors; expected 24"]);
    for length in [u64::MAX, 1 << 63, 200_000_000, whole.len() as u64 - 7] {
        refuse(&[&length.to_le_bytes()[..], &whole[8..]].concat(), &["header"]);
    }
    refuse(&safetensors(&json!([1, 2]), &data), &["no safetensors header"]);
    let with = |place: &str, value: Value| {
        let mut header = script_header("F32", 4);
        *header.pointer_mut(place).expect("is there") = value;
        safetensors(&header, &data)
    };
    for (field, value, piece) in [
        ("format", "pt", "vanward.forecast"),
        ("version", "3", "expected 1 or 2"),
        ("version", "2", "flags"),
        ("layers", "0", "layers"),
        ("layers", "4000000000", "layers"),
        ("layers", "99999999999999999999999", "layers"),
        ("layers", "2", "layer.1.weight"),
        ("input_dim", "-2", "input_dim"),
        ("input_dim", "3", "[2, 4]"),
        ("q_heads", "1048576", "q_heads"),
        ("head_dim", "two", "head_dim"),
    ] {
        refuse(&with(&format!("/__metadata__/{field}"), json!(value)), &[piece]);
    }
    refuse(&with("/__metadata__", json!({})), &["format"]);
    for (flags, piece) in [("2", "VWD_FORECAST_MEMORY"), ("-1", "flags"), ("1", "[2, 5]")] {
        let mut header = script_header("F32", 4);
        header["__metadata__"]["version"] = json!("2");
        header["__metadata__"]["flags"] = json!(flags);
        refuse(&safetensors(&header, &data), &[piece]);
    }
    refuse(&with("/layer.0.weight/dtype", json!("I32")), &["layer.0.weight", "I32"]);
    refuse(&with("/layer.0.weight/dtype", json!("F4")), &[]);
    refuse(&with("/layer.0.weight/shape", json!([3, 2])), &["layer.0.weight", "[3, 2]", "[2, 3]"]);
    refuse(&with("/layer.0.weight/shape", json!([u64::MAX, u64::MAX])), &["overflow"]);
    refuse(&with("/layer.0.weight/data_offsets", json!([0, 28])), &[]);
    refuse(&with("/layer.0.weight/data_offsets", json!([24, 0])), &[]);
    let mut bad = data.clone();
    bad[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
    refuse(&safetensors(&script_header("F32", 4), &bad), &["layer.0.weight", "not finite"]);
    let mut more = script_header("F32", 4);
    more["other"] = json!({ "dtype": "F32", "shape": [0], "data_offsets": [24, 24] });
    refuse(&safetensors(&more, &data), &["2 tensors"]);
    let mut cut = script_header("F32", 4);
    cut.as_object_mut().unwrap().remove("layer.0.weight");
    refuse(&safetensors(&cut, &[]), &["layer.0.weight"]);
    cut["layer.0.down"] = json!({ "dtype": "F32", "shape": [1, 3], "data_offsets": [0, 12] });
    refuse(&safetensors(&cut, &data[..12]), &["layer.0.up"]);
    cut["layer.0.down"] = json!({ "dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24] });
    refuse(&safetensors(&cut, &data), &["layer.0.down", "rank"]);
    assert_eq!(Forecast::load(&backend, shape, &folder.file("none")).err(), Some(VWD_ERROR_IO));
}

#[test]
fn damaged_headers_never_do_worse_than_an_error() {
    let backend = Backend::cpu(1);
    let folder = Folder::new("damaged");
    let path = folder.file("maps");
    let shape = Shape { layers: 1, input: 2, heads: 1, dim: 2, memory: false };
    let whole = safetensors(&script_header("F32", 4), &[0; 24]);
    rounds(300, |rng| {
        let mut bytes = whole.clone();
        for _ in 0..rng.size(1..=4) {
            let at = rng.size(0..=whole.len() - 25);
            bytes[at] = rng.pick(b"0192345678{}[]\",:.-eFBIx\0\xff");
        }
        std::fs::write(&path, &bytes).unwrap();
        let status = Forecast::load(&backend, shape, &path).map(|_| VWD_OK).unwrap_or_else(|status| status);
        assert!(status == VWD_OK || status == VWD_ERROR_IO, "{status}: {}", last_error());
    });
}
