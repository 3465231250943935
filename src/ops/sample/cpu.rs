//! Sampling on the CPU: each request walks its rows one after the other and stops where the walk ends.

use super::{Acceptance, Request};
use crate::abi::{VWD_SAMPLE_NAN, VWD_SAMPLE_NO_RESIDUAL, VWD_SAMPLE_NO_ROW, VWD_SAMPLE_NO_TOKEN};
use crate::core::along::Along;
use crate::core::dtype::{DType, Token};
use crate::core::status::Result;
use crate::ops::draw::rejection::{DraftRow, Outcome, read, try_in_turn};
use crate::ops::draw::{Distribution, Purpose, Scale, Settings, first_largest, forbid, uniform};
use crate::ops::verify::integer;
use crate::runtime::cpu::Cpu;
use crate::with_float;

pub fn run(cpu: &Cpu, r: &Request) -> Result<()> {
    let (tokens, draft_tokens) = (r.tokens(), r.sampling.draft_tokens());
    // A row, and for rejection the residual weights and the draft's row.
    let floats = tokens + if r.rule == Acceptance::Rejection { tokens + draft_tokens } else { 0 };
    let bytes = (r.gamma + 1) * tokens * size_of::<f32>();
    cpu.in_shares(&cpu.scratch(), r.batch, floats, bytes, |i, memory| {
        let (row, rest) = memory.split_at_mut(tokens);
        let (residual, draft_row) = rest.split_at_mut(if rest.is_empty() { 0 } else { tokens });
        // SAFETY: shapes were checked; each request is one task's, and the caller keeps the tensors valid.
        unsafe {
            let mut walk = Walk::new(r, i, [row, residual, draft_row]);
            walk.run();
            match r.next_token.dtype {
                DType::I32 => walk.write::<i32>(),
                _ => walk.write::<i64>(),
            }
        }
    })
}

/// One request.
struct Walk<'r, 'm> {
    r: &'r Request<'r>,
    i: usize,
    settings: Settings,
    seed: u64,
    position: i64,
    /// The row that decides, weights of the residual, and the row that the draft token was drawn from.
    memory: [&'m mut [f32]; 3],
    /// Draft tokens that were accepted.
    accepted: usize,
    next: Option<usize>,
    status: u32,
}

/// What a row decides.
enum Decision {
    Accept,
    Next(usize),
    Nothing,
}

impl<'r, 'm> Walk<'r, 'm> {
    /// # Safety
    /// The tensors are valid, `i` is below the batch size, and no other task writes this request's results.
    unsafe fn new(r: &'r Request, i: usize, memory: [&'m mut [f32]; 3]) -> Walk<'r, 'm> {
        // SAFETY: forwarded to the caller.
        let (settings, (seed, position)) = unsafe { (r.sampling.settings(i), r.sampling.noise(i)) };
        Walk { r, i, settings, seed, position, memory, accepted: 0, next: None, status: 0 }
    }

    /// # Safety
    /// As for [`Walk::new`]; so for all that follows.
    unsafe fn run(&mut self) {
        let (r, i) = (self.r, self.i);
        // SAFETY: forwarded to the caller.
        unsafe {
            let len = r.draft_lens.map_or(r.gamma, |lens| (lens.get::<i32, 1>([i]).max(0) as usize).min(r.gamma));
            let (remaining, least) = (r.end.remaining(i), r.end.min_remaining(i));
            while self.accepted < remaining {
                let row = self.accepted;
                let draft = r.draft.filter(|_| row < len).map(|t| integer(&t, [i, row]));
                let draft = draft.filter(|x| (0..r.tokens() as i64).contains(x)).map(|x| x as usize);
                match self.decide(row, draft) {
                    Decision::Accept => self.accepted += 1,
                    Decision::Next(token) => self.next = Some(token),
                    Decision::Nothing => return,
                }
                let last = self.next.or(draft).expect("a token was committed") as i64;
                if self.next.is_some() || row >= least && r.end.stops(i).any(|stop| stop == last) {
                    return;
                }
            }
        }
    }

    unsafe fn decide(&mut self, row: usize, draft: Option<usize>) -> Decision {
        let (r, form) = (self.r, self.r.sampling.target_form);
        // SAFETY: forwarded to the caller.
        unsafe {
            if !self.load(row) {
                self.status |= VWD_SAMPLE_NO_ROW;
                return Decision::Nothing;
            }
            let Some(likeliest) = first_largest(self.memory[0], form) else {
                self.status |= VWD_SAMPLE_NO_TOKEN;
                return Decision::Nothing;
            };
            // Logarithms are of the row before filters.
            let logarithm = r.logprobs.map(|_| Distribution::new(self.memory[0], Scale::new(form, 1.0)).logarithm());
            let decision = match self.settings.is_greedy() {
                true if draft == Some(likeliest) => Decision::Accept,
                true => Decision::Next(likeliest),
                false => self.sample(row, draft),
            };
            if let (Some(t), Some(logarithm)) = (r.logprobs, logarithm) {
                let token = match (&decision, draft) {
                    (Decision::Accept, Some(x)) => x,
                    (Decision::Next(y), _) => *y,
                    _ => return decision,
                };
                t.set([self.i, row], logarithm.of(self.memory[0][token]) as f32);
            }
            decision
        }
    }

    /// Loads the numbers of a row; `false` if target has no such row.
    unsafe fn load(&mut self, row: usize) -> bool {
        let (r, i) = (self.r, self.i);
        // SAFETY: forwarded to the caller; the row is one of the target's.
        unsafe {
            let number = match r.target_begin {
                Some(begin) => integer(&begin, [i]).saturating_add(row as i64),
                None => i as i64,
            };
            let is_flat = r.target.rank() == 2;
            if is_flat && !(0..r.target.dim(0) as i64).contains(&number) {
                return false;
            }
            let all_numbers = with_float!(r.target.dtype, T => {
                let along = match is_flat {
                    true => r.target.row::<T, 1>([number as usize]),
                    false => r.target.row::<T, 2>([i, row]),
                };
                read(along, r.sampling.target_form, self.memory[0])
            });
            self.status |= if all_numbers { 0 } else { VWD_SAMPLE_NAN };
            forbid(self.memory[0], r.sampling.target_form, r.end.forbidden(i, row));
            true
        }
    }

    /// What a row decides that is not greedy and has a token.
    unsafe fn sample(&mut self, row: usize, draft: Option<usize>) -> Decision {
        let (r, position) = (self.r, self.position.wrapping_add(row as i64));
        let number = |purpose, index| uniform(self.seed, position, purpose, index);
        let [numbers, residual, draft_row] = &mut self.memory;
        let scale = Scale::new(r.sampling.target_form, self.settings.temperature);
        self.settings.filter(numbers, scale);
        let p = Distribution::new(numbers, scale);
        let Some(x) = draft.filter(|_| r.rule == Acceptance::Rejection) else {
            let y = p.draw(number(Purpose::Draw, 0));
            return if draft == Some(y) { Decision::Accept } else { Decision::Next(y) };
        };
        // SAFETY: forwarded to the caller; there is a draft token, so that there is such a row.
        let q = unsafe { DraftRow::read(&r.sampling, [self.i, row], draft_row) };
        self.status |= if q.as_ref().is_none_or(|(_, all_numbers)| *all_numbers) { 0 } else { VWD_SAMPLE_NAN };
        match try_in_turn(&p, q.map(|(q, _)| q), false, [(0, x)].into_iter(), number, residual) {
            Outcome::Accepted(_) => Decision::Accept,
            Outcome::Drawn(y) => Decision::Next(y),
            Outcome::DrawnWithoutResidual(y) => {
                self.status |= VWD_SAMPLE_NO_RESIDUAL;
                Decision::Next(y)
            }
        }
    }

    /// # Safety
    /// As for [`Walk::new`]; `T` is the dtype of next_token.
    unsafe fn write<T: Token + TryFrom<i64>>(&self) {
        let (r, i) = (self.r, self.i);
        // SAFETY: shapes were checked; a row of committed has γ+1 places, and n is at most that.
        unsafe {
            let token = |row: usize| match self.next {
                Some(next) if row == self.accepted => next as i64,
                _ => integer(r.draft.as_ref().expect("it was accepted"), [i, row]),
            };
            let of = |token: i64| T::try_from(token).unwrap_or(T::NONE);
            let (n, finish) = r.end.cut(i, self.accepted + self.next.is_some() as usize, token);
            r.end.write(i, n, finish);
            r.next_token.set([i], if n > self.accepted { of(token(self.accepted)) } else { T::NONE });
            if let Some(accepted) = r.accepted {
                accepted.set([i], self.accepted.min(n) as i32);
            }
            if let Some(committed) = r.committed {
                (0..n).for_each(|row| committed.set([i, row], of(token(row))));
                (n..=r.gamma).for_each(|row| committed.set([i, row], T::NONE));
            }
            if let Some(logprobs) = r.logprobs {
                (n..=r.gamma).for_each(|row| logprobs.set([i, row], 0f32));
            }
            if let Some(status) = r.status {
                // uint32 and int32 are the same bits.
                Along::new(status.data().cast::<u32>(), status.stride(0)).set(i, self.status);
            }
        }
    }
}
