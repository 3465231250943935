//! Gives the shared library its soname, whose number is VWD_ABI_VERSION, and compresses the kernels that it carries.

use std::fs;
use std::path::{Path, PathBuf};

const DECLARED_IN: &str = "src/abi/session.rs";
/// The committed PTX, with a folder per family.
const PTX: &str = "kernels/ptx";
/// Machine code with the same folders, each file next to a copy of the PTX that it was assembled from. Git ignores it; `make install` and
/// the packages make it.
const MACHINE_CODE: &str = "kernels/cubin";

/// PTX shrinks to a fifth, machine code to a third; more effort gains a few per cent more.
const EFFORT: u8 = 6;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed={DECLARED_IN}");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libvanward.so.{}", abi_version());
    }
    println!("cargo:rerun-if-changed={PTX}");
    // A packaged crate has no such folder; a path that does not exist would run this script at every build.
    if Path::new(MACHINE_CODE).exists() {
        println!("cargo:rerun-if-changed={MACHINE_CODE}");
    }
    embed_kernels();
}

fn abi_version() -> u32 {
    let source = fs::read_to_string(DECLARED_IN).expect(DECLARED_IN);
    let declared = source.lines().find_map(|line| line.strip_prefix("pub const VWD_ABI_VERSION: u32 = "));
    let number = declared.and_then(|rest| rest.strip_suffix(';')).expect("the line that declares VWD_ABI_VERSION");
    number.parse().expect("VWD_ABI_VERSION is a number")
}

/// Writes `$OUT_DIR/ptx/<family>/<file>.ptx.z` and `$OUT_DIR/cubin/<family>/<file>.cubin.z`. The latter is empty where there is no machine code
/// of this very PTX: the library then carries PTX alone, which the driver compiles.
fn embed_kernels() {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("Cargo sets OUT_DIR"));
    for family in entries(Path::new(PTX)).into_iter().filter(|path| path.is_dir()) {
        for path in entries(&family) {
            let name = path.strip_prefix(PTX).expect("it lies in that folder").to_str().expect("UTF-8");
            let ptx = fs::read_to_string(&path).expect("readable");
            let older = name.replace(".compute_90.", ".compute_80.");
            if older != name && !Path::new(PTX).join(&older).exists() {
                embed(&out, &older, &for_8_0(&ptx));
            }
            if ptx.contains("\n// .entry ") {
                let newer = Path::new(PTX).join(name.replace(".compute_80.", ".compute_90."));
                embed(&out, name, &expanded(&ptx, &fs::read_to_string(newer).expect("the file with those kernels")));
            } else {
                embed(&out, name, &ptx);
            }
        }
    }
}

/// PTX of compute_90 for compute_80, as `for_8_0` of kernels/build.py makes it: where it is the same otherwise, it is not committed.
pub fn for_8_0(ptx: &str) -> String {
    let lines = ptx.lines().filter(|line| !line.starts_with("griddepcontrol"));
    lines.map(|line| line.replace(".target sm_90", ".target sm_80") + "\n").collect()
}

/// PTX of compute_80, whole: a line "// .entry name" of the file stands for the kernel of that name in the one of compute_90.
pub fn expanded(kept: &str, newer: &str) -> String {
    const KERNEL: &str = ".visible .entry ";
    let older = for_8_0(newer);
    let kernel = |name: &str| {
        let begin = older.find(&format!("{KERNEL}{name}(")).expect("it is in both");
        let length = older[begin + 1..].find(&format!("\n{KERNEL}")).map_or(older.len() - begin, |at| at + 2);
        older[begin..begin + length].to_owned()
    };
    kept.lines().map(|line| line.strip_prefix("// .entry ").map_or_else(|| format!("{line}\n"), kernel)).collect()
}

fn embed(out: &Path, name: &str, ptx: &str) {
    let copy = Path::new(MACHINE_CODE).join(name);
    let is_current = fs::read_to_string(&copy).is_ok_and(|assembled| assembled == ptx);
    let code = fs::read(copy.with_extension("cubin")).ok().filter(|_| is_current);
    write(&out.join("ptx").join(name).with_extension("ptx.z"), &compressed(ptx.as_bytes()));
    write(&out.join("cubin").join(name).with_extension("cubin.z"), &code.map_or(Vec::new(), |code| compressed(&code)));
}

fn compressed(data: &[u8]) -> Vec<u8> {
    miniz_oxide::deflate::compress_to_vec_zlib(data, EFFORT)
}

fn write(path: &Path, data: &[u8]) {
    fs::create_dir_all(path.parent().expect("a folder in OUT_DIR")).expect("a folder in OUT_DIR");
    fs::write(path, data).expect("room in OUT_DIR");
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    entries.map(|entry| entry.expect("an entry").path()).collect()
}
