//! Who may import whom, as docs/architecture.md has it: upper floors read lower ones, and nobody a family's backend.

use std::path::{Path, PathBuf};

/// The floors of `src`, each with those that it may read beside itself.
const FLOORS: [(&str, &[&str]); 7] = [
    ("abi", &[]),
    ("core", &["abi"]),
    ("runtime", &["abi", "core"]),
    ("ops", &["abi", "core", "runtime"]),
    ("kv", &["abi", "core", "runtime", "ops"]),
    ("decode", &["abi", "core", "runtime", "ops"]),
    ("capi", &["abi", "core", "runtime", "ops", "kv", "decode"]),
];

#[test]
fn nothing_imports_a_floor_above_it() {
    let mut found = Vec::new();
    for (floor, below) in FLOORS {
        for file in sources(&root().join(floor)) {
            for path in crate_paths(&file) {
                let of = path.split("::").next().expect("a floor");
                if of != floor && FLOORS.iter().any(|(name, _)| *name == of) && !below.contains(&of) {
                    found.push(format!("{}: crate::{path}", file.display()));
                }
            }
        }
    }
    assert!(found.is_empty(), "imports from above:\n{}", found.join("\n"));
}

#[test]
fn nothing_names_the_backend_of_another_family() {
    let mut found = Vec::new();
    for floor in ["ops", "decode"] {
        let folders =
            std::fs::read_dir(root().join(floor)).expect("a floor").map(|entry| entry.expect("a family").path());
        for family in folders.filter(|path| path.is_dir()) {
            let name = family.file_name().and_then(|name| name.to_str()).expect("UTF-8");
            for file in sources(&root()).into_iter().filter(|file| !file.starts_with(&family)) {
                let code = code(&std::fs::read_to_string(&file).expect("a source"));
                for backend in ["cpu", "cuda"].map(|backend| format!("{name}::{backend}")) {
                    if code
                        .split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':')
                        .any(|path| has(path, &backend))
                    {
                        found.push(format!("{}: {backend}", file.display()));
                    }
                }
            }
        }
    }
    assert!(found.is_empty(), "backends of other families:\n{}", found.join("\n"));
}

/// `verify::cpu` is in `super::verify::cpu::run`, and not in `verify::cpu_time`.
fn has(path: &str, part: &str) -> bool {
    format!("::{path}::").contains(&format!("::{part}::"))
}

/// The checks read imports as text: this is what they must see.
#[test]
fn every_form_of_an_import_is_seen() {
    let source = "use crate::abi::vwd_tensor;\nuse crate::{core::status, ops::{pack, verify::cpu}};\nlet x = crate::runtime::On::Cpu;\n\
                  use super::verify::cuda::run; // crate::capi\n";
    let place = Path::new("src/ops/pack/mod.rs");
    let found = paths_in(source, place);
    let expected = [
        "abi::vwd_tensor",
        "core::status",
        "ops::pack",
        "ops::verify::cpu",
        "runtime::On::Cpu",
        "ops::verify::cuda::run",
    ];
    assert_eq!(found, expected);
    assert!(has("super::verify::cpu::run", "verify::cpu") && !has("verify::cpu_time", "verify::cpu"));
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder of sources").map(|entry| entry.expect("an entry").path());
    let (folders, files): (Vec<PathBuf>, Vec<PathBuf>) = entries.partition(|path| path.is_dir());
    let own = files.into_iter().filter(|path| path.extension().is_some_and(|kind| kind == "rs"));
    own.chain(folders.iter().flat_map(|folder| sources(folder))).collect()
}

fn crate_paths(file: &Path) -> Vec<String> {
    let source = std::fs::read_to_string(file).expect("a source");
    let place = file.strip_prefix(env!("CARGO_MANIFEST_DIR")).expect("inside the package");
    paths_in(&source, place)
}

/// Without comments.
fn code(source: &str) -> String {
    source.lines().flat_map(|line| [line.split("//").next().expect("a first piece"), "\n"]).collect()
}

/// What a source names from the root of the crate on, `super` resolved and braces spread out. Comments do not count.
fn paths_in(source: &str, place: &Path) -> Vec<String> {
    let code = code(source);
    // The module that the file is, from `src` on.
    let mut module: Vec<&str> = place.iter().skip(1).map(|part| part.to_str().expect("UTF-8")).collect();
    let name = module.pop().expect("a file").trim_end_matches(".rs");
    if name != "mod" && name != "lib" {
        module.push(name);
    }
    let mut found = Vec::new();
    for (root, depth) in [("crate::", None), ("super::", Some(1)), ("super::super::", Some(2))] {
        for (at, _) in code.match_indices(root) {
            let before = code[..at].chars().next_back();
            let starts = before.is_none_or(|c| !c.is_alphanumeric() && c != '_' && c != ':' && c != '$');
            let rest = &code[at + root.len()..];
            if !starts || rest.starts_with("super::") {
                continue;
            }
            let prefix = match depth {
                None => String::new(),
                Some(up) if up <= module.len() => {
                    module[..module.len() - up].iter().map(|part| format!("{part}::")).collect()
                }
                Some(_) => continue,
            };
            spread(&prefix, rest, &mut found);
        }
    }
    found
}

/// `ops::{pack, verify::cpu}` is `ops::pack` and `ops::verify::cpu`. Returns what follows the path.
fn spread<'s>(prefix: &str, rest: &'s str, found: &mut Vec<String>) -> &'s str {
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_' && c != ':').unwrap_or(rest.len());
    let (path, mut rest) = rest.split_at(end);
    let prefix = format!("{prefix}{path}");
    if !rest.starts_with('{') {
        found.push(prefix.trim_end_matches("::").to_owned());
        return rest;
    }
    rest = &rest[1..];
    loop {
        rest = rest.trim_start();
        if let Some(after) = rest.strip_prefix('}') {
            return after;
        }
        if rest.is_empty() {
            return rest;
        }
        let after = spread(&prefix, rest, found);
        // Renames, globs and separators.
        rest = after.trim_start_matches(|c: char| c != ',' && c != '}' && c != '{');
        rest = rest.strip_prefix(',').unwrap_or(rest);
    }
}
