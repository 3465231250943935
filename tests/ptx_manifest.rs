//! The committed PTX is what the sources in `kernels/` say, now and in every commit: checked without a GPU, a compiler or Python.

#[allow(dead_code)]
#[path = "../build.rs"]
mod build;

use build::{expanded, for_8_0};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

const REMEDY: &str = "run `make kernels` and commit kernels/";

/// Drivers from 550 on load this instruction set and older ones.
const NEWEST_PTX_ISA: (u32, u32) = (8, 4);

/// The first commit whose manifest has a line for each PTX file.
const FIRST_COMMIT: &str = "Keep machine code out of git";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// What lies in `kernels/` and is committed.
#[derive(Default)]
struct Files {
    /// Sources, `build.py` and `ptx/manifest.json`, by their paths inside `kernels/`.
    texts: BTreeMap<String, String>,
    /// PTX file, by its name in the manifest → hash, and that of what a file of compute_90 is for compute_80.
    ptx: BTreeMap<String, (String, String)>,
}

impl Files {
    /// `read` reads the file and returns what the function passed to it makes of its bytes.
    fn add(&mut self, name: &str, read: impl FnOnce(fn(&[u8]) -> String) -> String) {
        let is_source = (name.ends_with(".cu") || name.ends_with(".cuh")) && name.matches('/').count() == 1;
        if let Some(ptx) = name.strip_prefix("ptx/").and_then(|name| name.strip_suffix(".ptx")) {
            let hashes = read(|ptx| format!("{} {}", sha256(ptx), sha256(for_8_0(&utf8(ptx)).as_bytes())));
            let (own, older) = hashes.split_once(' ').expect("two hashes");
            self.ptx.insert(ptx.to_owned(), (own.to_owned(), older.to_owned()));
        } else if is_source || name == "build.py" || name == "ptx/manifest.json" {
            self.texts.insert(name.to_owned(), read(utf8));
        }
    }

    /// The hash of a PTX file, or of what is made of that for compute_90 where there is none.
    fn hash(&self, name: &str) -> Option<String> {
        let newer = || self.ptx.get(&newer(name)).map(|(_, older)| older);
        self.ptx.get(name).map(|(own, _)| own).or_else(newer).cloned()
    }

    fn text(&self, name: &str) -> &str {
        self.texts.get(name).unwrap_or_else(|| panic!("there is no kernels/{name}"))
    }
}

fn newer(name: &str) -> String {
    name.replace(".compute_80", ".compute_90")
}

fn sha256(data: &[u8]) -> String {
    Sha256::digest(data).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn utf8(data: &[u8]) -> String {
    String::from_utf8(data.to_vec()).expect("UTF-8")
}

fn working_tree() -> Files {
    let (kernels, mut files) = (root().join("kernels"), Files::default());
    let mut folders = vec![kernels.clone()];
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(&folder).expect("the folder exists").map(|entry| entry.expect("an entry").path())
        {
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(&kernels).expect("inside").to_string_lossy();
                files.add(&name, |summary| summary(&std::fs::read(&path).expect("readable")));
            }
        }
    }
    files
}

/// The source and the headers that it includes, directly or through others.
fn included<'f>(files: &'f Files, source: &'f str) -> BTreeSet<&'f str> {
    let (mut found, mut open) = (BTreeSet::from([source]), vec![source]);
    while let Some(name) = open.pop() {
        let headers = files.text(name).lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"'));
        open.extend(headers.filter(|header| found.insert(header)));
    }
    found
}

/// As `without_comments` in build.py: a line that has a quotation mark before its comment keeps the comment.
fn without_comments(source: &str) -> String {
    let lines = source.lines().map(|line| {
        let code = line.split("//").next().expect("the part before the first separator");
        if code.contains('"') { line.trim() } else { code.trim() }
    });
    lines.filter(|line| !line.is_empty()).flat_map(|line| [line, "\n"]).collect()
}

/// As `inputs` in build.py: the hash of everything that the PTX follows from.
fn inputs(files: &Files, manifest: &Value, source: &str, target: &str) -> String {
    let mut all = String::new();
    for (package, version) in manifest["compiler"].as_object().expect("the compiler's packages") {
        all += &format!("{package}=={}\n", version.as_str().expect("a version"));
    }
    for flag in manifest["flags"].as_array().expect("the flags") {
        all += &format!("{}\n", flag.as_str().expect("a flag"));
    }
    all += &format!("{target}\n");
    for name in included(files, source) {
        all += &format!("// {name}\n{}", without_comments(files.text(name)));
    }
    sha256(all.as_bytes())
}

/// Name in the manifest → source and target of each PTX file that the sources ask for.
fn wanted(files: &Files) -> BTreeMap<String, (&str, &str)> {
    let mut wanted = BTreeMap::new();
    for source in files.texts.keys().filter(|name| name.ends_with(".cu")) {
        let targets = files.text(source).lines().find_map(|line| line.strip_prefix("// targets: "));
        for target in targets.unwrap_or_else(|| panic!("{source} has no line \"// targets: …\"")).split(',') {
            let name = format!("{}.{}", source.strip_suffix(".cu").expect("a source"), target.trim());
            wanted.insert(name, (source.as_str(), target.trim()));
        }
    }
    wanted
}

/// What the manifest says that the sources or the PTX do not; empty when they agree.
fn disagreements(files: &Files) -> Vec<String> {
    let manifest: Value = serde_json::from_str(files.text("ptx/manifest.json")).expect("the manifest is JSON");
    let mut found = Vec::new();
    let mut compare = |what: String, recorded: &Value, is: String| {
        if recorded.as_str() != Some(&is) {
            found.push(format!("{what} is not what the manifest says"));
        }
    };
    compare("build.py".to_owned(), &manifest["build.py"], sha256(files.text("build.py").as_bytes()));
    let wanted = wanted(files);
    for (name, (source, target)) in &wanted {
        let line = &manifest["ptx"][name];
        compare(format!("what {name} is compiled from"), &line["inputs"], inputs(files, &manifest, source, target));
        compare(format!("ptx/{name}.ptx"), &line["ptx"], files.hash(name).unwrap_or_default());
    }
    let listed = manifest["ptx"].as_object().expect("a line for each PTX file").keys();
    let surplus = listed.chain(files.ptx.keys()).filter(|name| !wanted.contains_key(*name));
    found.extend(surplus.map(|name| format!("no source asks for {name}")));
    found
}

#[test]
fn ptx_was_compiled_from_these_sources() {
    let found = disagreements(&working_tree());
    assert!(found.is_empty(), "{REMEDY}:\n{}", found.join("\n"));
}

#[test]
fn a_comment_does_not_change_what_ptx_is_compiled_from() {
    let code = without_comments("#include \"a.cuh\" // one\n\n  int x;  // two\n// three\n");
    assert_eq!(code, "#include \"a.cuh\" // one\nint x;\n");
}

#[test]
fn a_kernel_that_both_targets_share_is_read_from_the_newer_file() {
    let newer = ".target sm_90\n.visible .entry a(\ngriddepcontrol.wait;\nret;\n}\n.visible .entry ab(\nexit;\n}\n";
    let kept = ".target sm_80\n.visible .entry b(\n}\n// .entry ab\n// .entry a\n";
    let whole = ".target sm_80\n.visible .entry b(\n}\n.visible .entry ab(\nexit;\n}\n.visible .entry a(\nret;\n}\n";
    assert_eq!(expanded(kept, newer), whole);
}

/// What git prints, or nothing where there is no git or no history.
fn git(arguments: &[&str]) -> Option<Vec<u8>> {
    let output = Command::new("git").arg("-C").arg(root()).args(arguments).output().ok()?;
    output.status.success().then_some(output.stdout)
}

fn lines_of_git(arguments: &[&str]) -> Option<Vec<String>> {
    Some(String::from_utf8(git(arguments)?).expect("UTF-8").lines().map(str::to_owned).collect())
}

/// `read_before` keeps what was read of each blob, by its id: most commits share most files.
fn files_of(commit: &str, read_before: &mut BTreeMap<String, String>) -> Files {
    let mut files = Files::default();
    for line in lines_of_git(&["ls-tree", "-r", "--full-tree", commit, "kernels/"]).expect("a commit has a tree") {
        let (attributes, name) = line.split_once('\t').expect("mode, kind and id, then the name");
        let id = attributes.rsplit(' ').next().expect("the id");
        files.add(name.strip_prefix("kernels/").expect("what was asked for"), |summary| {
            let read = || summary(&git(&["cat-file", "blob", id]).expect("a blob that the tree names"));
            read_before.entry(id.to_owned()).or_insert_with(read).clone()
        });
    }
    files
}

#[test]
fn every_commit_carries_the_ptx_of_its_sources() {
    let subject = format!("--grep=^{FIRST_COMMIT}$");
    let first = lines_of_git(&["log", "-1", "--format=%H", &subject]).and_then(|found| found.first().cloned());
    let Some(first) = first else {
        return println!("skipped: no git history that holds the commit \"{FIRST_COMMIT}\"");
    };
    let range = format!("{first}..HEAD");
    let mut commits =
        lines_of_git(&["log", "--format=%h", &range, "--", "kernels"]).expect("the commit is in the history");
    commits.push(first);
    let mut read_before = BTreeMap::new();
    commits.retain(|commit| !disagreements(&files_of(commit, &mut read_before)).is_empty());
    assert!(commits.is_empty(), "the manifest of these commits does not agree with their kernels: {commits:?}");
}

#[test]
fn ptx_loads_on_the_oldest_supported_driver_and_device() {
    let files = working_tree();
    for (name, (_, target)) in wanted(&files) {
        let read = |name: &str| std::fs::read_to_string(root().join(format!("kernels/ptx/{name}.ptx")));
        let ptx = read(&name).or_else(|_| read(&newer(&name)).map(|ptx| for_8_0(&ptx))).expect("listed PTX exists");
        let directive = |key: &str| {
            let line = ptx.lines().find_map(|line| line.strip_prefix(key));
            line.unwrap_or_else(|| panic!("{name} has no {key}")).trim().to_owned()
        };
        let isa = directive(".version");
        let (major, minor) = isa.split_once('.').expect("major.minor");
        let isa = (major.parse().expect("a number"), minor.parse().expect("a number"));
        assert!(isa <= NEWEST_PTX_ISA, "{name} is of PTX ISA {isa:?}; expected at most {NEWEST_PTX_ISA:?}");
        assert_eq!(directive(".target"), target.replace("compute_", "sm_"), "{name}");
    }
}
