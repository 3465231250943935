//! Gives the shared library its soname, whose number is VWD_ABI_VERSION, and compresses the PTX that it carries.

use std::fs;
use std::path::{Path, PathBuf};

const DECLARED_IN: &str = "src/abi/session.rs";
const PTX: &str = "kernels/ptx";

/// PTX shrinks to a fifth; more effort gains a few per cent more.
const EFFORT: u8 = 6;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed={DECLARED_IN}");
    println!("cargo:rerun-if-changed={PTX}");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libvanward.so.{}", abi_version());
    }
    compress_ptx();
}

fn abi_version() -> u32 {
    let source = fs::read_to_string(DECLARED_IN).expect(DECLARED_IN);
    let declared = source.lines().find_map(|line| line.strip_prefix("pub const VWD_ABI_VERSION: u32 = "));
    let number = declared.and_then(|rest| rest.strip_suffix(';')).expect("the line that declares VWD_ABI_VERSION");
    number.parse().expect("VWD_ABI_VERSION is a number")
}

/// `kernels/ptx/<family>/<file>.ptx` → `$OUT_DIR/ptx/<family>/<file>.ptx.z`.
fn compress_ptx() {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("Cargo sets OUT_DIR")).join("ptx");
    for family in entries(Path::new(PTX)).into_iter().filter(|path| path.is_dir()) {
        let to = out.join(family.file_name().expect("a folder's name"));
        fs::create_dir_all(&to).expect("a folder in OUT_DIR");
        for file in entries(&family) {
            let name = format!("{}.z", file.file_name().expect("a file's name").to_string_lossy());
            let text = fs::read(&file).expect("readable PTX");
            let compressed = miniz_oxide::deflate::compress_to_vec_zlib(&text, EFFORT);
            fs::write(to.join(name), compressed).expect("room in OUT_DIR");
        }
    }
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    entries.map(|entry| entry.expect("an entry").path()).collect()
}
