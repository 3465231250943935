//! The text of a PTX module, cut into variables, functions and statements.

use std::collections::HashMap;

/// The error says what went wrong, and where.
pub type Parsed<T> = Result<T, String>;

#[derive(Default)]
pub struct Module {
    pub functions: HashMap<String, Function>,
    /// Variables that are declared outside functions.
    pub variables: Vec<Variable>,
}

/// Registers of a multiprocessor, which the CTAs that are to run on it at once share.
const MULTIPROCESSOR_REGISTERS: u32 = 65536;

pub struct Function {
    pub is_entry: bool,
    pub results: Vec<Variable>,
    pub parameters: Vec<Variable>,
    pub body: Vec<Statement>,
    /// The threads of a CTA that the kernel's launch bounds allow.
    pub most_threads: u32,
    /// The registers of a thread that they leave: what ptxas gives a kernel whose warps take and give registers (setmaxnreg).
    pub registers: u32,
}

#[derive(Clone, Debug)]
pub struct Variable {
    /// `.shared`, `.global`, `.param`, …
    pub space: String,
    pub name: String,
    pub align: u64,
    pub bytes: u64,
    /// The launch says how large it is.
    pub is_dynamic: bool,
    pub value: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Statement {
    Open,
    Close,
    Label(String),
    /// `.reg`, `.shared`, …
    Declaration(String),
    Instruction {
        text: String,
        line: u32,
    },
}

/// Removes comments; lines stay where they are.
fn strip(text: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find('/') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        if rest.starts_with("//") {
            rest = &rest[rest.find('\n').unwrap_or(rest.len())..];
        } else if rest.starts_with("/*") {
            let end = rest.find("*/").map_or(rest.len(), |end| end + 2);
            out.extend(rest[..end].chars().filter(|&c| c == '\n'));
            rest = &rest[end..];
        } else {
            out.push('/');
            rest = &rest[1..];
        }
    }
    out + rest
}

/// A place in the text.
struct Cursor<'t> {
    text: &'t str,
    at: usize,
    line: u32,
}

impl<'t> Cursor<'t> {
    fn rest(&self) -> &'t str {
        &self.text[self.at..]
    }
    fn advance(&mut self, bytes: usize) -> &'t str {
        let passed = &self.text[self.at..self.at + bytes];
        self.line += passed.bytes().filter(|&c| c == b'\n').count() as u32;
        self.at += bytes;
        passed
    }
    fn skip_space(&mut self) {
        let rest = self.rest();
        self.advance(rest.len() - rest.trim_start().len());
    }
    /// Up to one of these characters, which stays.
    fn until(&mut self, ends: &[char]) -> Parsed<&'t str> {
        let end = self.rest().find(ends).ok_or_else(|| format!("line {}: no {ends:?} follows", self.line))?;
        Ok(self.advance(end))
    }
}

pub fn module(text: &str) -> Parsed<Module> {
    let text = strip(text);
    let mut cursor = Cursor { text: &text, at: 0, line: 1 };
    let mut module = Module::default();
    loop {
        cursor.skip_space();
        if cursor.rest().is_empty() {
            return Ok(module);
        }
        // A directive of one line, a declaration up to its semicolon, a function up to its body.
        let word = cursor.rest().split_whitespace().next().unwrap_or_default();
        if [".version", ".target", ".address_size"].contains(&word) {
            cursor.until(&['\n'])?;
            continue;
        }
        let head = cursor.until(&[';', '{'])?.to_owned();
        if head.contains(".entry") || head.contains(".func") {
            let is_defined = cursor.rest().starts_with('{');
            cursor.advance(1);
            if is_defined {
                let (name, function) = function(&head, &mut cursor)?;
                module.functions.insert(name, function);
            }
        } else {
            // An initialiser may stand in braces.
            let head = head + cursor.until(&[';'])?;
            cursor.advance(1);
            module.variables.push(variable(&head)?);
        }
    }
}

fn function(head: &str, cursor: &mut Cursor) -> Parsed<(String, Function)> {
    let is_entry = head.contains(".entry");
    let after = head.split_once(if is_entry { ".entry" } else { ".func" }).expect("one of them").1.trim_start();
    let (results, after) = match after.strip_prefix('(') {
        Some(inside) => inside.split_once(')').ok_or("results of a function have no end")?,
        None => ("", after),
    };
    let (name, after) = after.split_once('(').unwrap_or((after, ")"));
    let (parameters, bounds) = after.split_once(')').ok_or("parameters of a function have no end")?;
    let list =
        |text: &str| text.split(',').filter(|one| !one.trim().is_empty()).map(variable).collect::<Parsed<Vec<_>>>();
    let numbers = |name: &str, count: usize| {
        bounds.split_once(name).map(|(_, numbers)| {
            let words = numbers.split(|c: char| !c.is_ascii_digit()).filter(|word| !word.is_empty()).take(count);
            words.map(|word| word.parse::<u32>().unwrap_or(1)).product::<u32>()
        })
    };
    let most_threads = numbers(".maxntid", 3).unwrap_or(1024);
    let threads_at_once = most_threads.saturating_mul(numbers(".minnctapersm", 1).unwrap_or(1)).max(1);
    let registers = (MULTIPROCESSOR_REGISTERS / threads_at_once).min(255) / 8 * 8;
    let (results, parameters) = (list(results)?, list(parameters)?);
    Ok((
        name.trim().to_owned(),
        Function { is_entry, results, parameters, body: body(cursor)?, most_threads, registers },
    ))
}

/// `.shared .align 4 .b8 name[16]`, with or without size and value.
pub fn variable(text: &str) -> Parsed<Variable> {
    let (declared, value) = text.split_once('=').map_or((text, None), |(a, b)| (a, Some(b.trim().to_owned())));
    let mut words = declared.split_whitespace().peekable();
    let (mut space, mut align, mut element, mut name) = (String::new(), 0, 0, "");
    while let Some(word) = words.next() {
        match word {
            ".align" => {
                align =
                    words.next().and_then(|n| n.parse().ok()).ok_or_else(|| format!("{text:?} lacks an alignment"))?
            }
            ".shared" | ".global" | ".param" | ".const" | ".local" => space = word.to_owned(),
            ".visible" | ".extern" | ".weak" | ".ptr" => (),
            _ if word.starts_with('.') => {
                element = bytes_of(&word[1..]).ok_or_else(|| format!("{text:?}: what is {word}?"))?
            }
            _ => name = word,
        }
    }
    let (name, count) = match name.split_once('[') {
        Some((name, count)) => (name, count.trim_end_matches(']').parse().ok()),
        None => (name, Some(1)),
    };
    let bytes = count.unwrap_or(0) * element;
    Ok(Variable { space, name: name.to_owned(), align: align.max(element), bytes, is_dynamic: count.is_none(), value })
}

/// Bytes of a type such as `b32`.
pub fn bytes_of(kind: &str) -> Option<u64> {
    if kind == "pred" {
        return Some(1);
    }
    let bits: u64 = kind.get(1..)?.parse().ok()?;
    "busf".contains(&kind[..1]).then_some(bits / 8)
}

/// The statements up to the brace that ends the function.
fn body(cursor: &mut Cursor) -> Parsed<Vec<Statement>> {
    let (mut statements, mut depth) = (Vec::new(), 1);
    while depth > 0 {
        cursor.skip_space();
        let (rest, line) = (cursor.rest(), cursor.line);
        let name = rest.find(|c: char| !c.is_alphanumeric() && !"_$%".contains(c)).unwrap_or(rest.len());
        match rest.as_bytes().first() {
            None => return Err("the file ends inside a function".into()),
            Some(b'{') => {
                cursor.advance(1);
                depth += 1;
                statements.push(Statement::Open);
            }
            Some(b'}') => {
                cursor.advance(1);
                depth -= 1;
                statements.push(Statement::Close);
            }
            Some(b';') => {
                cursor.advance(1);
            }
            _ if name > 0 && rest[name..].starts_with(':') && !rest[name..].starts_with("::") => {
                statements.push(Statement::Label(rest[..name].to_owned()));
                cursor.advance(name + 1);
            }
            Some(b'.') => {
                statements.push(Statement::Declaration(cursor.until(&[';'])?.to_owned()));
                cursor.advance(1);
            }
            _ => {
                let text = cursor.until(&[';'])?.split_whitespace().collect::<Vec<_>>().join(" ");
                statements.push(Statement::Instruction { text, line });
                cursor.advance(1);
            }
        }
    }
    statements.pop();
    Ok(statements)
}

/// Operands of an instruction, cut at the commas outside brackets.
pub fn operands(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut begin) = (Vec::new(), 0, 0);
    for (at, c) in text.char_indices() {
        match c {
            '{' | '[' | '(' => depth += 1,
            '}' | ']' | ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(text[begin..at].trim());
                begin = at + 1;
            }
            _ => (),
        }
    }
    if !text[begin..].trim().is_empty() {
        parts.push(text[begin..].trim());
    }
    parts
}
