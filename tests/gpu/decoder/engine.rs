//! An engine's sequences on pages, the same ones for all decoders of a test: they come, go, are forked and rolled back, and move from row to row.

use super::{GAMMA, MAX_PAGES, NUMBERS, PAGE, PAGES, ROWS, Side};
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

const ROOM: usize = MAX_PAGES * PAGE;
/// `begin` of rows that have no token new to the summaries.
const NOTHING_NEW: i64 = i32::MAX as i64;

struct Sequence {
    number: usize,
    pages: Vec<usize>,
    len: usize,
    /// The first token that the engine wrote itself and no step has summarised.
    begin: Option<usize>,
}

pub struct Engine {
    /// How many sequences have each page.
    users: Vec<usize>,
    /// The first ones are the rows of the next step.
    sequences: Vec<Sequence>,
    forks: usize,
}

impl Engine {
    pub fn new() -> Engine {
        Engine { users: vec![0; PAGES], sequences: vec![], forks: 0 }
    }

    /// Tokens of the sequences.
    pub fn lens(&self) -> Vec<usize> {
        self.sequences.iter().map(|sequence| sequence.len).collect()
    }

    pub fn forks(&self) -> usize {
        self.forks
    }

    /// What happens to sequences before a step: in the first ones each thing once, later now and then.
    pub fn between_steps(&mut self, rng: &mut Rng, replay: usize, sides: &[Side]) {
        let most = if sides[0].verdict.is_some() { GAMMA + 1 } else { 1 };
        let is_full = |sequence: &Sequence| sequence.len + most > ROOM;
        while let Some(full) = self.sequences.iter().position(is_full) {
            self.leave(full);
        }
        let count = self.sequences.len();
        let any = rng.size(0..=count.max(1) - 1);
        match if replay < 6 { replay } else { rng.size(0..=15) } {
            0 if count == 0 => (0..ROWS).for_each(|_| self.join(rng, sides)),
            1 | 8 => self.fork(rng, sides),
            2 if count > 1 => self.leave(any),
            3 if count > 0 => self.roll_back(rng, any),
            // A reset of a sequence that goes on changes what is predicted.
            4 if count > 0 => reset(Some(self.sequences[any].number), sides),
            5 | 6 => self.join(rng, sides),
            7 => reset(None, sides),
            _ => {}
        }
        if self.sequences.is_empty() {
            self.join(rng, sides);
        }
        if rng.one_in(3) {
            rng.shuffle(&mut self.sequences);
        }
    }

    fn free_number(&self, rng: &mut Rng) -> Option<usize> {
        let is_free = |number: &usize| self.sequences.iter().all(|sequence| sequence.number != *number);
        let free: Vec<usize> = (0..NUMBERS).filter(is_free).collect();
        (!free.is_empty()).then(|| rng.pick(&free))
    }

    /// A page for each token below `len`.
    fn grow(&mut self, sequence: usize, len: usize) {
        while self.sequences[sequence].pages.len() * PAGE < len {
            let free = self.users.iter().position(|&users| users == 0).expect("there are pages for all sequences");
            self.users[free] = 1;
            self.sequences[sequence].pages.push(free);
        }
    }

    /// The prompt of a new sequence is what its pages hold.
    fn join(&mut self, rng: &mut Rng, sides: &[Side]) {
        let Some(number) = self.free_number(rng) else { return };
        let len = rng.size(60..=ROOM - 20);
        self.sequences.insert(0, Sequence { number, pages: vec![], len, begin: Some(0) });
        self.grow(0, len);
        reset(Some(number), sides);
    }

    fn leave(&mut self, sequence: usize) {
        self.sequences.remove(sequence).pages.into_iter().for_each(|page| self.users[page] -= 1);
    }

    /// Whole pages are shared; the last one is copied.
    fn fork(&mut self, rng: &mut Rng, sides: &[Side]) {
        // A page is summarised by one of those that share it: the parent has no token that is new to the summaries.
        let parents: Vec<usize> = (0..self.sequences.len()).filter(|&n| self.sequences[n].begin.is_none()).collect();
        let (false, Some(number)) = (parents.is_empty(), self.free_number(rng)) else { return };
        let Sequence { pages, len, .. } = &self.sequences[rng.pick(&parents)];
        let (len, whole, copied) = (*len, len / PAGE, pages.get(len / PAGE).copied());
        let shared = pages[..whole].to_vec();
        shared.iter().for_each(|&page| self.users[page] += 1);
        let begin = (len % PAGE > 0).then_some(whole * PAGE);
        self.sequences.insert(0, Sequence { number, pages: shared, len, begin });
        self.grow(0, len);
        if let Some(from) = copied.filter(|_| begin.is_some()) {
            let to = self.sequences[0].pages[whole];
            let caches = sides.iter().flat_map(|side| side.caches.iter().flatten());
            caches.for_each(|cache| cache.copy_within(from, to));
        }
        reset(Some(number), sides);
        self.forks += 1;
    }

    /// Back to a token of a page that no other sequence has.
    fn roll_back(&mut self, rng: &mut Rng, sequence: usize) {
        let Sequence { pages, len, begin, .. } = &mut self.sequences[sequence];
        let shared = pages.iter().filter(|&&page| self.users[page] > 1).count() * PAGE;
        *len = len.saturating_sub(rng.size(1..=20)).max(shared).max(1).min(*len);
        // Where what is foreseen must not depend on the tokens that went.
        if begin.is_none() && rng.one_in(2) {
            *begin = Some((*len - 1) / PAGE * PAGE).filter(|&begin| begin >= shared);
        }
    }

    /// Those of the first sequences in a step, by row; `otherwise` of rows without a sequence.
    fn of_rows(&self, otherwise: i64, of: impl Fn(usize, &Sequence) -> i64) -> [i64; ROWS] {
        std::array::from_fn(|i| self.sequences.get(i).map_or(otherwise, |sequence| of(i, sequence)))
    }

    /// Makes room for so many tokens more of each row, and says which pages and numbers they have.
    fn place(&mut self, sides: &[Side], tokens: [i64; ROWS]) {
        for (i, more) in tokens.into_iter().enumerate().take(self.sequences.len()) {
            self.grow(i, self.sequences[i].len + more as usize);
        }
        let page = |i: usize, p: usize| self.sequences.get(i)?.pages.get(p).map(|&page| page as i64);
        let table = Array::from_fn(&[ROWS, MAX_PAGES], |at| page(at[0], at[1]).unwrap_or(-1));
        let numbers = self.of_rows(-1, |_, sequence| sequence.number as i64);
        for side in sides {
            side.table.refill_ints(&table);
            side.sequences.refill_ints(&Array::new(&[ROWS], numbers.to_vec()));
        }
    }

    /// Row i has so many tokens more, if it took part.
    pub fn take(&mut self, i: usize, tokens: usize) {
        let sequence = &mut self.sequences[i];
        (sequence.len, sequence.begin) = (sequence.len + tokens, None);
    }

    fn begin(&self) -> [i64; ROWS] {
        self.of_rows(NOTHING_NEW, |_, sequence| sequence.begin.map_or(NOTHING_NEW, |begin| begin as i64))
    }

    /// A step of one token a row.
    pub fn step(&mut self, rng: &mut Rng, sides: &[Side]) {
        let mode = |rng: &mut Rng| if rng.one_in(8) { rng.int(0..=2) } else { VWD_DECODER_SPARSE as i64 };
        let modes = [(); ROWS].map(|()| mode(rng));
        let modes = self.of_rows(VWD_DECODER_SKIP as i64, |i, _| modes[i]);
        let begin = self.begin();
        self.place(sides, [1; ROWS]);
        for i in (0..ROWS).filter(|&i| modes[i] != VWD_DECODER_SKIP as i64) {
            self.take(i, 1);
        }
        let lens = self.of_rows(0, |_, sequence| sequence.len as i64);
        sides.iter().for_each(|side| side.place(0, &[lens, [1; ROWS], begin, modes]));
    }

    /// The steps of a round: so many drafts of each row, and one token more in the step that verifies them. Rows without drafts take no part now and
    /// then; the rows that do.
    pub fn round(&mut self, rng: &mut Rng, sides: &[Side]) -> [bool; ROWS] {
        let (count, begin) = (self.sequences.len(), self.begin());
        let gammas: [i64; ROWS] = std::array::from_fn(|i| if i < count { rng.int(0..=GAMMA as i64) } else { 0 });
        let is_taken = std::array::from_fn(|i| i < count && (gammas[i] > 0 || rng.one_in(2)));
        let lens = |engine: &Engine, of: &dyn Fn(usize) -> i64| engine.of_rows(0, |i, row| row.len as i64 + of(i));
        self.place(sides, gammas.map(|gamma| gamma + 1));
        for n in 0..GAMMA as i64 {
            let drafts = |i: usize| n < gammas[i];
            let modes = std::array::from_fn(|i| if drafts(i) { VWD_DECODER_SPARSE } else { VWD_DECODER_SKIP } as i64);
            let begin = if n == 0 { begin } else { [NOTHING_NEW; ROWS] };
            let rows = [lens(self, &|_| n + 1), [1; ROWS], begin, modes];
            sides.iter().for_each(|side| side.place(n as usize, &rows));
        }
        let modes = is_taken.map(|is_taken| if is_taken { VWD_DECODER_DENSE } else { VWD_DECODER_SKIP } as i64);
        let begin = std::array::from_fn(|i| if gammas[i] == 0 { begin[i] } else { NOTHING_NEW });
        let rows = [lens(self, &|i| gammas[i] + 1), gammas.map(|gamma| gamma + 1), begin, modes];
        let target = Array::from_fn(&[ROWS, GAMMA + 1], |_| rng.int(0..=2));
        let draft = Array::from_fn(&[ROWS, GAMMA], |at| if rng.one_in(4) { 3 } else { target[[at[0], at[1]]] });
        let numbers = self.of_rows(-1, |i, sequence| if is_taken[i] { sequence.number as i64 } else { -1 });
        for side in sides {
            side.place(GAMMA, &rows);
            let verdict = side.verdict.as_ref().expect("a round");
            verdict.draft.refill_ints(&draft);
            verdict.target.refill_ints(&target);
            verdict.lens.refill_ints(&Array::new(&[ROWS], gammas.to_vec()));
            verdict.sequences.refill_ints(&Array::new(&[ROWS], numbers.to_vec()));
        }
        is_taken
    }
}

/// What is remembered of a sequence of that number, or of all, is forgotten.
fn reset(number: Option<usize>, sides: &[Side]) {
    for side in sides {
        let numbers = number.map(|number| {
            let numbers = Array::new(&[1], vec![number as i64]);
            Tensor::ints(side.backend, I32, &numbers, &Layout::default())
        });
        let args = vwd_decoder_reset_args { sequences: numbers.as_ref().map_or(absent(), Tensor::c), ..args() };
        // SAFETY: the arguments are valid.
        side.backend.finish(unsafe { vwd_decoder_reset(side.decoder.0, &args, side.backend.stream()) });
    }
}
