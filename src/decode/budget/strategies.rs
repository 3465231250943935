//! Layers of a decoder's step by each strategy, as they run in an engine: selection on a branch beside attention, and what either costs the
//! other.
//!
//!   SERIAL                  attend of layer 0
//!   PRR, by scores          attend of layer 0, whose past scores predict the wanted share of the selection
//!   PRR foreseen, FORESEEN  foresee of layer 1 ─ attend of layer 0, whose list is there ─ the end of layer 1's selection
//!
//! On CUDA several such layers are captured in one graph, as engines capture a step: calls that are launched one by one also wait for the host,
//! and streams for each other's events. After each layer other keys and values are read, as weights are in a model, so that the next one finds
//! nothing in caches. That begins when the selection of layer 1 is done, which has no more time than attention of layer 0: in a model it runs
//! beside matrix products, too, and slows these down.

use super::layer::{Layer, Point};
use super::options::{Options, Shape};
use super::table::Kind;
use crate::abi::{
    VWD_PREDICT_FORESEEN, VWD_STRATEGY_FORESEEN, VWD_STRATEGY_PRR, VWD_STRATEGY_SERIAL, vwd_decoder_attend_args,
    vwd_decoder_foresee_args, vwd_decoder_options, vwd_decoder_policy, vwd_decoder_step, vwd_holt, vwd_rope,
    vwd_stream, vwd_tensor,
};
use crate::core::status::{Code, Error, Result};
use crate::core::versioned::zeroed;
use crate::decode::decoder::{Decoder, takes_prr};
use crate::runtime::{Recorder, Recording, Session, Timer};

/// The layer that is measured, and the one whose selection runs beside it.
const MEASURED: u32 = 0;
const NEXT: u32 = 1;

/// Layers that follow each other in what is timed on CUDA. On the CPU one is timed, and others are read before it.
const LAYERS: usize = 4;

/// The number of layers in what is timed.
pub fn layers(session: &Session) -> usize {
    if session.cuda().is_some() { LAYERS } else { 1 }
}

/// What follows each layer in what is timed: on CUDA other keys and values are read.
pub fn after_layer(layer: &Layer, stream: vwd_stream) -> Result<()> {
    if layer.session().cuda().is_some() { layer.flush(stream) } else { Ok(()) }
}

/// The strategies in the order in which they are measured.
pub const STRATEGIES: [Kind; 4] = [Kind::Serial, Kind::Prr, Kind::PrrForeseen, Kind::Foreseen];

/// Whether a decoder of the shape takes a strategy.
pub fn takes(session: &Session, shape: &Shape, kind: Kind) -> bool {
    let repairs = matches!(kind, Kind::Prr | Kind::PrrForeseen);
    !repairs || takes_prr(shape.block_size, shape.dims[1], session.cuda().is_some())
}

fn foresees(kind: Kind) -> bool {
    matches!(kind, Kind::PrrForeseen | Kind::Foreseen)
}

/// The most bytes that a decoder of the profile takes.
pub fn bytes(session: &Session, options: &Options, pages: usize) -> Result<usize> {
    let Options { shape, grid, .. } = options;
    let largest = |axis: &[f32]| *axis.last().expect("a value");
    let at = Point { context: largest(&grid.contexts) as usize, batch: largest(&grid.batches) as usize };
    let mut most = 0;
    for kind in STRATEGIES.into_iter().filter(|&kind| takes(session, shape, kind)) {
        let c = decoder_options(shape, kind, largest(&grid.ratios), at, pages);
        // SAFETY: the options have no array.
        most = most.max(unsafe { Decoder::bytes_of(session, &c)? });
    }
    Ok(most)
}

fn decoder_options(shape: &Shape, kind: Kind, ratio: f32, at: Point, pages: usize) -> vwd_decoder_options {
    let policy = vwd_decoder_policy {
        method: shape.method,
        k: shape.k as u32,
        init_blocks: shape.init_blocks as u32,
        local_blocks: shape.local_blocks as u32,
        dense_below: 0,
        window: 0,
        strategy: match kind {
            Kind::Prr | Kind::PrrForeseen => VWD_STRATEGY_PRR,
            Kind::Foreseen => VWD_STRATEGY_FORESEEN,
            _ => VWD_STRATEGY_SERIAL,
        },
        predict: if kind == Kind::PrrForeseen { VWD_PREDICT_FORESEEN } else { 0 },
        ratio: if kind == Kind::Serial { 0.0 } else { ratio },
        // The scores that were set stay, to less than rounding, whatever a step adds.
        holt: vwd_holt { alpha: if kind == Kind::Prr { f32::MIN_POSITIVE } else { 0.0 }, beta: 0.0, gamma: 0.0 },
        reserved: [0; 4],
    };
    vwd_decoder_options {
        layers: 1 + foresees(kind) as u32,
        max_rows: at.batch as u32,
        query_heads: shape.query_heads as u32,
        kv_heads: shape.kv_heads as u32,
        key_dim: shape.dims[0] as u32,
        value_dim: shape.dims[1] as u32,
        dtype_code: shape.dtype.code as u32,
        dtype_bits: shape.dtype.bits as u32,
        page_size: shape.page_size as u32,
        pages: pages as u32,
        block_size: shape.block_size as u32,
        scale: shape.scale(),
        max_tokens: at.context as u32,
        policy,
        ..zeroed()
    }
}

/// A decoder whose step is ready to be measured again and again.
pub struct Trial<'l> {
    layer: &'l Layer,
    kind: Kind,
    decoder: Decoder,
    step: vwd_decoder_step,
    attend: vwd_decoder_attend_args,
    foresee: vwd_decoder_foresee_args,
    /// What is timed; absent until the lists of an earlier step are known.
    recording: Option<Recording>,
    /// What the strategy selects, for each row and KV head; none of rows that are dense.
    selected: Vec<Vec<i32>>,
}

impl<'l> Trial<'l> {
    /// Summarises all tokens, makes room for scratch, and finds out what is selected.
    pub fn new(
        timer: &Timer,
        recorder: &Recorder,
        layer: &'l Layer,
        kind: Kind,
        ratio: f32,
        at: Point,
    ) -> Result<Trial<'l>> {
        let session = layer.session();
        let c = decoder_options(&layer.shape, kind, ratio, at, layer.pages());
        // SAFETY: the options have no array.
        let decoder = unsafe { Decoder::create(session, &c, None, None)? };
        let (step, attend, q) = layer.step(at);
        let foresee = vwd_decoder_foresee_args { layer: NEXT, q, ..zeroed() };
        let mut trial = Trial { layer, kind, decoder, step, attend, foresee, recording: None, selected: vec![] };
        let stream = layer.stream;
        trial.decoder.begin(&vwd_decoder_step { begin: layer.zeros(at), ..step }, stream)?;
        for number in 0..c.layers {
            let summarise = vwd_decoder_attend_args { layer: number, q: zeroed_tensor(), ..attend };
            trial.decoder.attend(&summarise, stream)?;
        }
        let scratch = trial.decoder.attend_scratch(&attend)?;
        session.reserve(stream, scratch)?;
        recorder.reserve(scratch)?;
        trial.decoder.begin(&step, stream)?;
        trial.foresee(MEASURED, stream)?;
        // The stream has passed all this before lists are read and written.
        timer.microseconds(|| Ok(()), || trial.one(stream))?;
        if kind != Kind::Foreseen {
            trial.selected = trial.decoder.selected(MEASURED)?;
        }
        trial.begin()?;
        trial.recording = Some(recorder.record(|stream| trial.layers(stream))?);
        Ok(trial)
    }

    /// Makes the lists that PRR attends miss a share of what it selects: `guesses` gives such a list of a selection.
    pub fn guess(&self, guesses: impl Fn(&[i32]) -> Vec<i32>) -> Result<()> {
        let lists: Vec<Vec<i32>> = self.selected.iter().map(|selected| guesses(selected)).collect();
        match self.kind {
            Kind::Prr => self.decoder.set_scores(MEASURED, &lists),
            _ => self.decoder.set_predicted(MEASURED, &lists),
        }
    }

    fn foresee(&self, number: u32, stream: vwd_stream) -> Result<()> {
        if !foresees(self.kind) {
            return Ok(());
        }
        let args = vwd_decoder_foresee_args { layer: number, ..self.foresee };
        self.decoder.foresee(None, &args, &zeroed::<vwd_rope>(), stream)
    }

    /// Comes before each `run`.
    pub fn begin(&self) -> Result<()> {
        self.decoder.begin(&self.step, self.layer.stream)
    }

    /// What is timed.
    pub fn run(&self) -> Result<()> {
        match &self.recording {
            Some(recording) => recording.run(self.layer.stream, |stream| self.layers(stream)),
            None => self.layers(self.layer.stream),
        }
    }

    fn layers(&self, stream: vwd_stream) -> Result<()> {
        (0..layers(self.layer.session())).try_for_each(|_| self.one(stream))
    }

    /// The layer that attends is always the same one, as if it had been the next one in the layer before.
    fn one(&self, stream: vwd_stream) -> Result<()> {
        if foresees(self.kind) {
            self.decoder.keep_foreseen(MEASURED, stream)?;
            self.foresee(NEXT, stream)?;
            if !self.decoder.finds_foreseen(MEASURED, stream)? {
                return Err(Error::new(Code::Internal, "a layer of a budget's profile would attend by SERIAL"));
            }
        }
        self.decoder.attend(&self.attend, stream)?;
        self.decoder.settle(stream)?;
        after_layer(self.layer, stream)
    }
}

fn zeroed_tensor() -> vwd_tensor {
    zeroed::<vwd_decoder_attend_args>().q
}

impl Layer {
    /// A decoder's step of a point, the attention of its first layer, and queries to foresee with.
    fn step(&self, at: Point) -> (vwd_decoder_step, vwd_decoder_attend_args, vwd_tensor) {
        let kv = self.kv(at);
        let (page_table, seq_lens) = (kv.page_table, kv.seq_lens);
        let step = vwd_decoder_step { longest: at.context as u32, page_table, seq_lens, ..zeroed() };
        // Without the pages that are read between calls.
        let [k, v] = [kv.k, kv.v]
            .map(|t| vwd_tensor { shape: [self.pages() as i64, t.shape[1], t.shape[2], t.shape[3], 0], ..t });
        let (q, out) = (self.q(at, 1), self.out(at, 1));
        (step, vwd_decoder_attend_args { layer: MEASURED, k, v, q, out, ..zeroed() }, q)
    }
}
