//! Gives the shared library its soname, whose number is VWD_ABI_VERSION; everything else Cargo does by itself.

const DECLARED_IN: &str = "src/abi/session.rs";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed={DECLARED_IN}");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libvanward.so.{}", abi_version());
    }
}

fn abi_version() -> u32 {
    let source = std::fs::read_to_string(DECLARED_IN).expect(DECLARED_IN);
    let declared = source.lines().find_map(|line| line.strip_prefix("pub const VWD_ABI_VERSION: u32 = "));
    let number = declared.and_then(|rest| rest.strip_suffix(';')).expect("the line that declares VWD_ABI_VERSION");
    number.parse().expect("VWD_ABI_VERSION is a number")
}
