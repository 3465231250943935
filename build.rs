//! Gives the shared library its soname; everything else Cargo does by itself.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        // The number is VWD_ABI_VERSION: it changes only when a compiled program would break.
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libvanward.so.0");
    }
}
