//! Comments are sentences: none begins with a genitive whose noun stands elsewhere ("Of the others."), the files that they name
//! exist, and names that were replaced do not come back.

use std::path::{Path, PathBuf};

/// Folders and files whose comments and names have not been rewritten: none.
const EXCEPTIONS: &[&str] = &[];

/// Names that docs/architecture.md replaces: prefilter, caller's threads, groups of 8 channels, pinned in a register.
const REPLACED_NAMES: &[&str] = &["sieve", "sift", "lent", "log_octets", "held"];

const NOUNS_TO_COME: &[&str] =
    &["the", "a", "an", "no", "each", "all", "its", "one", "those", "these", "what", "whole"];

#[test]
fn comments_begin_with_no_genitive_whose_noun_stands_elsewhere() {
    let found: Vec<String> =
        lines().filter(|line| line.begins_comment && is_genitive(line.comment())).map(report).collect();
    assert!(found.is_empty(), "say whose or which:\n{}", found.join("\n"));
}

#[test]
fn files_that_comments_name_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let is_missing = |line: &Line| files_of(line.comment()).any(|file| !root.join(file).exists());
    let found: Vec<String> = lines().filter(is_missing).map(report).collect();
    assert!(found.is_empty(), "no such file:\n{}", found.join("\n"));
    let naming = lines().filter(|line| files_of(line.comment()).next().is_some()).count();
    assert!(naming > 100, "{naming} comments that name a file are too few to be all");
}

#[test]
fn replaced_names_do_not_come_back() {
    let is_replaced = |line: &Line| words(line.code()).any(|word| REPLACED_NAMES.contains(&word));
    let found: Vec<String> = lines().filter(is_replaced).map(report).collect();
    assert!(found.is_empty(), "docs/architecture.md has the word that replaces this one:\n{}", found.join("\n"));
}

#[test]
fn a_genitive_without_its_noun_is_recognised() {
    for text in ["Of the others.", "Of a CTA.", "Of no NaN."] {
        assert!(is_genitive(text), "{text}");
    }
    for text in ["The rows of the others.", "Often the last.", "Of Q rows the first is read."] {
        assert!(!is_genitive(text), "{text}");
    }
}

struct Line {
    file: String,
    number: usize,
    text: String,
    /// The line is a comment, and the line before it is not, or ends a sentence.
    begins_comment: bool,
}

impl Line {
    fn comment(&self) -> &str {
        comment(&self.text).unwrap_or_default()
    }

    fn code(&self) -> &str {
        if comment(&self.text).is_some() { "" } else { self.text.split("//").next().unwrap_or_default() }
    }
}

fn report(line: Line) -> String {
    format!("{}:{}: {}", line.file, line.number, line.text.trim())
}

fn is_genitive(comment: &str) -> bool {
    let mut words = comment.split_whitespace();
    words.next() == Some("Of") && words.next().is_some_and(|word| NOUNS_TO_COME.contains(&word))
}

/// The paths of files, from the root of the repository on, in a comment.
fn files_of(comment: &str) -> impl Iterator<Item = &str> {
    const FOLDERS: [&str; 8] =
        ["src/", "kernels/", "tests/", "docs/", "benches/", "bindings/", "examples/", "integrations/"];
    let words = comment.split(|c: char| !(c.is_alphanumeric() || "_-./<>*".contains(c)));
    let words = words.map(|word| word.trim_end_matches('.')).filter(|word| !word.contains(['<', '*']));
    words.filter(|word| FOLDERS.iter().any(|folder| word.starts_with(folder)) && Path::new(word).extension().is_some())
}

fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !(c.is_alphanumeric() || c == '_'))
}

/// The text of a line that is a comment and nothing else.
fn comment(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let marks = ["///", "//!", "//", "/**", "*/", "* ", "*\n"];
    marks.iter().find_map(|mark| line.strip_prefix(mark)).map(str::trim)
}

fn lines() -> impl Iterator<Item = Line> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    ["src", "kernels", "include"].iter().for_each(|folder| collect(&root.join(folder), &mut files));
    assert!(files.len() > 100, "{} files are too few to be all", files.len());
    files.into_iter().flat_map(move |path| {
        let file = path.strip_prefix(root).expect("a file of the repository").display().to_string();
        let is_exception = EXCEPTIONS.iter().any(|exception| file.starts_with(exception));
        let text = if is_exception { String::new() } else { std::fs::read_to_string(&path).expect("a source") };
        let mut ended = true;
        let lines = text.lines().enumerate().map(|(n, line)| {
            let begins_comment = comment(line).is_some() && ended;
            ended = comment(line).is_none_or(|text| text.is_empty() || text.ends_with(['.', ':']));
            Line { file: file.clone(), number: n + 1, text: line.to_owned(), begins_comment }
        });
        lines.collect::<Vec<_>>()
    })
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|e| ["rs", "cu", "cuh", "h"].iter().any(|known| e == *known)) {
            files.push(path);
        }
    }
}
