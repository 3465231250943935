//! What is made of the C declarations in `src/abi` and `src/capi`: the header, and what mirrors it. `make header` writes it.

mod declarations;
mod go;
mod header;
mod layout;
mod python;

use std::path::Path;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[track_caller]
fn assert_in_step(path: &str, made: &str) {
    let file = root().join(path);
    if std::env::var_os("VANWARD_WRITE_HEADER").is_some() {
        std::fs::write(&file, made).unwrap_or_else(|error| panic!("{path}: {error}"));
    }
    let committed = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{path}: {error}"));
    assert!(committed == made, "{path} is stale: run `make header` and commit it");
}

#[test]
fn header_is_in_step_with_the_rust_declarations() {
    assert_in_step("include/vanward.h", &header::make(root()));
}

#[test]
fn python_structs_and_prototypes_are_in_step() {
    assert_in_step("bindings/python/vanward/_header.py", &python::make(&header::make(root())));
}

#[test]
fn python_documentation_is_in_step() {
    assert_in_step("bindings/python/vanward/_docs.py", &python::docs(&header::make(root())));
}

#[test]
fn comments_of_the_go_structs_are_in_step() {
    let header = header::make(root());
    for file in
        ["attention", "forecast", "kvcache", "predictor", "prefetch", "sample", "select", "tree", "types", "verify"]
    {
        let path = format!("bindings/go/{file}.go");
        let source = std::fs::read_to_string(root().join(&path)).expect("a Go file");
        assert_in_step(&path, &go::with_comments(&source, &header));
    }
}

#[test]
fn list_of_fields_to_compare_is_in_step() {
    assert_in_step("tests/abi/layout.rs", &layout::make(&header::make(root())));
}
