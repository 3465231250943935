//! Decodes instructions that do more than compute: memory, barriers, what lanes exchange, copies, matrices.

use crate::compute::computed;
use crate::decode::{Decoder, Symbol, class_of, flattened, integer};
use crate::instruction::*;
use crate::parse::{Parsed, bytes_of};
use crate::races::Order;
use crate::values::Class;

fn ordered(op: Op, order: Order) -> Op {
    match op {
        Op::Load(access) => Op::Load(Access { order, ..access }),
        Op::Store(access) => Op::Store(Access { order, ..access }),
        other => other,
    }
}

impl Decoder<'_> {
    /// Instructions that do more than compute.
    pub fn other(&mut self, name: &str, arguments: &[&str], scope: usize) -> Parsed<(Op, Vec<(u32, Role)>)> {
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
        let is_narrow = has("cta") || has("cluster");
        let order = Order {
            is_strong: ["volatile", "relaxed", "acquire", "release", "acq_rel"].iter().any(|part| has(part)),
            acquires: has("acquire") || has("acq_rel"),
            releases: has("release") || has("acq_rel"),
            is_narrow,
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
            "ld" => ordered(self.access(kind, space, argument(0)?, argument(1)?, true, scope, &mut list)?, order),
            "st" if has("async") => {
                let mut to = address!(0, Space::Cluster);
                (to.bytes, to.class) = (bytes_of(kind).ok_or("what type?")? as u32, class_of(kind)?);
                let before = list.len();
                all!(1, to.class, false);
                to.count = (list.len() - before) as u32;
                let barrier = address!(2, Space::Cluster);
                Op::StoreAsync { to, barrier }
            }
            "st" => ordered(self.access(kind, space, argument(1)?, argument(0)?, false, scope, &mut list)?, order),
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
                access.order = Order { is_strong: true, ..order };
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
            "elect" => {
                let (lane, predicate) = argument(0)?.split_once('|').ok_or("who is told?")?;
                for (text, class) in [(lane, Class::Word), (predicate, Class::Predicate)] {
                    let register = self.operand(scope, text.trim(), class)?;
                    list.push((register, (class, true)));
                }
                take!(1, Word, false);
                Op::Elect
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
                "expect_tx" => {
                    let access = address!(0, Space::Shared);
                    take!(1, Word, false);
                    Op::AwaitBytes(access)
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
                _ if has("mbarrier") => {
                    let barrier = address!(0, Space::Shared);
                    Op::ArriveAfterCopies { barrier, is_counted: has("noinc") }
                }
                _ if has("commit_group") && has("bulk") => Op::EndBulk,
                _ if has("wait_group") && has("bulk") => {
                    let most = integer(argument(0)?).ok_or("how many groups?")? as u32;
                    Op::WaitBulk { most, has_written: !has("read") }
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
                _ if has("tensor") => {
                    let dimensions: usize = parts
                        .iter()
                        .find_map(|part| part.strip_suffix('d')?.parse().ok())
                        .ok_or("of how many dimensions?")?;
                    if !has("mbarrier::complete_tx::bytes")
                        || has("im2col")
                        || has("multicast::cluster")
                        || has("L2::cache_hint")
                    {
                        return Err("what copy of a tensor?".into());
                    }
                    let to = address!(0, Space::Cluster);
                    let inside = argument(1)?.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
                    let (map, coordinates) = inside
                        .and_then(|text| text.split_once(','))
                        .ok_or("a map and coordinates stand in brackets")?;
                    let (register, from) = self.address(scope, &format!("[{}]", map.trim()), Space::Generic)?;
                    list.push((register, Decoder::address_role(&from)));
                    let coordinates = flattened(coordinates.trim());
                    if coordinates.len() != dimensions {
                        return Err(format!("{} coordinates of {dimensions}", coordinates.len()));
                    }
                    for text in coordinates {
                        let register = self.operand(scope, &text, Class::Word)?;
                        list.push((register, (Class::Word, false)));
                    }
                    let barrier = address!(2, Space::Cluster);
                    Op::TensorLoad { to, from, barrier }
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
            "fence" if has("acq_rel") || has("sc") => Op::Fence { is_narrow },
            "membar" => Op::Fence { is_narrow },
            "griddepcontrol" if has("wait") => Op::WaitLaunches,
            "setmaxnreg" => Op::TakeRegisters(argument(0)?.parse().map_err(|_| "registers are a number")?),
            "fence" | "griddepcontrol" | "prefetch" | "wgmma" => Op::Nothing,
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
