//! The binary interface: what the shared library exports, and how the structs of the header lie in memory.

mod loading;
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
    let declared: BTreeSet<String> = header
        .split("\nVWD_API")
        .skip(1)
        .filter_map(|function| function.split('(').next()?.rsplit([' ', '*']).next())
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
    for language in LANGUAGES {
        assert_eq!(compile_and_run("layout", language, &source), expected, "left: {}, right: Rust", language.name);
    }
}

/// What follows the fields of an earlier version must be a field of the next, never padding that nobody sets.
#[test]
fn structs_end_with_their_last_field() {
    for Struct { name, size, fields } in structs::all() {
        let last = fields.last().expect("a field");
        assert_eq!(last.offset + last.size, size, "{name}");
    }
}

#[test]
fn initialisers_set_the_size_and_leave_the_rest_zero() {
    let mut lines = String::new();
    for Struct { name, fields, .. } in structs::all() {
        lines += &format!("  {{ {name} value = {}_INIT;\n", name.to_uppercase());
        for field in fields {
            let size = if field.name == "struct_size" { format!("sizeof({name})") } else { "0".to_owned() };
            lines += &format!("    check(\"{name}.{0}\", &value.{0}, sizeof value.{0}, {size});\n", field.name);
        }
        lines += "  }\n";
    }
    let source = format!(
        r#"#include <stdio.h>
#include <string.h>
#include "vanward.h"
/* The field holds struct_size, or zeros where that is 0. */
static void check(const char *name, const void *field, size_t bytes, size_t struct_size) {{
  unsigned char expected[1024] = {{0}};
  uint32_t size = (uint32_t)struct_size;
  if (size != 0) memcpy(expected, &size, sizeof size);
  if (memcmp(field, expected, bytes) != 0) printf("%s\n", name);
}}
int main(void) {{
{lines}  return 0;
}}
"#
    );
    for language in LANGUAGES {
        assert_eq!(
            compile_and_run("initialisers", language, &source),
            "",
            "fields that {} sets wrongly",
            language.name
        );
    }
}

struct Language {
    name: &'static str,
    standard: &'static str,
    /// The environment's name for the compiler, and the one that is used without.
    compiler: [&'static str; 2],
}

const LANGUAGES: [&Language; 2] = [
    &Language { name: "c", standard: "-std=c11", compiler: ["CC", "cc"] },
    &Language { name: "c++", standard: "-std=c++17", compiler: ["CXX", "c++"] },
];

/// Compiles with the strictest warnings and runs.
fn compile_and_run(name: &str, language: &Language, source: &str) -> String {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let program = folder.join(format!("abi_{name}_{}", language.name));
    let file = program.with_extension("c");
    std::fs::write(&file, source).expect("write the program");
    let [variable, usual] = language.compiler;
    let compiler = std::env::var(variable).unwrap_or_else(|_| usual.into());
    let strict = ["-Wall", "-Wextra", "-pedantic", "-Werror", language.standard, "-x", language.name];
    output(
        Command::new(compiler).args(strict).arg("-I").arg(root().join("include")).arg(&file).arg("-o").arg(&program),
    );
    output(&mut Command::new(program))
}
