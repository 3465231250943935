//! THIRD-PARTY: whose code the library links, and on what terms. `make notices` writes it from Cargo.lock and the crates' own files.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

const PLATFORM: &str = "x86_64-unknown-linux-gnu";

const HEAD: &str = "\
Third-party notices

libvanward is licensed under the Apache License 2.0; see LICENSE. It holds compiled code of the crates below, whose sources are at
https://crates.io/crates/NAME/VERSION, and of Rust's standard library (MIT or Apache-2.0, https://github.com/rust-lang/rust).
";

/// The text for crates that name MIT as their licence and come without it.
const MIT: &str = "\
Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated documentation files
(the \"Software\"), to deal in the Software without restriction, including without limitation the rights to use, copy, modify, merge,
publish, distribute, sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is furnished to do
so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED \"AS IS\", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF
MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE
FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN
CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
";

struct Crate {
    name: String,
    licence: String,
    authors: Vec<String>,
    folder: PathBuf,
}

impl Crate {
    /// Apache-2.0, whose text LICENSE is, wherever it is among what the crate offers.
    fn is_under_apache(&self) -> bool {
        self.licence.split(" OR ").any(|offered| offered == "Apache-2.0")
    }

    /// Texts of its files whose names begin with one of `stems`, in the order of their names.
    fn texts(&self, stems: &[&str]) -> Vec<String> {
        let entries = std::fs::read_dir(&self.folder).unwrap_or_else(|error| panic!("{:?}: {error}", self.folder));
        let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
        files.retain(|path| {
            let name = path.file_name().expect("a name").to_string_lossy().to_uppercase();
            path.is_file() && stems.iter().any(|stem| name.starts_with(stem))
        });
        files.sort();
        files.iter().map(|path| tidy(&std::fs::read_to_string(path).expect("a text"))).collect()
    }

    fn holders(&self) -> String {
        if self.authors.is_empty() {
            return format!("the authors of {}", self.name);
        }
        self.authors.join(", ").replace(" <>", "")
    }

    /// What has to be told beside its name and licence.
    fn notices(&self) -> Vec<String> {
        if self.is_under_apache() {
            return self.texts(&["NOTICE"]);
        }
        let found = self.texts(&["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "UNLICENSE", "NOTICE"]);
        // COPYING.X is of a part that the crate has from X.
        if self.texts(&["LICENSE", "LICENCE"]).is_empty() {
            assert_eq!(self.licence, "MIT", "{} comes without the text of its licence", self.name);
            let whose = format!("Copyright (c) {}\n\n{MIT}", self.holders());
            return std::iter::once(whose).chain(found).collect();
        }
        found
    }
}

fn tidy(text: &str) -> String {
    let lines: Vec<&str> = text.trim_matches('\u{feff}').lines().map(str::trim_end).collect();
    format!("{}\n", lines.join("\n").trim_matches('\n'))
}

fn cargo(arguments: &[&str]) -> String {
    let made = Command::new(env!("CARGO")).current_dir(root()).args(arguments).output().expect("cargo");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    String::from_utf8(made.stdout).expect("UTF-8")
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The crates that are linked into the library, by name.
fn linked() -> Vec<Crate> {
    let edges = "normal,no-proc-macro";
    let own = env!("CARGO_PKG_NAME");
    let tree =
        cargo(&["tree", "--locked", "-p", own, "-e", edges, "--target", PLATFORM, "--prefix", "none", "-f", "{p}"]);
    let metadata = cargo(&["metadata", "--locked", "--format-version", "1", "--filter-platform", PLATFORM]);
    let metadata: serde_json::Value = serde_json::from_str(&metadata).expect("JSON");
    let mut found = BTreeMap::new();
    for package in metadata["packages"].as_array().expect("packages") {
        let text = |key: &str| package[key].as_str().unwrap_or_default().to_owned();
        let name = format!("{} v{}", text("name"), text("version"));
        let authors = package["authors"].as_array().expect("authors");
        let made = Crate {
            name: name.clone(),
            licence: text("license").replace('/', " OR "),
            authors: authors.iter().map(|author| author.as_str().expect("a name").to_owned()).collect(),
            folder: Path::new(&text("manifest_path")).parent().expect("a folder").to_owned(),
        };
        found.insert(name, made);
    }
    let own = concat!(env!("CARGO_PKG_NAME"), " v", env!("CARGO_PKG_VERSION"));
    let mut names: Vec<&str> = tree.lines().map(|line| line.trim_end_matches(" (*)")).collect();
    names.retain(|name| !name.starts_with(own));
    names.sort_unstable();
    names.dedup();
    names.into_iter().map(|name| found.remove(name).unwrap_or_else(|| panic!("{name} has no package"))).collect()
}

fn notices() -> String {
    let (apache, others): (Vec<Crate>, Vec<Crate>) = linked().into_iter().partition(Crate::is_under_apache);
    let mut made = format!("{HEAD}\nUnder the Apache License 2.0, the text of which is LICENSE:\n\n");
    for one in &apache {
        writeln!(made, "  {}", one.name).expect("a String");
    }
    // Crates of one repository share their texts.
    let mut texts: Vec<(Vec<String>, Vec<String>)> = Vec::new();
    for one in apache.iter().chain(&others) {
        let (name, notices) = (format!("{} ({})", one.name, one.licence), one.notices());
        match texts.iter_mut().find(|(_, same)| *same == notices) {
            _ if notices.is_empty() => {}
            Some((names, _)) => names.push(name),
            None => texts.push((vec![name], notices)),
        }
    }
    for (names, notices) in texts {
        write!(made, "\n{}\n{}\n\n{}", "=".repeat(80), names.join("\n"), notices.join("\n")).expect("a String");
    }
    made
}

#[test]
fn notices_name_every_crate_that_is_linked() {
    let (file, made) = (root().join("THIRD-PARTY"), notices());
    if std::env::var_os("VANWARD_WRITE_NOTICES").is_some() {
        std::fs::write(&file, &made).expect("THIRD-PARTY is written");
    }
    let committed = std::fs::read_to_string(&file).expect("THIRD-PARTY");
    assert!(committed == made, "THIRD-PARTY is stale: run `make notices` and commit it");
}
