//! The binary interface: what the shared library exports, and how the structs of the header lie in memory.

mod structs;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use structs::Struct;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn header() -> String {
    std::fs::read_to_string(root().join("include/vanward.h")).expect("include/vanward.h")
}

/// The program's standard output; a missing program is named.
fn output(command: &mut Command) -> String {
    let program = command.get_program().to_string_lossy().into_owned();
    let result = command.output().unwrap_or_else(|error| panic!("this test needs `{program}`: {error}"));
    let errors = String::from_utf8_lossy(&result.stderr);
    assert!(result.status.success(), "{command:?}: {errors}");
    String::from_utf8(result.stdout).expect("UTF-8")
}

// --- exports ---------------------------------------------------------------------------------------------------------

/// Cargo builds the shared library beside its tests.
fn library() -> PathBuf {
    let path = std::env::current_exe().unwrap().with_file_name("libvanward.so");
    assert!(path.exists(), "{} is missing", path.display());
    path
}

/// The first line of exports.txt is the soname, the others are the symbols.
fn committed() -> (String, BTreeSet<String>) {
    let text = std::fs::read_to_string(root().join("tests/abi/exports.txt")).expect("exports.txt");
    let mut lines = text.lines().map(str::to_owned);
    (lines.next().expect("the soname"), lines.collect())
}

#[track_caller]
fn assert_committed(names: &BTreeSet<String>, place: &str) {
    let committed = committed().1;
    let (more, less): (Vec<_>, Vec<_>) =
        (names.difference(&committed).collect(), committed.difference(names).collect());
    assert!(
        more.is_empty() && less.is_empty(),
        "{place} has {more:?}, which tests/abi/exports.txt has not; and lacks {less:?}"
    );
}

#[test]
fn library_exports_exactly_the_committed_symbols() {
    let symbols = output(Command::new("nm").args(["-D", "--defined-only"]).arg(library()));
    let exported: BTreeSet<String> =
        symbols.lines().filter_map(|line| line.split(' ').nth(2)).map(str::to_owned).collect();
    assert_committed(&exported, "libvanward.so");
}

#[test]
fn header_declares_exactly_the_exported_functions() {
    let header = header();
    let code = header.split("/*").map(|part| part.split("*/").last().unwrap());
    let declared: BTreeSet<String> = code
        .flat_map(|part| part.split('('))
        .filter_map(|before| before.rsplit([' ', '*', '\n']).next())
        .filter(|name| name.starts_with("vwd_"))
        .map(str::to_owned)
        .collect();
    assert_committed(&declared, "vanward.h");
}

#[test]
fn soname_carries_the_abi_version() {
    let dynamic = output(Command::new("readelf").arg("-d").arg(library()));
    let soname = format!("libvanward.so.{}", vanward::abi::VWD_ABI_VERSION);
    assert!(dynamic.contains(&format!("soname: [{soname}]")), "{dynamic}");
    assert_eq!(committed().0, soname);
}

// --- layout ----------------------------------------------------------------------------------------------------------

/// Structs of the header, with the names of their fields.
fn declared_structs() -> Vec<(String, Vec<String>)> {
    let header = header();
    let field = |line: &str| {
        let line = line.strip_prefix("  ")?.strip_suffix(';')?;
        let name = line.split('[').next()?.rsplit([' ', '*']).next()?;
        Some(name.to_owned())
    };
    let mut structs = Vec::new();
    for part in header.split("typedef struct {").skip(1) {
        let (body, rest) = part.split_once("\n} ").expect("the end of a struct");
        let name = rest.split_once(';').expect("the name of a struct").0;
        structs.push((name.to_owned(), body.lines().filter_map(field).collect()));
    }
    structs
}

#[test]
fn every_struct_of_the_header_is_compared() {
    let mut declared = declared_structs();
    let mut compared: Vec<(String, Vec<String>)> = structs::all()
        .iter()
        .map(|s| (s.name.to_owned(), s.fields.iter().map(|f| f.name.to_owned()).collect()))
        .collect();
    declared.sort();
    compared.sort();
    assert_eq!(declared, compared, "left: vanward.h, right: tests/abi/structs.rs");
}

#[test]
fn c_compiler_and_rust_agree_on_every_struct() {
    let mut lines = String::new();
    let mut expected = String::new();
    for Struct { name, size, fields } in structs::all() {
        lines += &format!("  printf(\"{name} %zu\\n\", sizeof({name}));\n");
        expected += &format!("{name} {size}\n");
        for field in fields {
            let path = format!("{name}.{}", field.name);
            let value = format!("sizeof((({name} *)0)->{0}), offsetof({name}, {0})", field.name);
            lines += &format!("  printf(\"{path} %zu at %zu\\n\", {value});\n");
            expected += &format!("{path} {} at {}\n", field.size, field.offset);
        }
    }
    let source = format!("#include <stdio.h>\n#include \"vanward.h\"\nint main(void) {{\n{lines}  return 0;\n}}\n");
    assert_eq!(compile_and_run("layout", &source), expected, "left: C, right: Rust");
}

/// What follows the fields of an earlier version must be a field of the next, never padding that nobody sets.
#[test]
fn structs_have_no_padding() {
    for Struct { name, size, fields } in structs::all() {
        assert_eq!(fields.iter().map(|f| f.size).sum::<usize>(), size, "{name}");
    }
}

#[test]
fn initialisers_set_the_size_and_leave_the_rest_zero() {
    let header = header();
    let mut lines = String::new();
    for Struct { name, fields, .. } in structs::all() {
        let macro_name = format!("{}_INIT", name.to_uppercase());
        assert!(header.contains(&format!("#define {macro_name} ")), "{macro_name} is missing");
        let size = if fields[0].name == "struct_size" { format!("sizeof({name})") } else { "0".to_owned() };
        lines += &format!("  {{ {name} value = {macro_name}; check(\"{name}\", &value, sizeof value, {size}); }}\n");
    }
    let source = format!(
        r#"#include <stdio.h>
#include <string.h>
#include "vanward.h"
static void check(const char *name, const void *value, size_t bytes, size_t struct_size) {{
  static const unsigned char zeros[4096];
  uint32_t first;
  memcpy(&first, value, sizeof first);
  if (first != struct_size || memcmp((const char *)value + 4, zeros, bytes - 4) != 0) printf("%s\n", name);
}}
int main(void) {{
{lines}  return 0;
}}
"#
    );
    assert_eq!(compile_and_run("initialisers", &source), "", "structs whose initialiser is wrong");
}

/// Compiles with the strictest warnings and runs.
fn compile_and_run(name: &str, source: &str) -> String {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let (file, program) = (folder.join(format!("abi_{name}.c")), folder.join(format!("abi_{name}")));
    std::fs::write(&file, source).expect("write the C program");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let strict = ["-std=c11", "-Wall", "-Wextra", "-pedantic", "-Werror"];
    output(
        Command::new(compiler).args(strict).arg("-I").arg(root().join("include")).arg(&file).arg("-o").arg(&program),
    );
    output(&mut Command::new(program))
}
