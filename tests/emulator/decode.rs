//! Statements become instructions whose operands are numbers of registers. Calls are laid out in line.

use crate::compute::computed;
use crate::device::Globals;
use crate::instruction::*;
use crate::parse::{Function, Module, Parsed, Statement, Variable, bytes_of, operands, variable};
use crate::races::Order;
use crate::registers;
use crate::values::Class;
use std::collections::HashMap;

#[derive(Clone, Copy, Debug)]
pub enum Symbol {
    Register(Class, u32),
    Shared(u64),
    Global(u64),
    /// A byte of the kernel's parameters.
    Parameter(u64),
    /// A parameter or result of a call, kept in registers.
    Cell(u32),
}

#[derive(Default)]
struct Scope {
    parent: Option<usize>,
    names: HashMap<String, Symbol>,
    families: Vec<(String, Class, u32)>,
    labels: HashMap<String, u32>,
}

pub struct Decoder<'m> {
    module: &'m Module,
    code: Vec<Instruction>,
    roles: Vec<Vec<Role>>,
    scopes: Vec<Scope>,
    /// Instructions that branch to a label, and the scope they stand in.
    jumps: Vec<(usize, usize, String)>,
    registers: [u32; 3],
    constants: Vec<(Constant, u32)>,
    known: HashMap<Constant, u32>,
    pub cells: HashMap<(u32, u64), (Class, u32)>,
    pub cell_sets: u32,
    line: u32,
    /// The bytes that a pragma says are used of the load that follows.
    pub used: Option<u32>,
}

pub fn class_of(kind: &str) -> Parsed<Class> {
    Ok(match bytes_of(kind) {
        _ if kind == "pred" => Class::Predicate,
        Some(1 | 2 | 4) => Class::Word,
        Some(8) => Class::Double,
        _ => return Err(format!("what is .{kind}?")),
    })
}

pub fn kernel(module: &Module, globals: &Globals, name: &str) -> Parsed<Kernel> {
    let function =
        module.functions.get(name).filter(|function| function.is_entry).ok_or_else(|| format!("no kernel {name}"))?;
    let mut decoder = Decoder {
        module,
        code: vec![],
        roles: vec![],
        scopes: vec![Scope::default()],
        jumps: vec![],
        registers: [0; 3],
        constants: vec![],
        known: HashMap::new(),
        cells: HashMap::new(),
        cell_sets: 0,
        line: 0,
        used: None,
    };
    for (name, address) in globals {
        decoder.scopes[0].names.insert(name.clone(), Symbol::Global(*address));
    }
    let (mut parameters, mut end) = (vec![], 0u64);
    for parameter in &function.parameters {
        let begin = end.next_multiple_of(parameter.align.max(1));
        end = begin + parameter.bytes;
        decoder.scopes[0].names.insert(parameter.name.clone(), Symbol::Parameter(begin));
        parameters.push((begin as usize, parameter.bytes as usize));
    }
    let static_shared = decoder.place_shared(function)?;
    let found = decoder.statements(&function.body, 0, None);
    found.map_err(|error| format!("{name}, line {}: {error}", decoder.line))?;
    decoder.emit(Op::Exit, None, &[]);
    for (at, scope, label) in std::mem::take(&mut decoder.jumps) {
        decoder.code[at].op = Op::Branch(decoder.label(scope, &label)?);
    }
    let Decoder { mut code, roles, registers, constants, .. } = decoder;
    let counts = registers::share(&mut code, &roles, registers, &constants);
    Ok(Kernel {
        code,
        counts: counts.0,
        constants: counts.1,
        static_shared,
        parameters,
        most_threads: function.most_threads,
        registers: function.registers,
    })
}

impl Decoder<'_> {
    /// Gives shared variables their places, what the launch sizes last. Returns the bytes before that.
    fn place_shared(&mut self, function: &Function) -> Parsed<u64> {
        let own = function.body.iter().filter_map(|statement| match statement {
            Statement::Declaration(text) if text.starts_with(".shared") => Some(variable(text)),
            _ => None,
        });
        let own: Vec<Variable> = own.collect::<Parsed<_>>()?;
        let uses = |name: &str| {
            let names = |text: &str| {
                text.match_indices(name).any(|(at, _)| {
                    let is_word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == '$');
                    !is_word(text[..at].chars().next_back()) && !is_word(text[at + name.len()..].chars().next())
                })
            };
            function
                .body
                .iter()
                .any(|statement| matches!(statement, Statement::Instruction { text, .. } if names(text)))
        };
        let outer = self.module.variables.iter().filter(|variable| variable.space == ".shared" && uses(&variable.name));
        let (dynamic, fixed): (Vec<_>, Vec<_>) = own.iter().chain(outer).partition(|variable| variable.is_dynamic);
        let mut bytes = 0u64;
        for variable in fixed {
            bytes = bytes.next_multiple_of(variable.align.max(1));
            self.scopes[0].names.insert(variable.name.clone(), Symbol::Shared(bytes));
            bytes += variable.bytes;
        }
        for variable in dynamic {
            bytes = bytes.next_multiple_of(variable.align.max(16));
            self.scopes[0].names.insert(variable.name.clone(), Symbol::Shared(bytes));
        }
        Ok(bytes)
    }

    fn emit(&mut self, op: Op, guard: Option<(u32, bool)>, operands: &[(u32, Role)]) {
        let r = operands.iter().map(|&(register, _)| register).collect();
        self.code.push(Instruction { op, guard, r, line: self.line });
        self.roles.push(operands.iter().map(|&(_, role)| role).collect());
    }

    pub fn new_register(&mut self, class: Class) -> u32 {
        let count = &mut self.registers[class as usize];
        *count += 1;
        *count - 1
    }

    fn constant(&mut self, constant: Constant) -> u32 {
        if let Some(&at) = self.known.get(&constant) {
            return at;
        }
        let class = constant.class();
        let at = IS_CONSTANT | self.constants.iter().filter(|(one, _)| one.class() == class).count() as u32;
        self.constants.push((constant, at));
        self.known.insert(constant, at);
        at
    }

    fn label(&self, mut scope: usize, label: &str) -> Parsed<u32> {
        loop {
            if let Some(&at) = self.scopes[scope].labels.get(label) {
                return Ok(at);
            }
            scope = self.scopes[scope].parent.ok_or_else(|| format!("no label {label}"))?;
        }
    }

    pub fn symbol(&self, mut scope: usize, name: &str) -> Option<Symbol> {
        let digits = name.len() - name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
        let (prefix, number) = name.split_at(name.len() - digits);
        loop {
            let own = &self.scopes[scope];
            if let Some(&symbol) = own.names.get(name) {
                return Some(symbol);
            }
            if let (Ok(number), Some((_, class, first))) =
                (number.parse::<u32>(), own.families.iter().find(|(family, _, _)| family == prefix))
            {
                return Some(Symbol::Register(*class, first + number));
            }
            scope = own.parent?;
        }
    }

    /// `returns`: what a function laid out in line jumps to, instead of ending the thread.
    fn statements(&mut self, statements: &[Statement], scope: usize, returns: Option<&str>) -> Parsed<()> {
        let mut scope = scope;
        for statement in statements {
            match statement {
                Statement::Open => {
                    self.scopes.push(Scope { parent: Some(scope), ..Scope::default() });
                    scope = self.scopes.len() - 1;
                }
                Statement::Close => scope = self.scopes[scope].parent.ok_or("a brace too many")?,
                Statement::Label(name) => {
                    let at = self.code.len() as u32;
                    self.scopes[scope].labels.insert(name.clone(), at);
                }
                Statement::Declaration(text) => self.declare(text, scope)?,
                Statement::Instruction { text, line } => {
                    self.line = *line;
                    self.instruction(text, scope, returns).map_err(|error| format!("{text}: {error}"))?;
                }
            }
        }
        Ok(())
    }

    fn declare(&mut self, text: &str, scope: usize) -> Parsed<()> {
        let mut words = text.split_whitespace();
        match words.next() {
            Some(".reg") => {
                let class = class_of(words.next().unwrap_or_default().trim_start_matches('.'))?;
                for name in words.collect::<String>().split(',') {
                    if let Some((prefix, count)) = name.split_once('<') {
                        let count: u32 =
                            count.trim_end_matches('>').parse().map_err(|_| format!("how many are {name}?"))?;
                        let first = self.registers[class as usize];
                        self.registers[class as usize] += count;
                        self.scopes[scope].families.push((prefix.to_owned(), class, first));
                    } else {
                        let register = self.new_register(class);
                        self.scopes[scope].names.insert(name.to_owned(), Symbol::Register(class, register));
                    }
                }
            }
            Some(".param") => {
                self.cell_sets += 1;
                self.scopes[scope].names.insert(variable(text)?.name, Symbol::Cell(self.cell_sets));
            }
            Some(".pragma") => {
                let mask = text
                    .split_once("used_bytes_mask ")
                    .map(|(_, mask)| mask.trim_matches(|c: char| !c.is_ascii_digit()));
                self.used = mask.and_then(|mask| mask.parse().ok());
            }
            Some(".shared") => (),
            _ => return Err(format!("what does {text:?} declare?")),
        }
        Ok(())
    }

    /// A register, a number, or the address of a variable.
    pub fn operand(&mut self, scope: usize, text: &str, class: Class) -> Parsed<u32> {
        if text == "_" {
            return Ok(self.new_register(class));
        }
        match self.symbol(scope, text) {
            Some(Symbol::Register(found, register)) if found == class => return Ok(register),
            Some(Symbol::Register(found, _)) => {
                return Err(format!("{text} is a {found:?} where a {class:?} is expected"));
            }
            Some(Symbol::Shared(offset)) => return self.number(offset as i128, class),
            Some(Symbol::Global(address)) => return self.number(address as i128, class),
            Some(Symbol::Parameter(at)) => return Ok(self.constant(Constant::Parameter(at))),
            Some(Symbol::Cell(_)) => return Err(format!("the address of {text} is not known here")),
            None => (),
        }
        if let Some(bits) = text.strip_prefix("0f").or(text.strip_prefix("0F")) {
            let bits = u32::from_str_radix(bits, 16).map_err(|_| format!("{text} is no float32"))?;
            return self.number(bits as i128, class);
        }
        if let Some(bits) = text.strip_prefix("0d").or(text.strip_prefix("0D")) {
            let bits = u64::from_str_radix(bits, 16).map_err(|_| format!("{text} is no float64"))?;
            return self.number(bits as i128, class);
        }
        self.number(integer(text).ok_or_else(|| format!("what is {text}?"))?, class)
    }

    fn number(&mut self, value: i128, class: Class) -> Parsed<u32> {
        Ok(self.constant(match class {
            Class::Predicate => Constant::Predicate(value != 0),
            Class::Word => Constant::Word(value as u32),
            Class::Double => Constant::Double(value as u64),
        }))
    }

    /// `[register+offset]` or `[variable+offset]`: the register, and what is added to it.
    pub fn address(&mut self, scope: usize, text: &str, space: Space) -> Parsed<(u32, Access)> {
        let inside = text
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
            .ok_or("an address stands in brackets")?
            .trim();
        let (base, offset) = match inside.split_once('+') {
            Some((base, offset)) => (base.trim(), integer(offset.trim()).ok_or("what offset?")? as i64),
            None => (inside, 0),
        };
        let mut access = Access {
            space,
            offset,
            is_wide: true,
            bytes: 0,
            count: 1,
            is_signed: false,
            class: Class::Word,
            used: !0,
            order: Order::default(),
        };
        let register = match self.symbol(scope, base) {
            Some(Symbol::Register(Class::Predicate, _)) => return Err("a predicate is no address".into()),
            Some(Symbol::Register(class, register)) => {
                access.is_wide = class == Class::Double;
                register
            }
            Some(Symbol::Shared(at)) => self.constant(Constant::Double(at)),
            Some(Symbol::Global(at)) => self.constant(Constant::Double(at)),
            Some(Symbol::Parameter(at)) => self.constant(Constant::Parameter(at)),
            _ => return Err(format!("what is {base}?")),
        };
        Ok((register, access))
    }

    pub fn address_role(access: &Access) -> Role {
        (if access.is_wide { Class::Double } else { Class::Word }, false)
    }

    fn instruction(&mut self, text: &str, scope: usize, returns: Option<&str>) -> Parsed<()> {
        let (guard, text) = match text.strip_prefix('@') {
            Some(rest) => {
                let (predicate, rest) = rest.split_once(' ').ok_or("a guard alone")?;
                let (name, wanted) = predicate.strip_prefix('!').map_or((predicate, true), |name| (name, false));
                (Some((self.operand(scope, name, Class::Predicate)?, wanted)), rest.trim())
            }
            None => (None, text),
        };
        let (name, rest) = text.split_once(' ').unwrap_or((text, ""));
        let arguments = operands(rest);
        match name {
            "bra" | "bra.uni" => {
                self.jumps.push((self.code.len(), scope, arguments[0].to_owned()));
                self.emit(Op::Branch(0), guard, &[]);
                return Ok(());
            }
            "ret" | "exit" => {
                match returns {
                    Some(label) => {
                        self.jumps.push((self.code.len(), scope, label.to_owned()));
                        self.emit(Op::Branch(0), guard, &[]);
                    }
                    None => self.emit(Op::Exit, guard, &[]),
                }
                return Ok(());
            }
            "call.uni" | "call" => return self.call(&arguments, scope),
            _ => (),
        }
        let flat: Vec<String> = arguments.iter().flat_map(|one| flattened(one)).collect();
        let results = arguments.first().map_or(0, |first| flattened(first).len());
        // %p|%q of a shuffle; special registers.
        if name == "mov.u32" && self.symbol(scope, &flat[1]).is_none() && flat[1].starts_with('%') {
            let special = match flat[1].as_str() {
                "%tid.x" => Special::Thread,
                "%ntid.x" => Special::Threads,
                "%ctaid.x" => Special::Cta,
                "%nctaid.x" => Special::Ctas,
                "%cluster_ctarank" => Special::ClusterRank,
                "%cluster_nctarank" => Special::ClusterCtas,
                "%laneid" => Special::Lane,
                "%globaltimer_lo" => Special::Time,
                other => return Err(format!("what is {other}?")),
            };
            let to = self.operand(scope, &flat[0], Class::Word)?;
            self.emit(Op::Special(special), guard, &[(to, (Class::Word, true))]);
            return Ok(());
        }
        if let Some(computed) = computed(name, results, flat.len() - results.min(flat.len())) {
            if flat.len() != computed.results.len() + computed.operands.len() {
                return Err(format!("{} operands", flat.len()));
            }
            let classes = computed
                .results
                .iter()
                .map(|&class| (class, true))
                .chain(computed.operands.iter().map(|&class| (class, false)));
            let mut operands = vec![];
            for (text, role) in flat.iter().zip(classes.collect::<Vec<_>>()) {
                operands.push((self.operand(scope, text, role.0)?, role));
            }
            self.emit(Op::Compute(computed.compute), guard, &operands);
            return Ok(());
        }
        let (op, operands) = self.other(name, &arguments, scope)?;
        self.emit(op, guard, &operands);
        Ok(())
    }

    fn call(&mut self, arguments: &[&str], scope: usize) -> Parsed<()> {
        let names = |text: &str| -> Vec<String> {
            text.trim_matches(|c| "() ".contains(c))
                .split(',')
                .map(|name| name.trim().to_owned())
                .filter(|name| !name.is_empty())
                .collect()
        };
        let (results, callee, given) = match arguments {
            [results, callee, given] => (names(results), *callee, names(given)),
            _ => return Err("calls have results and arguments here".into()),
        };
        let function = self.module.functions.get(callee).ok_or_else(|| format!("no function {callee}"))?;
        let mut inner = Scope { parent: Some(0), ..Scope::default() };
        for (formal, actual) in function.results.iter().chain(&function.parameters).zip(results.iter().chain(&given)) {
            let symbol = self.symbol(scope, actual).ok_or_else(|| format!("what is {actual}?"))?;
            inner.names.insert(formal.name.clone(), symbol);
        }
        self.scopes.push(inner);
        let (inner, line) = (self.scopes.len() - 1, self.line);
        const END: &str = "(end of the call)";
        self.statements(&function.body, inner, Some(END))?;
        self.line = line;
        let at = self.code.len() as u32;
        self.scopes[inner].labels.insert(END.into(), at);
        Ok(())
    }
}

pub fn flattened(text: &str) -> Vec<String> {
    match text.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')) {
        Some(inside) => inside.split(',').map(|one| one.trim().to_owned()).collect(),
        None => vec![text.to_owned()],
    }
}

pub fn integer(text: &str) -> Option<i128> {
    let (negative, text) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
    let text = text.trim_end_matches('U');
    let value = match text.strip_prefix("0x") {
        Some(digits) => i128::from_str_radix(digits, 16).ok()?,
        None => text.parse().ok()?,
    };
    Some(if negative { -value } else { value })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    #[test]
    fn every_kernel_of_the_library_is_known() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels/ptx");
        let folders = std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
        let files = folders.flat_map(|folder| std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()));
        let (mut kernels, mut unknown) = (0, vec![]);
        for file in files {
            let module = crate::parse::module(&std::fs::read_to_string(&file).unwrap()).unwrap();
            let globals =
                module.variables.iter().filter(|one| one.space == ".global").map(|one| (one.name.clone(), 512));
            let globals = globals.collect();
            for (name, _) in module.functions.iter().filter(|(_, function)| function.is_entry) {
                kernels += 1;
                if let Err(error) = super::kernel(&module, &globals, name) {
                    unknown.push(format!("{}: {error}", file.display()));
                }
            }
        }
        assert!(kernels > 100 && unknown.is_empty(), "{kernels} kernels:\n{}", unknown.join("\n"));
    }
}
