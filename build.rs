//! Gives the shared library its soname, whose number is VWD_ABI_VERSION, and compresses the kernels that it carries.

use std::fs;
use std::path::{Path, PathBuf};

const DECLARED_IN: &str = "src/abi/session.rs";
/// Folders of `kernels/` with a folder per family.
const COMPILED: [&str; 2] = ["ptx", "cubin"];

/// PTX shrinks to a fifth, machine code to a third; more effort gains a few per cent more.
const EFFORT: u8 = 6;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed={DECLARED_IN}");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libvanward.so.{}", abi_version());
    }
    COMPILED.iter().for_each(|kind| compress(kind));
}

fn abi_version() -> u32 {
    let source = fs::read_to_string(DECLARED_IN).expect(DECLARED_IN);
    let declared = source.lines().find_map(|line| line.strip_prefix("pub const VWD_ABI_VERSION: u32 = "));
    let number = declared.and_then(|rest| rest.strip_suffix(';')).expect("the line that declares VWD_ABI_VERSION");
    number.parse().expect("VWD_ABI_VERSION is a number")
}

/// `kernels/<kind>/<family>/<file>` → `$OUT_DIR/<kind>/<family>/<file>.z`.
fn compress(kind: &str) {
    let from = Path::new("kernels").join(kind);
    println!("cargo:rerun-if-changed={}", from.display());
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("Cargo sets OUT_DIR")).join(kind);
    for family in entries(&from).into_iter().filter(|path| path.is_dir()) {
        let to = out.join(family.file_name().expect("a folder's name"));
        fs::create_dir_all(&to).expect("a folder in OUT_DIR");
        for file in entries(&family) {
            let name = format!("{}.z", file.file_name().expect("a file's name").to_string_lossy());
            let compressed = miniz_oxide::deflate::compress_to_vec_zlib(&fs::read(&file).expect("readable"), EFFORT);
            fs::write(to.join(name), compressed).expect("room in OUT_DIR");
        }
    }
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    entries.map(|entry| entry.expect("an entry").path()).collect()
}
