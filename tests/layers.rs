//! Who may import whom, as docs/architecture.md has it: upper floors read lower ones, files import each other in no circle, and
//! nobody reads a family's backend but the family. A way that architecture.md walks is a chain of imports.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The floors of `src`, each with those that it may read beside itself.
const FLOORS: [(&str, &[&str]); 7] = [
    ("abi", &[]),
    ("core", &["abi"]),
    ("runtime", &["abi", "core"]),
    ("ops", &["abi", "core", "runtime"]),
    ("kv", &["abi", "core", "runtime", "ops"]),
    ("decode", &["abi", "core", "runtime", "ops", "kv"]),
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

/// A folder whose files import each other in a circle.
const CIRCLES: [&str; 0] = [];

#[test]
fn files_import_each_other_in_no_circle() {
    let mut left = imports();
    left.retain(|file, _| !CIRCLES.iter().any(|folder| file.starts_with(folder)));
    // What imports no file that is left is in no circle.
    loop {
        let files: BTreeSet<String> = left.keys().cloned().collect();
        let before = left.len();
        left.retain(|_, imported| imported.iter().any(|file| files.contains(file)));
        if left.len() == before {
            break;
        }
    }
    // Nor is what nothing imports.
    loop {
        let imported: BTreeSet<String> = left.values().flatten().cloned().collect();
        let before = left.len();
        left.retain(|file, _| imported.contains(file));
        if left.len() == before {
            break;
        }
    }
    assert!(left.is_empty(), "files that import each other in a circle: {left:#?}");
}

/// What a family shows of its backend beside `Kernels`, which `FAMILIES` lists: file, re-export.
const SHOWN: [(&str, &str); 3] = [
    // Verify and pack are one kernel where they are one call.
    ("ops/verify/mod.rs", "use cpu::run as on_cpu;"),
    ("ops/verify/mod.rs", "use cuda::{ByToken, EndParams, Kernels, Params, run_before, tiles};"),
    // The predictor selects with top-k's device code.
    ("ops/topk/mod.rs", "use cuda::Clusters;"),
];

#[test]
fn families_re_export_their_kernels_and_nothing_else_of_a_backend() {
    let mut found = Vec::new();
    for file in sources(&root()) {
        let place = place(&file);
        for line in code(&std::fs::read_to_string(&file).expect("a source")).lines().map(str::trim) {
            let Some(at) = line.find("use ").filter(|_| line.starts_with("pub")) else { continue };
            let path = &line[at..];
            let is_backend = ["cpu", "cuda", "device", "engine"].iter().any(|backend| {
                path.starts_with(&format!("use {backend}::")) || path.starts_with(&format!("use self::{backend}::"))
            });
            let is_shown = path == "use cuda::Kernels;" || path == "use device::Kernels;";
            // Inside a backend files show each other what they like, and the runtime's backends are everybody's.
            let is_family = place.ends_with("/mod.rs") && !place.contains("/cuda/") && !place.contains("/cpu/");
            if is_backend && is_family && !place.starts_with("runtime") && !is_shown && !SHOWN.contains(&(&place, path))
            {
                found.push(format!("{place}: {path}"));
            }
        }
    }
    assert!(found.is_empty(), "re-exports of backends:\n{}", found.join("\n"));
}

/// Ways of architecture.md: under "## One call's way" and its like, numbered lines that begin with a file in backticks.
#[test]
fn ways_of_the_architecture_are_chains_of_imports() {
    let page = std::fs::read_to_string(root().join("../docs/architecture.md")).expect("the page");
    let imports = imports();
    let (mut found, mut ways, mut last) = (Vec::new(), 0, None::<String>);
    for line in page.lines() {
        let number = line.split_once(". `").and_then(|(number, rest)| Some((number.parse::<u32>().ok()?, rest)));
        let Some((number, rest)) = number else { continue };
        let file = rest.split('`').next().expect("a first piece");
        if !root().join("..").join(file).exists() {
            found.push(format!("{file} does not exist"));
        }
        let before = last.replace(file.to_owned()).filter(|_| number > 1);
        ways += (number == 1) as usize;
        if number > 6 && file.ends_with(".rs") {
            found.push(format!("{file} is file {number} of a way; at most 6 are the host's"));
        }
        let Some(before) = before else { continue };
        let is_linked = match (before.strip_prefix("src/"), file.strip_prefix("src/")) {
            (Some(before), Some(file)) => reads(&imports, before, file),
            // A kernel: the file before names its source.
            (Some(before), None) => names_source(before, file),
            // The header is made of src/capi; kernels are followed by what they include.
            (None, _) => true,
        };
        if !is_linked {
            found.push(format!("{before} does not import {file}"));
        }
    }
    assert!(found.is_empty(), "docs/architecture.md:\n{}", found.join("\n"));
    assert!(ways > 0, "docs/architecture.md has no numbered way");
}

/// Whether a file imports another, or declares it as a module.
fn reads(imports: &BTreeMap<String, BTreeSet<String>>, from: &str, to: &str) -> bool {
    imports[from].contains(to) || children(from).contains(to)
}

/// Whether a file, or the module that it is in, names a kernel's source: `source!("select/axes", …)`.
fn names_source(file: &str, kernel: &str) -> bool {
    let name = kernel.trim_start_matches("kernels/").trim_end_matches(".cu");
    let folder = Path::new(file).parent().expect("a folder");
    let family = ["mod.rs", "cuda.rs"].map(|name| folder.join(name)).map(|path| root().join(path));
    let above = [root().join(file), root().join(folder.with_extension("rs"))];
    let named = |path: &PathBuf| std::fs::read_to_string(path).is_ok_and(|text| text.contains(&format!("\"{name}\"")));
    family.iter().chain(&above).any(named)
}

/// Files of `src`, each with those that it imports. Imports of a parent module count for none: a child uses its types. Tests
/// inside a file do not count.
fn imports() -> BTreeMap<String, BTreeSet<String>> {
    let files: BTreeSet<String> = sources(&root()).iter().map(|file| place(file)).collect();
    let file_of = |path: &str| {
        let parts: Vec<&str> = path.split("::").collect();
        (1..=parts.len()).rev().find_map(|n| {
            let stem = parts[..n].join("/");
            [format!("{stem}.rs"), format!("{stem}/mod.rs")].into_iter().find(|file| files.contains(file))
        })
    };
    let imported = |file: &String| {
        let source = std::fs::read_to_string(root().join(file)).expect("a source");
        let source = source.split("#[cfg(test)]\nmod tests").next().expect("a first piece");
        let paths = paths_in(source, &Path::new("src").join(file));
        paths.iter().filter_map(|path| file_of(path)).filter(|other| !is_above(other, file)).collect()
    };
    files.iter().map(|file| (file.clone(), imported(file))).collect()
}

/// Whether a file is that of a module which another file is in, or that file itself.
fn is_above(file: &str, other: &str) -> bool {
    let module = |file: &str| file.trim_end_matches(".rs").trim_end_matches("/mod").to_owned();
    format!("{}/", module(other)).starts_with(&format!("{}/", module(file)))
}

/// The files of the modules that a file declares.
fn children(file: &str) -> BTreeSet<String> {
    let source = code(&std::fs::read_to_string(root().join(file)).expect("a source"));
    let folder = file.trim_end_matches("mod.rs").trim_end_matches(".rs").trim_end_matches('/');
    let words =
        source.lines().filter_map(|line| line.trim().strip_suffix(';')?.split_once("mod ").map(|(_, name)| name));
    words.flat_map(|name| [format!("{folder}/{name}.rs"), format!("{folder}/{name}/mod.rs")]).collect()
}

/// A file's path from `src` on.
fn place(file: &Path) -> String {
    file.strip_prefix(root()).expect("inside src").to_str().expect("UTF-8").to_owned()
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
