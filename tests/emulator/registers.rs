//! Shares registers out: PTX names a new one for nearly every result, tens of thousands in a kernel, of which a few hundred are in use at
//! a time. Each gets a place for as long as its value may still be read (linear scan over liveness by blocks).

use crate::instruction::{Constant, IS_CONSTANT, Instruction, Op, Role};
use crate::values::Class;

struct Block {
    begin: usize,
    end: usize,
    next: Vec<usize>,
}

fn blocks(code: &[Instruction]) -> Vec<Block> {
    let mut is_first = vec![false; code.len() + 1];
    is_first[0] = true;
    for (at, instruction) in code.iter().enumerate() {
        match instruction.op {
            Op::Branch(target) => (is_first[target as usize], is_first[at + 1]) = (true, true),
            Op::Exit | Op::Trap => is_first[at + 1] = true,
            _ => (),
        }
    }
    let begins: Vec<usize> = (0..code.len()).filter(|&at| is_first[at]).collect();
    let block_of = |at: usize| begins.partition_point(|&begin| begin <= at) - 1;
    let block = |n: usize| {
        let (begin, end) = (begins[n], begins.get(n + 1).copied().unwrap_or(code.len()));
        let last = &code[end - 1];
        let goes_on = match last.op {
            Op::Branch(_) | Op::Exit | Op::Trap => last.guard.is_some(),
            _ => true,
        };
        let mut next = vec![];
        if let Op::Branch(target) = last.op {
            next.push(block_of(target as usize));
        }
        if goes_on && end < code.len() {
            next.push(n + 1);
        }
        Block { begin, end, next }
    };
    (0..begins.len()).map(block).collect()
}

/// Registers of one class that an instruction reads (false) or writes (true); its guard, too.
fn touched<'a>(
    instruction: &'a Instruction,
    roles: &'a [Role],
    class: Class,
) -> impl Iterator<Item = (usize, bool)> + 'a {
    let guard = instruction.guard.filter(|_| class == Class::Predicate).map(|(register, _)| (register, false));
    let operands = instruction
        .r
        .iter()
        .zip(roles)
        .filter(move |(_, role)| role.0 == class)
        .map(|(&register, role)| (register, role.1));
    guard
        .into_iter()
        .chain(operands)
        .filter(|(register, _)| register & IS_CONSTANT == 0)
        .map(|(register, is_result)| (register as usize, is_result))
}

/// Returns how many registers of each class there are, constants included, and where the constants are.
pub fn share(
    code: &mut [Instruction],
    roles: &[Vec<Role>],
    registers: [u32; 3],
    constants: &[(Constant, u32)],
) -> ([usize; 3], Vec<(Constant, u32)>) {
    let blocks = blocks(code);
    let mut counts = [0; 3];
    for class in [Class::Predicate, Class::Word, Class::Double] {
        let places = places(code, roles, &blocks, class, registers[class as usize] as usize);
        let count = places.iter().map(|&place| place + 1).max().unwrap_or(0);
        let placed = |register: u32| {
            if register & IS_CONSTANT != 0 { count + (register & !IS_CONSTANT) } else { places[register as usize] }
        };
        for (instruction, roles) in code.iter_mut().zip(roles) {
            for (register, role) in instruction.r.iter_mut().zip(roles) {
                if role.0 == class {
                    *register = placed(*register);
                }
            }
            if class == Class::Predicate
                && let Some((register, _)) = &mut instruction.guard
            {
                *register = placed(*register);
            }
        }
        counts[class as usize] = count as usize;
    }
    let placed = constants
        .iter()
        .map(|&(constant, at)| (constant, counts[constant.class() as usize] as u32 + (at & !IS_CONSTANT)));
    let placed: Vec<_> = placed.collect();
    for (constant, _) in constants {
        counts[constant.class() as usize] += 1;
    }
    (counts, placed)
}

/// The place of each register of a class.
fn places(code: &[Instruction], roles: &[Vec<Role>], blocks: &[Block], class: Class, registers: usize) -> Vec<u32> {
    let words = registers.div_ceil(64);
    let empty = || vec![vec![0u64; words]; blocks.len()];
    // Read before they are written in a block; written in every thread that passes it; needed where it ends.
    let (mut reads, mut writes, mut after) = (empty(), empty(), empty());
    let set = |bits: &mut [u64], n: usize| bits[n / 64] |= 1 << (n % 64);
    let has = |bits: &[u64], n: usize| bits[n / 64] >> (n % 64) & 1 != 0;
    for (n, block) in blocks.iter().enumerate() {
        for at in block.begin..block.end {
            for (register, _) in touched(&code[at], &roles[at], class).filter(|(_, is_result)| !is_result) {
                if !has(&writes[n], register) {
                    set(&mut reads[n], register);
                }
            }
            for (register, _) in touched(&code[at], &roles[at], class).filter(|(_, is_result)| *is_result) {
                if code[at].guard.is_none() {
                    set(&mut writes[n], register);
                } else if !has(&writes[n], register) {
                    set(&mut reads[n], register);
                }
            }
        }
    }
    let mut changes = true;
    while changes {
        changes = false;
        for n in (0..blocks.len()).rev() {
            for &next in &blocks[n].next {
                for word in 0..words {
                    let before = reads[next][word] | after[next][word] & !writes[next][word];
                    if before & !after[n][word] != 0 {
                        after[n][word] |= before;
                        changes = true;
                    }
                }
            }
        }
    }
    // From the first to the last place in the text where its value matters.
    let mut spans = vec![(usize::MAX, 0usize); registers];
    let mut extend = |register: usize, at: usize| {
        let span = &mut spans[register];
        *span = (span.0.min(at), span.1.max(at));
    };
    for (n, block) in blocks.iter().enumerate() {
        for at in block.begin..block.end {
            touched(&code[at], &roles[at], class).for_each(|(register, _)| extend(register, at));
        }
        for word in 0..words {
            let before = reads[n][word] | after[n][word] & !writes[n][word];
            for (bits, at) in [(before, block.begin), (after[n][word], block.end)] {
                let mut rest = bits;
                while rest != 0 {
                    extend(word * 64 + rest.trailing_zeros() as usize, at);
                    rest &= rest - 1;
                }
            }
        }
    }
    let mut order: Vec<usize> = (0..registers).filter(|&register| spans[register].0 != usize::MAX).collect();
    order.sort_by_key(|&register| spans[register]);
    let (mut places, mut free, mut count) = (vec![0; registers], Vec::new(), 0);
    let mut used = std::collections::BinaryHeap::new();
    for register in order {
        let (begin, end) = spans[register];
        // Results may not take the place of operands of the same instruction: some are written before all are read.
        while let Some(&(std::cmp::Reverse(last), place)) = used.peek() {
            if last >= begin {
                break;
            }
            used.pop();
            free.push(place);
        }
        let place = free.pop().unwrap_or_else(|| {
            count += 1;
            count - 1
        });
        places[register] = place;
        used.push((std::cmp::Reverse(end), place));
    }
    places
}
