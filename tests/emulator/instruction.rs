//! Instructions, as they are decoded and executed.

use crate::races::Order;
use crate::values::{Class, Compute};

pub struct Kernel {
    pub code: Vec<Instruction>,
    /// Registers of each class, the last of which are constants.
    pub counts: [usize; 3],
    pub constants: Vec<(Constant, u32)>,
    pub static_shared: u64,
    /// Where each parameter lies among the bytes of all, and its size.
    pub parameters: Vec<(usize, usize)>,
    pub most_threads: u32,
    /// The registers that a thread has at first.
    pub registers: u32,
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
    /// The address tells which space it is.
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
    /// The address register has 64 bits.
    pub is_wide: bool,
    pub bytes: u32,
    pub count: u32,
    pub is_signed: bool,
    /// The class of the values' registers.
    pub class: Class,
    /// Bytes that the compiler has a use for.
    pub used: u32,
    pub order: Order,
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
    /// Nanoseconds, modulo 2^32.
    Time,
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
    /// The warp's threads have so many registers from here on.
    TakeRegisters(u32),
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
    /// One lane of several is told that it is the one.
    Elect,
    ClusterArrive {
        is_relaxed: bool,
    },
    /// Narrow: for threads of the CTA or the cluster alone.
    Fence {
        is_narrow: bool,
    },
    /// Waits for the launches in front.
    WaitLaunches,
    ClusterWait,
    OpenBarrier(Access),
    ExpectBytes(Access),
    /// The barrier awaits so many bytes more; nobody arrives.
    AwaitBytes(Access),
    TryWait(Access),
    CompleteBytes(Access),
    /// `is_counted`: the barrier awaits this arrival; else it awaits one more for it.
    ArriveAfterCopies {
        barrier: Access,
        is_counted: bool,
    },
    /// Copies so many bytes to shared memory. `sized`: an operand says how many of them are read; the rest is zeros.
    Copy {
        to: Access,
        from: Access,
        bytes: u32,
        sized: bool,
    },
    EndCopies,
    /// Waits for all but so many of the groups that ended last; `None`: also for copies that are in no group yet.
    WaitCopies(Option<u32>),
    BulkLoad {
        to: Access,
        from: Access,
        barrier: Access,
    },
    /// Copies a box of a tensor. `from`: the tensor's map.
    TensorLoad {
        to: Access,
        from: Access,
        barrier: Access,
    },
    BulkStore {
        to: Access,
        from: Access,
    },
    EndBulk,
    /// Waits until all but so many of the groups that ended last have read their sources, or have written, too.
    WaitBulk {
        most: u32,
        has_written: bool,
    },
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
    /// A product of a warpgroup.
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
