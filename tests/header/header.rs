//! `include/vanward.h`: cbindgen's declarations in the order in which the sources have them, and an initialiser for each
//! struct beside it.

use crate::declarations::{self, Field, Struct};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Each is a file of `src/abi` and, where it has functions, one of `src/capi`. The header has them in this order.
const FAMILIES: [&str; 17] = [
    "types",
    "session",
    "verify",
    "sample",
    "tree",
    "index",
    "select",
    "topk",
    "attention",
    "quantize",
    "remainder",
    "prefetch",
    "kv",
    "predictor",
    "forecast",
    "budget",
    "decoder",
];

const LINE: usize = 120;

pub fn make(root: &Path) -> String {
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("cbindgen.toml");
    let trailer = config.trailer.clone().expect("a trailer in cbindgen.toml");
    let families = FAMILIES.map(|name| Family::read(root, name));
    let written = written_by_cbindgen(config, &families);
    let written = written.strip_suffix(&trailer).expect("the trailer at the end");

    let structs = declarations::structs(written);
    let mut parts = written.split("\n/**\n");
    let mut made = format!("{}\n", parts.next().expect("the preamble").trim());
    let mut items: BTreeMap<&str, String> = parts.map(|text| (name(text), with_short_comments(text))).collect();
    for family in &families {
        made += &family.banner();
        for name in family.source.lines().filter_map(declared) {
            let Some(text) = items.remove(name) else { continue };
            made += &format!("\n{text}");
            if let Some(found) = structs.iter().find(|s| s.name == name) {
                made += &initialiser(found, &structs);
            }
        }
    }
    assert!(items.is_empty(), "declared in none of the families' files: {:?}", items.keys());
    made + &trailer
}

struct Family {
    files: Vec<PathBuf>,
    source: String,
}

impl Family {
    fn read(root: &Path, name: &str) -> Self {
        let files = ["abi", "capi"].map(|folder| root.join(format!("src/{folder}/{name}.rs")));
        let files: Vec<_> = files.into_iter().filter(|file| file.exists()).collect();
        let source = files.iter().map(|file| std::fs::read_to_string(file).expect("a source")).collect();
        Self { files, source }
    }

    /// What the file's first line says it is about.
    fn banner(&self) -> String {
        let title = self.source.lines().next().and_then(|line| line.strip_prefix("//! ")).expect("a title");
        let title = title.trim_end_matches('.');
        format!("\n/* --- {title} {} */\n", "-".repeat(LINE - "/* ---   */".len() - title.chars().count()))
    }
}

/// As cbindgen writes them, in an order of its own.
fn written_by_cbindgen(config: cbindgen::Config, families: &[Family]) -> String {
    let mut builder = cbindgen::Builder::new().with_config(config);
    for file in families.iter().flat_map(|family| &family.files) {
        builder = builder.with_src(file);
    }
    let mut written = Vec::new();
    builder.generate().expect("cbindgen").write(&mut written);
    String::from_utf8(written).expect("UTF-8")
}

/// What a line of Rust declares for C, if it does.
fn declared(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("pub ")?;
    let kinds = ["const ", "struct ", "type ", "unsafe extern \"C\" fn ", "extern \"C\" fn "];
    let rest = kinds.iter().find_map(|kind| rest.strip_prefix(kind))?;
    rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()
}

/// What a documented item of the header declares.
fn name(item: &str) -> &str {
    let code = item.split_once("*/\n").expect("the end of a comment").1.trim();
    assert!(!code.contains("\n\n"), "two declarations and one comment:\n{item}");
    let text = if let Some((_, pointer)) = code.split_once("(*") {
        pointer.split(')').next()
    } else if let Some(constant) = code.strip_prefix("#define ") {
        constant.split(' ').next()
    } else if code.starts_with("typedef") {
        code.trim_end_matches(';').rsplit([' ', '*']).next()
    } else {
        code.split('(').next().and_then(|head| head.rsplit([' ', '*']).next())
    };
    text.expect("a name")
}

/// The item and its comment, what fits on one line on one line.
fn with_short_comments(item: &str) -> String {
    let lines: Vec<&str> = std::iter::once("/**").chain(item.trim_end().lines()).collect();
    let (mut rest, mut text) = (&lines[..], String::new());
    loop {
        match rest {
            [open, only, close, after @ ..] if open.trim() == "/**" && close.trim() == "*/" => {
                text += &format!("{open} {} */\n", only.trim_start_matches([' ', '*']));
                rest = after;
            }
            [line, after @ ..] => {
                text += &format!("{line}\n");
                rest = after;
            }
            [] => return text,
        }
    }
}

/// `#define VWD_HOLT_INIT {/* alpha */ 0, /* beta */ 0, /* gamma */ 0}`, wrapped.
fn initialiser(made: &Struct, structs: &[Struct]) -> String {
    let macro_of = |name: &str| format!("{}_INIT", name.to_uppercase());
    let value = |field: &Field| match field.c_type.as_str() {
        _ if field.length.is_some() => "{0}".to_owned(),
        _ if field.name == "struct_size" => format!("sizeof({})", made.name),
        "int32_t" | "int64_t" | "uint8_t" | "uint16_t" | "uint32_t" | "uint64_t" | "float" | "double" => "0".to_owned(),
        name if structs.iter().any(|s| s.name == name) => macro_of(name),
        _ => "NULL".to_owned(), // objects, functions and streams are pointers
    };
    let mut text = format!("#define {} \\\n", macro_of(&made.name));
    let mut line = "  {".to_owned();
    for (n, field) in made.fields.iter().enumerate() {
        let last = n + 1 == made.fields.len();
        let entry = format!("/* {} */ {}{}", field.name, value(field), if last { "}" } else { "," });
        if line.len() + entry.len() + " \\".len() > LINE {
            text += &format!("{} \\\n", line.trim_end());
            line = "   ".to_owned();
        }
        line += &format!("{entry} ");
    }
    text + line.trim_end() + "\n"
}
