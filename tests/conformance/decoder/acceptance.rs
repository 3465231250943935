//! Drafts that a model of sequences verifies: what `vwd_decoder_accept` gives and what the decoder keeps of it, by the formulas in
//! double precision.

use super::*;

/// The time of a drafting step as a part of that of a verifying one.
pub const COST: f64 = 0.25;

/// What is known of a sequence's drafts.
#[derive(Clone, Copy, Default)]
pub struct Known {
    hits: f64,
    trials: f64,
    drafted: u32,
    accepted: u32,
}

impl Known {
    pub fn observe(&mut self, drafted: usize, accepted: usize) {
        self.hits = self.hits * 0.9 + accepted as f64;
        self.trials = self.trials * 0.9 + drafted.min(accepted + 1) as f64;
        (self.drafted, self.accepted) = (self.drafted + drafted as u32, self.accepted + accepted as u32);
    }

    fn acceptance(&self) -> f64 {
        (self.hits + 1.6) / (self.trials + 2.0)
    }
}

/// Compares what a decoder keeps of each sequence; `most` drafts are recommended at most.
pub fn check(backend: &Backend, decoder: &Decoder, known: &[Known], most: usize) {
    let vwd_decoder_details { draft_lens, acceptance, drafted, accepted, .. } = decoder.details();
    let [lens, acceptance, drafted, accepted] =
        [draft_lens, acceptance, drafted, accepted].map(|t| decoder.read(backend, t));
    for (i, of) in known.iter().enumerate() {
        let (p, found) = (of.acceptance(), f32::from_bits(acceptance[i]) as f64);
        assert!((found - p).abs() < 1e-5, "sequence {i}: acceptance {found}, expected {p}");
        assert_eq!((drafted[i], accepted[i]), (of.drafted, of.accepted), "sequence {i}: drafted, accepted");
        let rate = |gamma: usize| (0..=gamma as i32).map(|j| p.powi(j)).sum::<f64>() / (1.0 + COST * gamma as f64);
        let (best, gamma) = ((0..=most).map(rate).fold(0.0, f64::max), lens[i] as usize);
        assert!(gamma <= most, "sequence {i}: {gamma} drafts");
        // In float32 rates that are nearly the same may change places.
        assert!(rate(gamma) > best - 1e-5, "sequence {i}: {gamma} drafts give {}, others {best}", rate(gamma));
    }
}

/// What `vwd_decoder_accept` is to be given and to give: tokens of a small vocabulary, of which most drafts are the target's.
pub struct Verdicts {
    pub known: Vec<Known>,
    /// γ: most drafts of a row.
    pub most: usize,
}

impl Verdicts {
    pub fn new(sequences: usize, most: usize) -> Verdicts {
        Verdicts { known: vec![Known::default(); sequences], most }
    }

    pub fn forget(&mut self, sequence: usize) {
        self.known[sequence] = Known::default();
    }

    /// Verifies so many drafts of each sequence, some of them without counting them. The number of accepted drafts of each.
    pub fn accept(
        &mut self,
        backend: &Backend,
        rng: &mut Rng,
        decoder: &Decoder,
        sequences: &[usize],
        gammas: &[usize],
    ) -> Vec<usize> {
        let (rows, most) = (sequences.len(), self.most);
        let (dtype, agreement) = (rng.pick(&[I32, I64]), rng.pick(&[1, 2, 8]));
        let target = Array::from_fn(&[rows, most + 1], |_| rng.int(0..=2));
        let draft = Array::from_fn(&[rows, most], |at| {
            let wanted = target[[at[0], at[1]]];
            // Others never match: another token, or none.
            if rng.one_in(1 + agreement) { rng.pick(&[(wanted + 1) % 3, -1]) } else { wanted }
        });
        let numbers: Vec<i64> = sequences.iter().map(|&n| if rng.one_in(8) { -1 } else { n as i64 }).collect();
        let lens: Vec<i64> = gammas.iter().map(|&n| n as i64).collect();
        let has_lens = gammas.iter().any(|&n| n < most) || rng.one_in(2);
        let [draft_tensor, target_tensor] =
            [&draft, &target].map(|values| Tensor::ints(backend, dtype, values, &Layout::default()));
        let (lens, number_tensor) = (ints(backend, &lens), ints(backend, &numbers));
        let poisoned = |dtype, extents: &[usize]| Tensor::poisoned(backend, dtype, extents, &Layout::default());
        let (accepted, next) = (poisoned(I32, &[rows]), poisoned(dtype, &[rows]));
        let committed = poisoned(dtype, &[rows, most + 1]);
        let args = vwd_decoder_accept_args {
            draft: draft_tensor.c(),
            target: target_tensor.c(),
            draft_lens: if has_lens { lens.c() } else { absent() },
            sequences: number_tensor.c(),
            accepted: accepted.c(),
            next_token: next.c(),
            committed: committed.c(),
            ..args()
        };
        // SAFETY: the arguments are valid.
        backend.finish(unsafe { vwd_decoder_accept(decoder.0, &args, backend.stream()) });
        let (accepted, next, committed) = (accepted.read_ints(), next.read_ints(), committed.read_ints());
        let verdicts = (0..rows).map(|i| {
            let agreed = (0..gammas[i]).take_while(|&n| draft[[i, n]] == target[[i, n]]).count();
            assert_eq!(accepted[[i]], agreed as i64, "accepted of row {i}, {} drafts", gammas[i]);
            assert_eq!(next[[i]], target[[i, agreed]], "the next token of row {i}");
            for n in 0..=most {
                let expected = if n <= agreed { target[[i, n]] } else { -1 };
                assert_eq!(committed[[i, n]], expected, "committed token {n} of row {i}");
            }
            if numbers[i] >= 0 {
                self.known[sequences[i]].observe(gammas[i], agreed);
            }
            agreed
        });
        let verdicts = verdicts.collect();
        check(backend, decoder, &self.known, most);
        verdicts
    }
}
