//! Selection for a layer before its queries are there: from queries that a forecast gives, or that the caller has.
//!
//! Given queries are copied on the caller's stream to memory of the decoder. A forecast makes them there on a branch, which reads the
//! caller's tensors: the next call of the decoder joins it where it has read them. Selection then runs on the branch, and `attend` of the layer
//! joins it. The step's own tokens are not summarised yet: blocks are selected from the tokens before them, and the block of the row's own token
//! is added where it is new. On a cache the branch then asks for the list's blocks, which travel while the layers before run: as soon as the one
//! that is attended next has its own blocks.

use super::Decoder;
use super::layer::Layer;
use super::memory::Kind;
use super::rows::{Complete, Take};
use crate::abi::{
    vwd_block_list, vwd_decoder_foresee_args, vwd_forecast_project_args, vwd_rope, vwd_select_blocks_args, vwd_stream,
    vwd_tensor,
};
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Device, Tensor, given};
use crate::core::versioned::zeroed;
use crate::decode::forecast::{Forecast, ProjectRequest};
use crate::runtime::{On, require_no_flags};
use std::sync::atomic::Ordering::Relaxed;

/// Where queries come from.
enum Source<'a> {
    /// [B, heads, D]
    Given(Tensor<'a>),
    Forecast(&'a Forecast),
}

impl Decoder {
    pub fn foresee(
        &self,
        forecast: Option<&Forecast>,
        c: &vwd_decoder_foresee_args,
        rope: &vwd_rope,
        stream: vwd_stream,
    ) -> Result<()> {
        self.foresee_layer(forecast, c, rope, stream).inspect_err(|_| self.join_after_failure(stream))
    }

    /// Makes the caller's stream wait for what was foreseen, after a call of the step has failed: the step may be given up, and its sequences changed.
    pub(super) fn join_after_failure(&self, stream: vwd_stream) {
        if let Ok(on) = self.session.on(stream) {
            let _ = self.join_last_foresight(&on);
        }
    }

    fn foresee_layer(
        &self,
        forecast: Option<&Forecast>,
        c: &vwd_decoder_foresee_args,
        rope: &vwd_rope,
        stream: vwd_stream,
    ) -> Result<()> {
        require_no_flags("flags", c.flags)?;
        self.join_projection(stream)?;
        let layer = Layer::new(self, c.layer)?;
        if layer.step.positions != 1 {
            return Ok(());
        }
        let source = self.source(forecast, c, layer.step.batch)?;
        if !layer.strategy().foresees() || !layer.has_sparse() {
            return Ok(());
        }
        let on = self.session.on(stream)?;
        let queries = match &source {
            Source::Given(from) => {
                // From here on nothing reads the queries of the layer that was foreseen before.
                self.join_last_foresight(&on)?;
                let queries = layer.queries_of(from.dtype, from.dim(1));
                let to = self.session.checks().required("q", &queries)?;
                Take { from: *from, to, lens: layer.lens(Kind::Known) }.run(&on)?;
                queries
            }
            Source::Forecast(forecast) => layer.foreseen_queries(forecast.heads()[0]),
        };
        let positions = self.tensor(self.plan.places, DType::I32, &[layer.step.batch], &[1]);
        let (x, previous) = (c.x, c.previous);
        let args = vwd_forecast_project_args { layer: c.map, x, previous, positions, q: queries, ..zeroed() };
        let projection = match source {
            Source::Given(_) => None,
            Source::Forecast(forecast) => Some((forecast, ProjectRequest::from_c(forecast, &args, rope)?)),
        };
        let project = |stream| match &projection {
            None => Ok(()),
            Some((forecast, request)) => forecast.project(request, stream),
        };
        let select = layer.foresee_args(queries);
        match (on, self.foresight.branch()) {
            (On::Cuda(enqueue), Some(branch)) => {
                if let Some((forecast, request)) = &projection {
                    forecast.reserve(request, branch.stream())?;
                }
                branch.fork(&enqueue)?;
                let foresee = || {
                    project(branch.stream())?;
                    if projection.is_some() {
                        branch.end(&enqueue, self.projection_use())?;
                        self.is_projecting.store(true, Relaxed);
                    }
                    layer.foresee(&select, branch.stream())
                };
                let foreseen = foresee();
                // The use is ended whatever happened, since a capture has to join it.
                branch.end(&enqueue, layer.number)?;
                *self.last_foresight.lock() = Some(layer.number);
                foreseen?;
            }
            _ => {
                project(stream)?;
                layer.foresee(&select, stream)?;
            }
        }
        layer.set_foreseen();
        if self.tiered.is_none() {
            return Ok(());
        }
        let mut to_fetch = self.to_fetch.lock();
        if !to_fetch.contains(&layer.number) {
            to_fetch.push(layer.number);
        }
        drop(to_fetch);
        let waits = layer.number > layer.step.attended;
        if waits { Ok(()) } else { self.fetch_foreseen(stream) }
    }

    /// Begins to fetch what was foreseen, after what the stream holds now.
    pub(super) fn fetch_foreseen(&self, stream: vwd_stream) -> Result<()> {
        let Some(tiered) = &self.tiered else { return Ok(()) };
        let mut layers = self.to_fetch.lock();
        layers.drain(..).try_for_each(|layer| match (self.session.on(stream)?, self.foresight.branch()) {
            (On::Cuda(enqueue), Some(branch)) => {
                branch.fork(&enqueue)?;
                let begun = tiered.begin_fetch(layer, branch.stream());
                branch.end(&enqueue, layer)?;
                *self.last_foresight.lock() = Some(layer);
                begun
            }
            _ => tiered.begin_fetch(layer, stream),
        })
    }

    fn source<'a>(
        &self,
        forecast: Option<&'a Forecast>,
        c: &'a vwd_decoder_foresee_args,
        batch: usize,
    ) -> Result<Source<'a>> {
        let options = &self.options;
        let (checks, batch, dim) = (self.session.checks(), ("B of the step", batch), options.dims[0]);
        let heads = |name, heads: usize, found: String| match heads {
            _ if heads == options.query_heads || (heads == options.kv_heads && !options.has_term) => Ok(()),
            _ if options.has_term => {
                let hq = options.query_heads;
                let expected = format!("Hq={hq} heads of D={dim}: with options.remainder each weighs what is left out");
                Err(Error::argument(name, found, expected))
            }
            _ => {
                let expected = format!("Hq={} or Hk={} heads of D={dim}", options.query_heads, options.kv_heads);
                Err(Error::argument(name, found, expected))
            }
        };
        match (forecast, given(&c.q)) {
            (None, None) => Err(Error::argument("q", "absent without a forecast", "q, or a forecast")),
            (Some(_), Some(_)) => Err(Error::argument("q", "given beside a forecast", "q alone, or a forecast with x")),
            (None, Some(q)) => {
                for (name, t) in [("x", &c.x), ("previous", &c.previous)] {
                    if given(t).is_some() {
                        return Err(Error::argument(name, "given without a forecast", "none beside q"));
                    }
                }
                let shape = [batch, ("heads", ANY), ("D", dim)];
                let q = match q.ndim {
                    4 => return Err(Error::argument("q", "rank 4", "[B, heads, D]")),
                    _ => checks.input("q", q, DType::FLOATS, &shape)?,
                };
                heads("q", q.dim(1), format!("{} heads", q.dim(1)))?;
                Ok(Source::Given(q))
            }
            (Some(forecast), None) => {
                let [found, expected] = [forecast.device(), self.session.device()];
                if found != expected {
                    let found = format!("of a session on {}", place(found));
                    return Err(Error::argument("forecast", found, format!("one of a session on {}", place(expected))));
                }
                let [number, width] = forecast.heads();
                let found = format!("{number} heads of {width}");
                heads("forecast", if width == dim { number } else { 0 }, found)?;
                if c.map as usize >= forecast.layers() {
                    return Err(Error::argument("map", c.map, format!("0 to {}", forecast.layers() - 1)));
                }
                if !forecast.is_solved(c.map as usize) {
                    return Err(Error::argument(
                        "map",
                        format!("{} has no map", c.map),
                        "one that is solved or loaded",
                    ));
                }
                checks.input("x", &c.x, DType::FLOATS, &[batch, ("input_dim", ANY)])?;
                Ok(Source::Forecast(forecast))
            }
        }
    }

    /// The caller's stream waits for all that was foreseen so far.
    pub(super) fn join_last_foresight(&self, on: &On) -> Result<()> {
        let last = self.last_foresight.lock().take();
        if let (On::Cuda(enqueue), Some(branch), Some(last)) = (on, self.foresight.branch(), last) {
            branch.join(enqueue, last)?;
            self.is_projecting.store(false, Relaxed);
        }
        Ok(())
    }

    /// The caller's stream waits until projections have read the caller's tensors.
    pub(super) fn join_projection(&self, stream: vwd_stream) -> Result<()> {
        if !self.is_projecting.swap(false, Relaxed) {
            return Ok(());
        }
        if let (On::Cuda(enqueue), Some(branch)) = (self.session.on(stream)?, self.foresight.branch()) {
            branch.join(&enqueue, self.projection_use())?;
        }
        Ok(())
    }

    /// The branch's use for projections, after those for layers.
    fn projection_use(&self) -> usize {
        self.options.layers.len()
    }
}

/// A device, for a message.
fn place(device: Device) -> String {
    match device {
        Device::Cpu => "the CPU".into(),
        Device::Cuda(ordinal) => format!("CUDA device {ordinal}"),
    }
}

impl Layer<'_> {
    /// The caller's stream waits for what was foreseen of the layer. False where it is of another capture.
    pub fn join_foresight(&self, on: &On) -> Result<bool> {
        match (on, self.decoder.foresight.branch()) {
            (On::Cuda(enqueue), Some(branch)) => branch.join(enqueue, self.number),
            _ => Ok(true),
        }
    }

    /// Memory for foreseen queries.
    pub fn foreseen_queries(&self, heads: usize) -> vwd_tensor {
        self.queries_of(self.decoder.options.foreseen_dtype(), heads)
    }

    fn queries_of(&self, dtype: DType, heads: usize) -> vwd_tensor {
        let Decoder { options, plan, .. } = self.decoder;
        self.decoder.packed(plan.queries, dtype, &[self.step.batch, heads, options.dims[0]])
    }

    /// The selection of a list that is made ahead, of the tokens before the step.
    pub fn foresee_args(&self, queries: vwd_tensor) -> vwd_select_blocks_args {
        vwd_select_blocks_args {
            k: self.policy.predicted,
            local_blocks: self.policy.local_ahead(),
            seq_lens: self.decoder.tensor(self.decoder.plan.places, DType::I32, &[self.step.batch], &[1]),
            selected: self.predicted(),
            ..self.select_args(queries, Kind::Known)
        }
    }

    fn foresee(&self, select: &vwd_select_blocks_args, stream: vwd_stream) -> Result<()> {
        self.select(select, stream)?;
        let Decoder { session, options, plan, memory, .. } = self.decoder;
        let vwd_block_list { ids, counts, .. } = self.predicted();
        let complete = Complete {
            lens: self.lens(Kind::Known),
            places: memory.at(plan.places),
            ids: ids.data.cast(),
            counts: counts.data.cast(),
            batch: self.step.batch,
            heads: options.kv_heads,
            capacity: self.policy.predicted_capacity(),
            block_size: options.block_size,
        };
        complete.run(&session.on(stream)?)?;
        match &self.decoder.tiered {
            Some(tiered) => tiered.resolve_foreseen(self, stream),
            None => Ok(()),
        }
    }
}
