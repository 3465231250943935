//! The measurement of a grid.

use super::layer::{self, Layer, List, Point, Work};
use super::options::Options;
use super::strategies::{self, STRATEGIES, Trial};
use super::table::{Kind, LEAST, Table};
use crate::abi::vwd_stream;
use crate::core::allocate::filled;
use crate::core::status::Result;
use crate::runtime::{Recorder, Session, Timer};
use std::sync::Arc;

pub fn measure(session: &Arc<Session>, options: &Options, stream: vwd_stream) -> Result<Table> {
    // The timer comes first, since it refuses a stream that captures.
    let timer = Timer::new(session, stream)?;
    let layer = Layer::new(session, stream, options, strategies::bytes(session, options, layer::pages(options)))?;
    let recorder = Recorder::create(session, layer.flush_scratch()?)?;
    let meter = Meter { layer: &layer, timer: &timer, recorder: &recorder, options };
    let grid = &options.grid;
    let points = || {
        let batches = || grid.batches.iter().map(|&batch| batch as usize);
        grid.contexts
            .iter()
            .flat_map(move |&context| batches().map(move |batch| Point { context: context as usize, batch }))
    };
    session
        .reserve(stream, points().map(|at| meter.scratch(at)).try_fold(0, |most, bytes| bytes.map(|n| n.max(most)))?)?;
    let mut times = [const { Vec::new() }; Kind::COUNT];
    for (n, at) in points().enumerate() {
        let mut of_kinds: Vec<Vec<f32>> = meter.times(at)?.into();
        let rest = meter.rest()?;
        for kind in STRATEGIES {
            of_kinds.push(meter.strategy(at, kind, rest)?);
        }
        for (kind, of_point) in Kind::ALL.into_iter().zip(of_kinds) {
            if n == 0 {
                times[kind as usize] = filled(0.0, points().count() * of_point.len(), "a budget's times")?;
            }
            times[kind as usize][n * of_point.len()..][..of_point.len()].copy_from_slice(&of_point);
        }
    }
    Ok(Table { grid: grid.clone(), times })
}

struct Meter<'m> {
    layer: &'m Layer,
    timer: &'m Timer,
    recorder: &'m Recorder,
    options: &'m Options,
}

impl Meter<'_> {
    /// The most scratch that a call of a point takes.
    fn scratch(&self, at: Point) -> Result<u64> {
        let (layer, Options { shape, grid, .. }) = (self.layer, self.options);
        let mut most = layer.flush_scratch()?;
        let mut also = |bytes: Result<u64>| bytes.map(|bytes| most = most.max(bytes));
        also(layer.select(at, Work::TellScratch))?;
        also(layer.attend(at, List::Selected, shape.k, Work::TellScratch))?;
        for &ratio in &grid.ratios {
            also(layer.attend(at, List::Guessed, shape.guesses(ratio), Work::TellScratch))?;
            also(layer.repair(at, shape.guesses(ratio), Work::TellScratch))?;
        }
        for draft in 0..=grid.max_draft {
            also(layer.dense(at, draft + 1, Work::TellScratch))?;
        }
        Ok(most)
    }

    /// The times of a point, by kind.
    fn times(&self, at: Point) -> Result<[Vec<f32>; 5]> {
        let (layer, Options { shape, grid, .. }) = (self.layer, self.options);
        let (blocks, k) = (layer.blocks_of(at.context), shape.k);
        layer.lay_out(at)?;
        let select = self.time(|| layer.select(at, Work::Run))?;
        layer.write_list(at, List::Selected, k, |row| spread(k.min(blocks), blocks, row))?;
        let attend = self.time(|| layer.attend(at, List::Selected, k, Work::Run))?;
        let (mut guess, mut repair) = (vec![], vec![]);
        for &ratio in &grid.ratios {
            let capacity = shape.guesses(ratio);
            let guesses = |row| spread(capacity.min(blocks), blocks, row);
            layer.write_list(at, List::Guessed, capacity, guesses)?;
            guess.push(self.time(|| layer.attend(at, List::Guessed, capacity, Work::Run))?);
            for &share in &grid.shares {
                let missed = (share as f64 * k as f64).round() as usize;
                layer.write_list(at, List::Selected, k, |row| {
                    selection(&guesses(row), blocks, k.min(blocks), missed, row)
                })?;
                repair.push(self.time(|| layer.repair(at, capacity, Work::Run))?);
            }
        }
        let dense = (0..=grid.max_draft).map(|draft| self.time(|| layer.dense(at, draft + 1, Work::Run)));
        Ok([vec![select], vec![attend], guess, repair, dense.collect::<Result<_>>()?])
    }

    /// The time of what is read after the layers of a trial, without the layers.
    fn rest(&self) -> Result<f64> {
        let (layer, layers) = (self.layer, strategies::layers(self.layer.session()));
        if layer.session().cuda().is_none() || !layer.flushes() {
            return Ok(0.0);
        }
        let read = |stream| (0..layers).try_for_each(|_| strategies::after_layer(layer, stream));
        let recording = self.recorder.record(read)?;
        Ok(self.time_after(|| self.flush_launches(), || recording.run(layer.stream, read))? as f64)
    }

    /// The times of a decoder's layer, by ratio and share of missed blocks as the strategy has them. `rest`: what is read after the layers.
    fn strategy(&self, at: Point, kind: Kind, rest: f64) -> Result<Vec<f32>> {
        let (layer, Options { shape, grid, .. }) = (self.layer, self.options);
        let count = grid.inner(kind).iter().product();
        if !strategies::takes(layer.session(), shape, kind) {
            return filled(f32::INFINITY, count, "a budget's times");
        }
        let (blocks, mut times) = (layer.blocks_of(at.context), vec![]);
        let last_blocks = shape.local_blocks.max(1);
        let is_forced = |id: i32| (id as usize) < shape.init_blocks || id as usize + last_blocks >= blocks;
        let ratios = if kind == Kind::Serial { &grid.ratios[..1] } else { &grid.ratios };
        for &ratio in ratios {
            let trial = Trial::new(self.timer, self.recorder, layer, kind, ratio, at)?;
            let time = || -> Result<f32> {
                let all = self.time_after(|| trial.begin().and_then(|()| self.flush_launches()), || trial.run())?;
                Ok(((all as f64 - rest) / strategies::layers(layer.session()) as f64).max(LEAST) as f32)
            };
            if matches!(kind, Kind::Serial | Kind::Foreseen) {
                times.push(time()?);
                continue;
            }
            for &share in &grid.shares {
                let missed = (share as f64 * shape.k as f64).round() as usize;
                trial.guess(|selected| guesses(selected, blocks, shape.guesses(ratio), missed, is_forced))?;
                times.push(time()?);
            }
        }
        Ok(times)
    }

    /// Reads other keys and values, for longer than the launches of a layer's calls take.
    fn flush_launches(&self) -> Result<()> {
        let times = if self.layer.session().cuda().is_some() { 3 } else { 1 };
        (0..times).try_for_each(|_| self.layer.flush(self.layer.stream))
    }

    /// The median of the samples, in microseconds, after one that does not count.
    fn time(&self, call: impl Fn() -> Result<u64>) -> Result<f32> {
        self.time_after(|| self.layer.flush(self.layer.stream), || call().map(|_| ()))
    }

    fn time_after(&self, before: impl Fn() -> Result<()>, call: impl Fn() -> Result<()>) -> Result<f32> {
        let sample = || self.timer.microseconds(&before, &call);
        sample()?;
        let mut samples = (0..self.options.samples).map(|_| sample()).collect::<Result<Vec<f64>>>()?;
        samples.sort_unstable_by(f64::total_cmp);
        Ok(samples[samples.len() / 2].max(LEAST) as f32)
    }
}

/// `count` of the blocks 0 … blocks−1, ascending, one from each of as many equal parts; which one depends on the list's row.
fn spread(count: usize, blocks: usize, row: usize) -> Vec<i32> {
    let part = |j: usize| j * blocks / count;
    (0..count).map(|j| (part(j) + (row * 7 + j * 3) % (part(j + 1) - part(j))) as i32).collect()
}

/// A selection of `k` of the blocks of which guesses miss `missed`, or as many as there are that were not guessed.
fn selection(guesses: &[i32], blocks: usize, k: usize, missed: usize, row: usize) -> Vec<i32> {
    let mut is_guessed = vec![false; blocks];
    guesses.iter().for_each(|&id| is_guessed[id as usize] = true);
    let others: Vec<i32> = (0..blocks as i32).filter(|&id| !is_guessed[id as usize]).collect();
    let missed = missed.min(others.len()).min(k).max(k.saturating_sub(guesses.len()));
    let of = |ids: &[i32], count| -> Vec<i32> {
        if count == 0 { vec![] } else { spread(count, ids.len(), row).iter().map(|&n| ids[n as usize]).collect() }
    };
    let mut ids = [of(guesses, k - missed), of(&others, missed)].concat();
    ids.sort_unstable();
    ids
}

/// `count` guesses of the blocks, or as many as there are, of which a selection misses `missed` as far as others are there to be guessed
/// instead. Forced blocks are guessed in any case.
fn guesses(selected: &[i32], blocks: usize, count: usize, missed: usize, is_forced: impl Fn(i32) -> bool) -> Vec<i32> {
    let mut is_selected = vec![false; blocks];
    selected.iter().for_each(|&id| is_selected[id as usize] = true);
    let of = |keep: &dyn Fn(i32) -> bool| (0..blocks as i32).filter(|&id| keep(id)).collect::<Vec<i32>>();
    let mut ids = of(&|id| is_forced(id));
    let (found, others) =
        (of(&|id| is_selected[id as usize] && !is_forced(id)), of(&|id| !is_selected[id as usize] && !is_forced(id)));
    let room = count.min(blocks).saturating_sub(ids.len());
    let right = found.len().saturating_sub(missed).max(room.saturating_sub(others.len())).min(room).min(found.len());
    for (ids_of, count) in [(&found, right), (&others, (room - right).min(others.len()))] {
        if count > 0 {
            ids.extend(spread(count, ids_of.len(), 0).iter().map(|&n| ids_of[n as usize]));
        }
    }
    ids.sort_unstable();
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_spread_over_all_blocks_without_repeats() {
        for blocks in 1..40 {
            for count in 1..=blocks {
                for row in 0..3 {
                    let ids = spread(count, blocks, row);
                    assert_eq!(ids.len(), count);
                    assert!(
                        ids.is_sorted_by(|a, b| a < b) && ids[count - 1] < blocks as i32,
                        "{count} of {blocks}: {ids:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn selection_misses_what_was_asked_for_or_what_there_is() {
        for (guessed, k, missed, expected) in
            [(8, 8, 0, 0), (8, 8, 3, 3), (8, 8, 8, 8), (16, 8, 4, 4), (36, 8, 8, 4), (40, 8, 8, 0)]
        {
            let (blocks, row) = (40, 1);
            let guesses = spread(guessed, blocks, row);
            let selected = selection(&guesses, blocks, k, missed, row);
            assert!(selected.len() == k && selected.is_sorted_by(|a, b| a < b), "{selected:?}");
            let found = selected.iter().filter(|id| !guesses.contains(id)).count();
            assert_eq!(found, expected, "{guessed} guessed, {missed} to be missed");
        }
    }

    #[test]
    fn guesses_miss_what_was_asked_for_or_what_there_is() {
        let (blocks, is_forced) = (40, |id: i32| !(1..39).contains(&id));
        let selected = vec![0, 3, 4, 7, 11, 20, 30, 39];
        for (count, missed, expected) in
            [(8, 0, 0), (8, 3, 3), (8, 8, 6), (12, 2, 2), (36, 6, 4), (40, 6, 0), (60, 6, 0)]
        {
            let guesses = guesses(&selected, blocks, count, missed, is_forced);
            assert!(guesses.is_sorted_by(|a, b| a < b) && guesses.len() == count.min(blocks), "{guesses:?}");
            let found = selected.iter().filter(|id| !guesses.contains(id)).count();
            assert_eq!(found, expected, "{count} guesses, {missed} to be missed: {guesses:?}");
        }
    }
}
