//! Statements become instructions whose operands are numbers of registers. Calls are laid out in line.

use crate::compute::computed;
use crate::device::Globals;
use crate::parse::{Function, Module, Parsed, Statement, Variable, bytes_of, operands, variable};
use crate::registers;
use crate::values::{Class, Compute};
use std::collections::HashMap;

pub struct Kernel {
    pub code: Vec<Instruction>,
    /// Registers of each class, the last of which are constants.
    pub counts: [usize; 3],
    pub constants: Vec<(Constant, u32)>,
    pub static_shared: u64,
    /// Where each parameter lies among the bytes of all, and its size.
    pub parameters: Vec<(usize, usize)>,
    pub most_threads: u32,
}

pub struct Instruction {
    pub op: Op,
    /// Executed where this predicate is so.
    pub guard: Option<(u32, bool)>,
    /// Registers: results, then operands.
    pub r: Box<[u32]>,
    pub line: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Constant {
    Predicate(bool),
    Word(u32),
    Double(u64),
    /// The address of a byte of the launch's parameters.
    Parameter(u64),
}

impl Constant {
    pub fn class(self) -> Class {
        match self {
            Constant::Predicate(_) => Class::Predicate,
            Constant::Word(_) => Class::Word,
            Constant::Double(_) | Constant::Parameter(_) => Class::Double,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Space {
    /// Of any kind: the address tells.
    Generic,
    Global,
    Shared,
    /// Shared memory of any CTA of the cluster.
    Cluster,
    Parameter,
}

/// Where and what an instruction reads or writes. Its address is a register and an offset.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    pub space: Space,
    pub offset: i64,
    /// Of the address register.
    pub is_wide: bool,
    pub bytes: u32,
    pub count: u32,
    pub is_signed: bool,
    /// Of the values.
    pub class: Class,
    /// Bytes that the compiler has a use for.
    pub used: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Special {
    Thread,
    Threads,
    Cta,
    Ctas,
    ClusterRank,
    ClusterCtas,
    Lane,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    Add,
    Or,
    And,
    Min,
    Max,
    Exchange,
    Compare,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shuffle {
    Butterfly,
    Up,
    Down,
    Index,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Vote {
    Ballot,
    Any,
    All,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Product {
    F16,
    Bf16,
    Tf32,
    Bytes,
}

#[derive(Clone, Copy, Debug)]
pub enum Op {
    Compute(Compute),
    Special(Special),
    Branch(u32),
    Exit,
    Trap,
    Nothing,
    Load(Access),
    Store(Access),
    Atomic(Access, Change, bool),
    /// All threads of the CTA, or as many as the last operand says; a predicate may be joined: `Some(true)`: all, `Some(false)`: any.
    Barrier {
        counted: bool,
        aligned: bool,
        joins: Option<bool>,
    },
    WarpBarrier,
    Shuffle(Shuffle),
    Vote(Vote),
    Reduce(Change, bool),
    ClusterArrive {
        is_relaxed: bool,
    },
    Fence,
    ClusterWait,
    OpenBarrier(Access),
    ExpectBytes(Access),
    TryWait(Access),
    CompleteBytes(Access),
    ArriveAfterCopies(Access),
    /// To shared memory, of so many bytes; with the number of those that are not zeros.
    Copy {
        to: Access,
        from: Access,
        bytes: u32,
        sized: bool,
    },
    EndCopies,
    /// For all but the groups that ended last; `None`: for what is in no group yet, too.
    WaitCopies(Option<u32>),
    BulkLoad {
        to: Access,
        from: Access,
        barrier: Access,
    },
    BulkStore {
        to: Access,
        from: Access,
    },
    EndBulk,
    WaitBulk(u32),
    StoreAsync {
        to: Access,
        barrier: Access,
    },
    Map,
    Multiply(Product),
    LoadMatrices {
        from: Access,
        transposed: bool,
    },
    TransposeMatrix,
    /// Of warpgroups: columns.
    GroupMultiply {
        columns: u32,
        product: Product,
        a_in_registers: bool,
        transposes: [bool; 2],
    },
}

/// A register before they are shared out; constants have the upper bit.
pub const IS_CONSTANT: u32 = 1 << 31;

/// An operand's class, and whether it is a result.
pub type Role = (Class, bool);

#[derive(Clone, Copy, Debug)]
enum Symbol {
    Register(Class, u32),
    Shared(u64),
    Global(u64),
    /// Of the kernel's parameters.
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

struct Decoder<'m> {
    module: &'m Module,
    code: Vec<Instruction>,
    roles: Vec<Vec<Role>>,
    scopes: Vec<Scope>,
    /// Instructions that branch to a label, and the scope they stand in.
    jumps: Vec<(usize, usize, String)>,
    registers: [u32; 3],
    constants: Vec<(Constant, u32)>,
    known: HashMap<Constant, u32>,
    cells: HashMap<(u32, u64), (Class, u32)>,
    cell_sets: u32,
    line: u32,
    /// What a pragma says of the load that follows.
    used: Option<u32>,
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

    fn new_register(&mut self, class: Class) -> u32 {
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

    fn symbol(&self, mut scope: usize, name: &str) -> Option<Symbol> {
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
    fn operand(&mut self, scope: usize, text: &str, class: Class) -> Parsed<u32> {
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
    fn address(&mut self, scope: usize, text: &str, space: Space) -> Parsed<(u32, Access)> {
        let inside = text
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
            .ok_or("an address stands in brackets")?
            .trim();
        let (base, offset) = match inside.split_once('+') {
            Some((base, offset)) => (base.trim(), integer(offset.trim()).ok_or("what offset?")? as i64),
            None => (inside, 0),
        };
        let mut access =
            Access { space, offset, is_wide: true, bytes: 0, count: 1, is_signed: false, class: Class::Word, used: !0 };
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

    fn address_role(access: &Access) -> Role {
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

    /// Instructions that do more than compute.
    fn other(&mut self, name: &str, arguments: &[&str], scope: usize) -> Parsed<(Op, Vec<(u32, Role)>)> {
        let parts: Vec<&str> = name.split('.').collect();
        let kind = *parts.last().expect("a name");
        let has = |part: &str| parts.contains(&part);
        let argument = |n: usize| arguments.get(n).copied().ok_or("too few operands");
        let space = match () {
            _ if has("shared::cluster") => Space::Cluster,
            _ if has("shared") || has("shared::cta") => Space::Shared,
            _ if has("global") => Space::Global,
            _ if has("param") => Space::Parameter,
            _ => Space::Generic,
        };
        let mut list: Vec<(u32, Role)> = vec![];
        macro_rules! take {
            ($n:expr, $class:ident, $is_result:expr) => {{
                let register = self.operand(scope, argument($n)?, Class::$class)?;
                list.push((register, (Class::$class, $is_result)));
            }};
        }
        macro_rules! address {
            ($n:expr, $space:expr) => {{
                let (register, access) = self.address(scope, argument($n)?, $space)?;
                list.push((register, Decoder::address_role(&access)));
                access
            }};
        }
        macro_rules! all {
            ($n:expr, $class:expr, $is_result:expr) => {
                for text in flattened(argument($n)?) {
                    let register = self.operand(scope, &text, $class)?;
                    list.push((register, ($class, $is_result)));
                }
            };
        }
        let op = match parts[0] {
            "ld" | "st" if has("param") => {
                let is_load = parts[0] == "ld";
                let (place, value) = if is_load { (argument(1)?, argument(0)?) } else { (argument(0)?, argument(1)?) };
                let base = place.trim_matches(|c| "[]".contains(c)).split('+').next().unwrap_or_default().trim();
                if let Some(Symbol::Cell(set)) = self.symbol(scope, base) {
                    return self.cell(set, place, value, class_of(kind)?, is_load, scope);
                }
                if !is_load {
                    return Err("parameters of a kernel are not written".into());
                }
                self.access(kind, Space::Parameter, argument(0)?, argument(1)?, true, scope, &mut list)?
            }
            "ld" => self.access(kind, space, argument(0)?, argument(1)?, true, scope, &mut list)?,
            "st" if has("async") => {
                let mut to = address!(0, Space::Cluster);
                (to.bytes, to.class) = (bytes_of(kind).ok_or("what type?")? as u32, class_of(kind)?);
                let before = list.len();
                all!(1, to.class, false);
                to.count = (list.len() - before) as u32;
                let barrier = address!(2, Space::Cluster);
                Op::StoreAsync { to, barrier }
            }
            "st" => self.access(kind, space, argument(1)?, argument(0)?, false, scope, &mut list)?,
            "atom" | "red" => {
                let is_red = parts[0] == "red";
                let change = match () {
                    _ if has("add") => Change::Add,
                    _ if has("or") => Change::Or,
                    _ if has("and") => Change::And,
                    _ if has("min") => Change::Min,
                    _ if has("max") => Change::Max,
                    _ if has("exch") => Change::Exchange,
                    _ if has("cas") => Change::Compare,
                    _ => return Err("what change?".into()),
                };
                let class = class_of(kind)?;
                if !is_red {
                    let register = self.operand(scope, argument(0)?, class)?;
                    list.push((register, (class, true)));
                }
                let mut access = address!(!is_red as usize, space);
                (access.bytes, access.class, access.is_signed) =
                    (bytes_of(kind).ok_or("what type?")? as u32, class, kind.starts_with('s'));
                for text in &arguments[2 - is_red as usize..] {
                    let register = self.operand(scope, text, class)?;
                    list.push((register, (class, false)));
                }
                Op::Atomic(access, change, !is_red)
            }
            "bar" if has("warp") => {
                take!(0, Word, false);
                Op::WarpBarrier
            }
            "barrier" if has("cluster") => {
                if has("arrive") {
                    Op::ClusterArrive { is_relaxed: has("relaxed") }
                } else {
                    Op::ClusterWait
                }
            }
            "bar" if has("red") => {
                take!(0, Predicate, true);
                take!(1, Word, false);
                take!(2, Predicate, false);
                Op::Barrier { counted: false, aligned: true, joins: Some(has("and")) }
            }
            "bar" | "barrier" if has("sync") => {
                take!(0, Word, false);
                let counted = arguments.len() > 1;
                if counted {
                    take!(1, Word, false);
                }
                Op::Barrier { counted, aligned: parts[0] == "bar" || has("aligned"), joins: None }
            }
            "shfl" => {
                let (value, predicate) = argument(0)?.split_once('|').unwrap_or((argument(0)?, "_"));
                for (text, class) in [(value, Class::Word), (predicate, Class::Predicate)] {
                    let register = self.operand(scope, text.trim(), class)?;
                    list.push((register, (class, true)));
                }
                for n in 1..5 {
                    take!(n, Word, false);
                }
                Op::Shuffle(match parts[2] {
                    "bfly" => Shuffle::Butterfly,
                    "up" => Shuffle::Up,
                    "down" => Shuffle::Down,
                    _ => Shuffle::Index,
                })
            }
            "vote" => {
                let vote = match parts[2] {
                    "ballot" => Vote::Ballot,
                    "any" => Vote::Any,
                    _ => Vote::All,
                };
                match vote {
                    Vote::Ballot => take!(0, Word, true),
                    _ => take!(0, Predicate, true),
                }
                take!(1, Predicate, false);
                take!(2, Word, false);
                Op::Vote(vote)
            }
            "redux" => {
                for n in 0..3 {
                    take!(n, Word, n == 0);
                }
                let change = match parts[2] {
                    "add" => Change::Add,
                    "min" => Change::Min,
                    "max" => Change::Max,
                    "and" => Change::And,
                    _ => Change::Or,
                };
                Op::Reduce(change, kind == "s32")
            }
            "mbarrier" => match parts[1] {
                "init" => {
                    let access = address!(0, Space::Shared);
                    take!(1, Word, false);
                    Op::OpenBarrier(access)
                }
                "arrive" => {
                    let access = address!(1, Space::Shared);
                    take!(2, Word, false);
                    Op::ExpectBytes(access)
                }
                "try_wait" => {
                    take!(0, Predicate, true);
                    let access = address!(1, Space::Shared);
                    take!(2, Word, false);
                    Op::TryWait(access)
                }
                "complete_tx" => {
                    let access = address!(0, Space::Shared);
                    take!(1, Word, false);
                    Op::CompleteBytes(access)
                }
                _ => return Err("what of a barrier?".into()),
            },
            "cp" => match () {
                _ if has("prefetch") => Op::Nothing,
                _ if has("mbarrier") => Op::ArriveAfterCopies(address!(0, Space::Shared)),
                _ if has("commit_group") && has("bulk") => Op::EndBulk,
                _ if has("wait_group") && has("bulk") => {
                    Op::WaitBulk(integer(argument(0)?).ok_or("how many groups?")? as u32)
                }
                _ if has("commit_group") => Op::EndCopies,
                _ if has("wait_group") => Op::WaitCopies(Some(integer(argument(0)?).ok_or("how many groups?")? as u32)),
                _ if has("wait_all") => Op::WaitCopies(None),
                _ if has("bulk_group") => {
                    let to = address!(0, Space::Global);
                    let from = address!(1, Space::Shared);
                    take!(2, Word, false);
                    Op::BulkStore { to, from }
                }
                _ if has("bulk") => {
                    let to = address!(0, Space::Cluster);
                    let from = address!(1, Space::Global);
                    take!(2, Word, false);
                    let barrier = address!(3, Space::Cluster);
                    Op::BulkLoad { to, from, barrier }
                }
                _ => {
                    let to = address!(0, Space::Shared);
                    let from = address!(1, Space::Global);
                    let sized = arguments.len() > 3;
                    if sized {
                        take!(3, Word, false);
                    }
                    Op::Copy { to, from, bytes: integer(argument(2)?).ok_or("how many bytes?")? as u32, sized }
                }
            },
            "mapa" => {
                for n in 0..3 {
                    take!(n, Word, n == 0);
                }
                Op::Map
            }
            "mma" => {
                for n in 0..4 {
                    all!(n, Class::Word, n == 0);
                }
                let product = match parts[parts.len() - 3..] {
                    ["f16", "f16", "f32"] => Product::F16,
                    ["bf16", "bf16", "f32"] => Product::Bf16,
                    ["tf32", "tf32", "f32"] => Product::Tf32,
                    ["u8", "s8", "s32"] => Product::Bytes,
                    _ => return Err("what product?".into()),
                };
                Op::Multiply(product)
            }
            "ldmatrix" => {
                all!(0, Class::Word, true);
                Op::LoadMatrices { from: address!(1, Space::Shared), transposed: has("trans") }
            }
            "movmatrix" => {
                take!(0, Word, true);
                take!(1, Word, false);
                Op::TransposeMatrix
            }
            "wgmma" if has("mma_async") => {
                let columns =
                    parts.iter().find_map(|part| part.strip_prefix("m64n")?.strip_suffix("k16")?.parse().ok());
                let Some(columns) = columns else { return Err("what shape?".into()) };
                let product = if has("bf16") { Product::Bf16 } else { Product::F16 };
                all!(0, Class::Word, true);
                all!(0, Class::Word, false);
                let a_in_registers = argument(1)?.starts_with('{');
                if a_in_registers {
                    all!(1, Class::Word, false);
                } else {
                    take!(1, Double, false);
                }
                take!(2, Double, false);
                take!(3, Predicate, false);
                let is_set = |n: usize| arguments.get(n).is_some_and(|text| *text == "1");
                let transposes = if a_in_registers { [false, is_set(6)] } else { [is_set(6), is_set(7)] };
                Op::GroupMultiply { columns, product, a_in_registers, transposes }
            }
            "trap" => Op::Trap,
            "fence" if has("acq_rel") => Op::Fence,
            "membar" => Op::Fence,
            "fence" | "griddepcontrol" | "prefetch" | "setmaxnreg" | "wgmma" => Op::Nothing,
            _ => return Err("not known".into()),
        };
        Ok((op, list))
    }

    #[allow(clippy::too_many_arguments)]
    fn access(
        &mut self,
        kind: &str,
        space: Space,
        values: &str,
        place: &str,
        is_load: bool,
        scope: usize,
        list: &mut Vec<(u32, Role)>,
    ) -> Parsed<Op> {
        let (bytes, class) = (bytes_of(kind).ok_or("what type?")? as u32, class_of(kind)?);
        let (register, mut access) = self.address(scope, place, space)?;
        let values = flattened(values);
        // A register may be wider than the type: a load extends, a store cuts.
        let class = match self.symbol(scope, &values[0]) {
            Some(Symbol::Register(Class::Double, _)) => Class::Double,
            _ => class,
        };
        (access.bytes, access.class, access.count) = (bytes, class, values.len() as u32);
        access.is_signed = kind.starts_with('s');
        access.used = self.used.take().unwrap_or(!0);
        let address = (register, Decoder::address_role(&access));
        if !is_load {
            list.push(address);
        }
        for text in values {
            let register = self.operand(scope, &text, class)?;
            list.push((register, (class, is_load)));
        }
        if is_load {
            list.push(address);
        }
        Ok(if is_load { Op::Load(access) } else { Op::Store(access) })
    }

    /// A move between a register and a call's parameter.
    fn cell(
        &mut self,
        set: u32,
        place: &str,
        value: &str,
        class: Class,
        is_load: bool,
        scope: usize,
    ) -> Parsed<(Op, Vec<(u32, Role)>)> {
        let inside = place.trim_matches(|c| "[]".contains(c));
        let offset =
            inside.split_once('+').map_or(Some(0), |(_, offset)| integer(offset.trim())).ok_or("what offset?")? as u64;
        let (found, cell) = match self.cells.get(&(set, offset)) {
            Some(&cell) => cell,
            None => {
                let cell = (class, self.new_register(class));
                self.cells.insert((set, offset), cell);
                cell
            }
        };
        if found != class {
            return Err("a parameter is read as it was not written".into());
        }
        let register = self.operand(scope, value, class)?;
        let name = if class == Class::Double { "mov.b64" } else { "mov.b32" };
        let compute = computed(name, 1, 1).expect("a move").compute;
        let (to, from) = if is_load { (register, cell) } else { (cell, register) };
        Ok((Op::Compute(compute), vec![(to, (class, true)), (from, (class, false))]))
    }
}

fn flattened(text: &str) -> Vec<String> {
    match text.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')) {
        Some(inside) => inside.split(',').map(|one| one.trim().to_owned()).collect(),
        None => vec![text.to_owned()],
    }
}

fn integer(text: &str) -> Option<i128> {
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
