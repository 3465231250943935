//! The comments of the Go structs: what stands above each, and under it the header's comment of what it stands for.

use crate::declarations;

/// The source with the header's comments below each first line that names a call or struct of the header.
pub fn with_comments(source: &str, header: &str) -> String {
    let comments = declarations::comments(header);
    let mut made = String::new();
    let mut lines = source.lines().peekable();
    while let Some(line) = lines.next() {
        made += &format!("{line}\n");
        let Some(name) = named(line) else { continue };
        let comment =
            &comments.iter().find(|(of, _)| of == name).unwrap_or_else(|| panic!("{name}: not in the header")).1;
        while lines.next_if(|line| line.starts_with("//")).is_some() {}
        made += "//\n";
        for line in declarations::of_fields(comment).lines() {
            made += format!("//\t{line}").trim_end();
            made += "\n";
        }
    }
    made
}

/// "// VerifyArgs are the arguments of Session.Verify; vwd_verify documents them." or "// Holt is vwd_holt: …".
fn named(line: &str) -> Option<&str> {
    let line = line.strip_prefix("// ")?;
    match line.split_once("; ") {
        Some((_, end)) => end.strip_suffix(" documents them."),
        None => line.split_once(" is vwd_").map(|(before, rest)| {
            let end = rest.find(':').expect("a colon after the struct's name");
            let at = before.len() + " is ".len();
            &line[at..at + "vwd_".len() + end]
        }),
    }
}
