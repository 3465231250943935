//! `include/vanward.h` is what cbindgen makes of the Rust declarations.

use std::path::Path;

#[test]
fn header_is_in_step_with_the_rust_declarations() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("cbindgen.toml");
    // In the order in which the header is read.
    let families = ["types", "session", "verify", "index", "select", "attention", "prefetch", "predictor", "forecast"];
    let mut builder = cbindgen::Builder::new().with_config(config);
    for family in families {
        builder = builder.with_src(root.join(format!("src/abi/{family}.rs")));
    }
    for family in &families[1..] {
        builder = builder.with_src(root.join(format!("src/capi/{family}.rs")));
    }
    let bindings = builder.generate().expect("cbindgen");
    let mut made = Vec::new();
    bindings.write(&mut made);
    let made = String::from_utf8(made).expect("UTF-8");
    let path = root.join("include/vanward.h");
    if std::env::var_os("VANWARD_WRITE_HEADER").is_some() {
        std::fs::write(&path, &made).expect("write the header");
    }
    let committed = std::fs::read_to_string(&path).expect("include/vanward.h");
    assert!(committed == made, "include/vanward.h is stale: run `make header` and commit it");
}
