//! The beginning of a step: what the caller says of its rows, and which of them attend how.

use super::rows::{Counted, Distribute, Modes, Tiers};
use super::{Decoder, Step};
use crate::abi::{VWD_DECODER_DENSE, VWD_DECODER_SPARSE, vwd_decoder_step, vwd_stream, vwd_tensor};
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Tensor};
use crate::ops::contents::{self, Number, Rule};
use crate::runtime::require_no_flags;
use std::sync::atomic::Ordering::Relaxed;

/// What the caller says of a step's rows, checked. Tensors are [B].
struct Rows<'a> {
    batch: usize,
    /// Q
    positions: usize,
    /// The mode of all rows, if they have one.
    mode: Option<u32>,
    modes: Option<Tensor<'a>>,
    seq_lens: Tensor<'a>,
    q_lens: Option<Tensor<'a>>,
    begin: Option<Tensor<'a>>,
    sequences: Option<Tensor<'a>>,
    /// Tokens that the pages of a row have room for.
    room: usize,
}

impl Decoder {
    pub fn begin(&self, c: &vwd_decoder_step, stream: vwd_stream) -> Result<()> {
        let rows = Rows::from_c(self, c)?;
        let on = self.session.on(stream)?;
        contents::check(&self.session, &on, || rows.rules(self))?;
        self.join_last_foresight(&on)?;
        self.to_fetch.lock().clear();
        drop(on);
        let (page_table, sequences) = match &self.tiered {
            Some(tiered) => tiered.begin(self, rows.batch, &c.sequences, stream)?,
            None => (c.page_table, c.sequences),
        };
        self.distribution(&rows, c.shortest).run(&self.session.on(stream)?)?;
        if let Some(fallback) = &self.fallback {
            let longest = if c.longest == 0 { rows.room } else { rows.room.min(c.longest as usize) };
            let takes_strategies = rows.positions == 1 && rows.mode != Some(VWD_DECODER_DENSE);
            fallback.decide(longest, rows.batch, takes_strategies);
        }
        *self.step.lock() = Some(Step {
            page_table,
            seq_lens: c.seq_lens,
            batch: rows.batch,
            positions: rows.positions,
            mode: rows.mode,
            shortest: c.shortest,
            has_begin: rows.begin.is_some(),
            sequences,
            // A root alone is a chain.
            tree: if rows.positions > 1 { c.tree } else { vwd_tensor { data: std::ptr::null_mut(), ..c.tree } },
            number: self.steps.fetch_add(1, Relaxed) + 1,
            attended: 0,
        });
        Ok(())
    }

    /// The launch that decides on the device, for each row and threshold of the layers, whether the row is sparse or dense.
    fn distribution<'a>(&self, rows: &Rows<'a>, shortest: u32) -> Distribute<'a> {
        let (options, plan, memory) = (&self.options, &self.plan, &self.memory);
        let has_places = self.tiered.is_some() || options.layers.iter().any(|policy| policy.strategy.foresees());
        let tiers = || Tiers {
            table_blocks: options.table_blocks,
            floors: memory.at(plan.tiered.floors),
            stored: memory.at(plan.tiered.stored),
            windows: memory.at(plan.tiered.windows_at),
            window_count: plan.windows.len(),
            seen_cap: plan.tiered.seen_cap,
            seen_ids: memory.at(plan.tiered.seen[0]),
            seen_counts: memory.at(plan.tiered.seen[1]),
            newest_ids: memory.at(plan.tiered.newest[0]),
            newest_counts: memory.at(plan.tiered.newest[1]),
        };
        let counted = || Counted {
            sequences: rows.sequences,
            count: options.max_sequences,
            drafts: options.max_draft,
            rows: memory.at(plan.term.rows),
            lens: memory.at(plan.term.counted),
            begin: memory.at(plan.term.begin),
        };
        Distribute {
            modes: rows.modes.map_or(Modes::All(rows.mode.unwrap_or(0)), Modes::Each),
            seq_lens: rows.seq_lens,
            q_lens: rows.q_lens,
            begin: rows.begin,
            positions: rows.positions,
            page_size: options.page_size,
            shortest,
            classes: plan.thresholds.len(),
            max_rows: options.max_rows,
            thresholds: memory.at(plan.thresholds_at),
            lens: memory.at(plan.lens),
            rows: memory.at(plan.rows),
            from: memory.at(plan.from),
            places: if has_places { memory.at(plan.places) } else { std::ptr::null_mut() },
            tiers: self.tiered.is_some().then(tiers),
            counted: options.has_term.then(counted),
        }
    }
}

impl<'a> Rows<'a> {
    fn from_c(decoder: &Decoder, c: &'a vwd_decoder_step) -> Result<Rows<'a>> {
        require_no_flags("flags", c.flags)?;
        require_no_flags("reserved", c.reserved)?;
        let (checks, options, i32) = (decoder.session.checks(), &decoder.options, &[DType::I32]);
        let positions = c.positions.max(1) as usize;
        if positions > options.max_positions {
            let expected = format!("at most max_positions, {}", options.max_positions);
            return Err(Error::argument("positions", positions, expected));
        }
        let seq_lens = checks.input("seq_lens", &c.seq_lens, i32, &[("B", ANY)])?;
        if seq_lens.dim(0) > options.max_rows {
            let expected = format!("at most max_rows, {}", options.max_rows);
            return Err(Error::argument("seq_lens", format!("{} rows", seq_lens.dim(0)), expected));
        }
        let batch = ("B", seq_lens.dim(0));
        let table = checks.optional_input("page_table", &c.page_table, i32, &[batch, ("max_pages", ANY)])?;
        if decoder.tiered.is_some() && table.is_some() {
            return Err(Error::argument("page_table", "given on a cache", "none: the cache has the table"));
        }
        let q_lens = checks.optional_input("q_lens", &c.q_lens, i32, &[batch])?;
        let begin = checks.optional_input("begin", &c.begin, i32, &[batch])?;
        let modes = checks.optional_input("modes", &c.modes, i32, &[batch])?;
        let sequences = checks.optional_input("sequences", &c.sequences, i32, &[batch])?;
        let words = [batch, ("Q", positions), ("⌈Q/32⌉", positions.div_ceil(32))];
        let tree = checks.optional_input("tree", &c.tree, &[DType::U32], &words)?;
        if options.has_term && tree.is_some() && c.mode != VWD_DECODER_DENSE {
            let expected = "absent, or mode VWD_DECODER_DENSE: with options.remainder no sparse row takes a tree";
            return Err(Error::argument("tree", "given to a step that may have sparse rows", expected));
        }
        let remembers = options.layers.iter().any(|policy| policy.strategy.remembers()) || options.has_term;
        if remembers && decoder.tiered.is_none() && sequences.is_none() && batch.1 > options.max_sequences {
            let expected = format!("at most max_sequences, {}", options.max_sequences);
            return Err(Error::argument("seq_lens", format!("{} rows without sequences", batch.1), expected));
        }
        let mode = match (c.mode, modes) {
            (0, Some(_)) => None,
            (0, None) => Some(VWD_DECODER_SPARSE),
            (VWD_DECODER_SPARSE | VWD_DECODER_DENSE, None) => Some(c.mode),
            (VWD_DECODER_SPARSE | VWD_DECODER_DENSE, Some(_)) => {
                return Err(Error::argument("mode", c.mode, "0 beside modes"));
            }
            (other, _) => return Err(Error::argument("mode", other, "a VWD_DECODER_* value (0 to 2)")),
        };
        let pages = match decoder.tiered {
            Some(_) => options.table_blocks,
            None => table.map_or(1, |table| table.dim(1)),
        };
        let room = options.page_size.saturating_mul(pages);
        Ok(Rows { batch: batch.1, positions, mode, modes, seq_lens, q_lens, begin, sequences, room })
    }

    /// What a session that checks contents requires of the tensors.
    fn rules(&self, decoder: &Decoder) -> Vec<Rule<'a>> {
        let most = i32::MAX as usize;
        let lens = Rule::up_to(self.seq_lens, self.room.min(most));
        let modes = self.modes.map(|modes| Rule::within(modes, 0, Number::constant(VWD_DECODER_DENSE as usize + 1)));
        let q_lens = self.q_lens.map(|lens| Rule::up_to(lens, self.positions));
        let begin = self.begin.map(|begin| Rule::up_to(begin, most));
        [Some(lens), modes, q_lens, begin].into_iter().flatten().chain(decoder.rules(self.sequences)).collect()
    }
}
