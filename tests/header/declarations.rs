//! The constants, structs, functions and comments of the header, read back from its text.

pub struct Struct {
    pub name: String,
    pub fields: Vec<Field>,
}

pub struct Field {
    pub name: String,
    /// As C writes it, "const vwd_tensor *" for a pointer.
    pub c_type: String,
    /// The length of an array; absent for anything else.
    pub length: Option<usize>,
}

pub struct Function {
    pub name: String,
    pub result: String,
    /// Their types.
    pub parameters: Vec<String>,
}

/// Each `#define NAME number`.
pub fn constants(header: &str) -> Vec<(String, u32)> {
    let constant = |line: &str| {
        let (name, value) = line.strip_prefix("#define ")?.split_once(' ')?;
        Some((name.to_owned(), value.parse().ok()?))
    };
    header.lines().filter_map(constant).collect()
}

pub fn structs(header: &str) -> Vec<Struct> {
    let mut structs = Vec::new();
    for part in header.split("typedef struct {\n").skip(1) {
        let (body, rest) = part.split_once("\n} ").expect("the end of a struct");
        let name = rest.split_once(';').expect("the name of a struct").0;
        structs.push(Struct { name: name.to_owned(), fields: body.lines().filter_map(field).collect() });
    }
    structs
}

fn field(line: &str) -> Option<Field> {
    let code = line.trim_start().strip_suffix(';').filter(|code| code.starts_with(char::is_alphabetic))?;
    let (code, length) = match code.split_once('[') {
        Some((code, length)) => (code, Some(length.trim_end_matches(']').parse().expect("a length"))),
        None => (code, None),
    };
    let (c_type, name) = typed(code);
    Some(Field { name, c_type, length })
}

pub fn functions(header: &str) -> Vec<Function> {
    let mut functions = Vec::new();
    for part in header.split("\nVWD_API").skip(1) {
        let (head, rest) = part.split_once('(').expect("a function");
        let (result, name) = typed(head);
        let parameters = rest.split_once(");").expect("the end of a function").0;
        let parameters = parameters.split(',').filter(|one| *one != "void").map(|one| typed(one).0).collect();
        functions.push(Function { name, result, parameters });
    }
    functions
}

/// "const vwd_tensor *rows" is of type "const vwd_tensor *" and named "rows".
fn typed(code: &str) -> (String, String) {
    let code = code.trim();
    let at = code.rfind([' ', '*']).expect("a type") + 1;
    (code[..at].trim_end().to_owned(), code[at..].to_owned())
}

/// The comment of each function and struct, by name, without its asterisks.
pub fn comments(header: &str) -> Vec<(String, String)> {
    let mut comments = Vec::new();
    let mut rest = header;
    while let Some((_, found)) = rest.split_once("/**") {
        let (comment, code) = found.split_once("*/").expect("the end of a comment");
        if let Some(name) = commented(code.trim_start()) {
            let lines = comment.trim().lines().map(|line| {
                let line = line.trim_start();
                line.strip_prefix("* ").or(line.strip_prefix('*')).unwrap_or(line)
            });
            comments.push((name, lines.collect::<Vec<_>>().join("\n")));
        }
        rest = code;
    }
    comments
}

fn commented(code: &str) -> Option<String> {
    if let Some(function) = code.strip_prefix("VWD_API") {
        return Some(typed(function.split_once('(')?.0).1);
    }
    let body = code.strip_prefix("typedef struct {\n")?;
    Some(body.split_once("\n} ")?.1.split_once(';')?.0.to_owned())
}

/// Arguments under their own names, and what continues their lines as far to the left.
pub fn of_fields(comment: &str) -> String {
    let Some(at) = comment.find("args->") else { return comment.to_owned() };
    let (before, arguments) = comment.split_at(at);
    before.to_owned() + &arguments.replace("args->", "").replace("\n      ", "\n")
}
