//! The committed PTX is what the sources in `kernels/` say: checked without a GPU, a compiler or Python.

use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const REMEDY: &str = "run `make kernels` and commit kernels/";

/// Drivers from 550 on load this instruction set and older ones.
const NEWEST_PTX_ISA: (u32, u32) = (8, 4);

fn kernels() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")
}

fn manifest() -> Value {
    let text = std::fs::read_to_string(kernels().join("ptx/manifest.json")).expect("kernels/ptx/manifest.json");
    serde_json::from_str(&text).expect("the manifest is JSON")
}

/// Name → hash, as the manifest lists them under `key`.
fn listed(key: &str) -> BTreeMap<String, String> {
    let manifest = manifest();
    let entries = manifest[key].as_object().unwrap_or_else(|| panic!("the manifest has no {key}"));
    entries.iter().map(|(name, hash)| (name.clone(), hash.as_str().expect("a hash").to_owned())).collect()
}

/// Path inside `kernels/` → hash of the files at any depth that have one of these extensions.
fn hashed(extensions: &[&str]) -> BTreeMap<String, String> {
    let (root, mut hashes) = (kernels(), BTreeMap::new());
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(&folder).expect("the folder exists").map(|entry| entry.expect("an entry").path())
        {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| extensions.iter().any(|&x| e == x)) {
                let digest = Sha256::digest(std::fs::read(&path).expect("readable"));
                let name = path.strip_prefix(&root).expect("inside").to_string_lossy().into_owned();
                hashes.insert(name, digest.iter().map(|byte| format!("{byte:02x}")).collect());
            }
        }
    }
    hashes
}

#[test]
fn ptx_was_compiled_from_these_sources() {
    assert_eq!(listed("sources"), hashed(&["cu", "cuh", "py"]), "{REMEDY}");
}

#[test]
fn ptx_and_machine_code_are_as_the_compiler_wrote_them() {
    assert_eq!(listed("ptx"), hashed(&["ptx"]), "{REMEDY}");
    assert_eq!(listed("cubin"), hashed(&["cubin"]), "{REMEDY}");
}

#[test]
fn ptx_loads_on_the_oldest_supported_driver_and_device() {
    for name in listed("ptx").keys() {
        let text = std::fs::read_to_string(kernels().join(name)).expect("listed PTX exists");
        let directive = |key: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(key));
            line.unwrap_or_else(|| panic!("{name} has no {key}")).trim().to_owned()
        };
        let isa = directive(".version");
        let (major, minor) = isa.split_once('.').expect("major.minor");
        let isa = (major.parse().expect("a number"), minor.parse().expect("a number"));
        assert!(isa <= NEWEST_PTX_ISA, "{name} is of PTX ISA {isa:?}; expected at most {NEWEST_PTX_ISA:?}");
        let target = manifest()["targets"][name].as_str().expect("a target").replace("compute_", "sm_");
        assert_eq!(directive(".target"), target, "{name}");
    }
}
