//! Forecast: the pre-RoPE queries of layer l+1 from the residual stream x that enters layer l.
//!
//! q̂ = W·[x̂, 1] or, with memory, W·[x̂, q', 1], where x̂ is x / rms(x) and q' the queries of layer l+1 at the token
//! before (`inputs`). W is the ridge solution over activations of any text, accumulated call by call (`fit`), of full or of
//! low rank (`map`). `file` writes maps to a file and reads them; `cpu` and `cuda` project with them in a decode
//! step.

mod choose;
mod cpu;
mod cuda;
mod file;
mod fit;
mod inputs;
mod map;

use crate::abi::{
    VWD_FORECAST_MEMORY, VWD_ROPE_HALVES, VWD_ROPE_INTERLEAVED, vwd_forecast_accumulate_args, vwd_forecast_details,
    vwd_forecast_options, vwd_forecast_project_args, vwd_rope, vwd_stream,
};
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::{Checks, Device, Tensor};
use crate::ops::contents::{self, Rule};
use crate::runtime::{On, Session, require_no_flags};
pub(super) use cuda::Kernels;
use cuda::PlacedMap;
use fit::Sums;
use inputs::Inputs;
use map::Map;
use parking_lot::{Mutex, RwLock};
use std::ops::Range;
use std::sync::Arc;

/// The numbers of a map's inputs and outputs, the same for every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// 0 or VWD_FORECAST_MEMORY.
    pub flags: usize,
    pub layers: usize,
    pub input_dim: usize,
    pub q_heads: usize,
    pub head_dim: usize,
}

impl Shape {
    /// `refuse` makes the error of a flag that is unknown or a dimension out of bounds, from its name, value and bound.
    fn checked(self, refuse: impl Fn(&str, usize, String) -> Error) -> Result<Shape> {
        const MOST_LAYERS: usize = 1 << 16;
        const WIDEST: usize = 1 << 20;
        if self.flags & !(VWD_FORECAST_MEMORY as usize) != 0 {
            return Err(refuse("flags", self.flags, format!("0 or VWD_FORECAST_MEMORY ({VWD_FORECAST_MEMORY})")));
        }
        let bounds = [
            ("layers", self.layers, MOST_LAYERS),
            ("input_dim", self.input_dim, WIDEST),
            ("q_heads", self.q_heads, WIDEST),
            ("head_dim", self.head_dim, WIDEST),
        ];
        for (name, value, most) in bounds {
            if value == 0 || value > most {
                return Err(refuse(name, value, format!("1 to {most}")));
            }
        }
        if self.outputs() > WIDEST {
            let expected = format!("at most {} with head_dim {}", WIDEST / self.head_dim, self.head_dim);
            return Err(refuse("q_heads", self.q_heads, expected));
        }
        Ok(self)
    }

    pub fn has_memory(&self) -> bool {
        self.flags & VWD_FORECAST_MEMORY as usize != 0
    }

    /// The inputs that are queries at the token before: those between x̂ and the constant.
    pub fn remembered(&self) -> Range<usize> {
        self.input_dim..self.input_dim + if self.has_memory() { self.outputs() } else { 0 }
    }

    /// The number of inputs of a map, the constant included.
    pub fn inputs(&self) -> usize {
        self.remembered().end + 1
    }

    pub fn outputs(&self) -> usize {
        self.q_heads * self.head_dim
    }

    /// The shape of a tensor with the queries of `rows` tokens.
    fn queries(&self, rows: (&'static str, usize)) -> [(&'static str, usize); 3] {
        [rows, ("q_heads", self.q_heads), ("head_dim", self.head_dim)]
    }
}

/// Options of a forecast, defaults filled in.
pub struct Options {
    shape: Shape,
    ridge: f32,
}

impl Options {
    pub fn from_c(c: &vwd_forecast_options) -> Result<Options> {
        let shape = Shape {
            flags: c.flags as usize,
            layers: c.layers as usize,
            input_dim: c.input_dim as usize,
            q_heads: c.q_heads as usize,
            head_dim: c.head_dim as usize,
        };
        let shape =
            shape.checked(|name, value, expected| Error::argument(&format!("options.{name}"), value, expected))?;
        if !(0.0..f32::INFINITY).contains(&c.ridge) {
            return Err(Error::argument("options.ridge", c.ridge, "a finite number, 0 or above"));
        }
        Ok(Options { shape, ridge: if c.ridge == 0.0 { DEFAULT_RIDGE } else { c.ridge } })
    }
}

const DEFAULT_RIDGE: f32 = 1e-3;

pub struct Forecast {
    session: Arc<Session>,
    shape: Shape,
    ridge: f32,
    /// The sums of each layer. The lock is taken while sums grow and while they are solved.
    sums: Mutex<Vec<Option<Sums>>>,
    /// The map of each layer. The lock is taken only to read or to replace a map, so that projections do not wait for each
    /// other or for a fit.
    maps: RwLock<Vec<Option<Solved>>>,
    /// Maps that were replaced: streams and captured graphs may still read them.
    replaced: Mutex<Vec<Arc<PlacedMap>>>,
}

/// A map and, for a CUDA session, its copy on the device.
#[derive(Clone)]
struct Solved {
    map: Arc<Map>,
    placed: Option<Arc<PlacedMap>>,
}

impl Solved {
    fn new(session: &Arc<Session>, shape: &Shape, map: Arc<Map>) -> Result<Solved> {
        let placed = PlacedMap::new(session, shape, &map)?.map(Arc::new);
        Ok(Solved { map, placed })
    }

    /// The copy of a CUDA session.
    fn placed(&self) -> &PlacedMap {
        self.placed.as_ref().expect("maps of a CUDA session are on its device")
    }
}

impl Forecast {
    pub fn create(session: &Arc<Session>, options: &Options) -> Result<Forecast> {
        let (shape, ridge) = (options.shape, options.ridge);
        let sums = Mutex::new((0..shape.layers).map(|_| None).collect());
        let maps = RwLock::new(vec![None; shape.layers]);
        Ok(Forecast { session: session.clone(), shape, ridge, sums, maps, replaced: Mutex::default() })
    }

    pub fn details(&self) -> vwd_forecast_details {
        let sum_bytes = self.sums.lock().iter().flatten().map(|sums| sums.bytes() as u64).sum();
        let maps = self.maps.read();
        let solved = || maps.iter().flatten().map(|solved| &solved.map);
        vwd_forecast_details {
            struct_size: size_of::<vwd_forecast_details>() as u32,
            flags: self.shape.flags as u32,
            layers: self.shape.layers as u32,
            input_dim: self.shape.input_dim as u32,
            q_heads: self.shape.q_heads as u32,
            head_dim: self.shape.head_dim as u32,
            ridge: self.ridge,
            solved: solved().count() as u32,
            rank: solved().map(|map| map.rank()).max().unwrap_or(0) as u32,
            map_bytes: solved().map(|map| map.bytes() as u64).sum(),
            sum_bytes,
        }
    }

    pub fn accumulate(&self, r: &AccumulateRequest) -> Result<()> {
        let mut sums = self.sums.lock();
        fit::on_host(&self.session, |cpu| fit::accumulate(cpu, &self.shape, &mut sums[r.layer], r))
    }

    pub fn solve(&self, rank: usize) -> Result<()> {
        let most = self.shape.inputs().min(self.shape.outputs());
        if rank > most {
            return Err(Error::argument("rank", rank, format!("0 to {most}, the smaller side of a map")));
        }
        let mut sums = self.sums.lock();
        let solved = fit::on_host(&self.session, |cpu| fit::solve(cpu, &self.shape, &sums, self.ridge, rank))?;
        if solved.is_empty() {
            return Err(Error::argument("forecast", "no map has sums", "an accumulated map"));
        }
        let solved = solved
            .into_iter()
            .map(|(layer, map)| Ok((layer, Solved::new(&self.session, &self.shape, Arc::new(map))?)))
            .collect::<Result<Vec<_>>>()?;
        let (mut maps, mut replaced) = (self.maps.write(), self.replaced.lock());
        for (layer, map) in solved {
            replaced.extend(maps[layer].replace(map).and_then(|old| old.placed));
            sums[layer] = None;
        }
        Ok(())
    }

    pub fn save(&self, path: &str) -> Result<()> {
        let maps = self.maps.read().iter().map(|solved| Some(solved.as_ref()?.map.clone())).collect();
        file::save(path, &self.shape, self.ridge, &maps)
    }

    pub fn load(session: &Arc<Session>, path: &str) -> Result<Forecast> {
        let (shape, ridge, maps) = file::load(path)?;
        let forecast = Forecast::create(session, &Options { shape, ridge })?;
        let place = |map: Option<Arc<Map>>| map.map(|map| Solved::new(session, &shape, map)).transpose();
        *forecast.maps.write() = maps.into_iter().map(place).collect::<Result<_>>()?;
        Ok(forecast)
    }

    /// The number of maps.
    pub fn layers(&self) -> usize {
        self.shape.layers
    }

    /// Where the forecast projects.
    pub fn device(&self) -> Device {
        self.session.device()
    }

    /// Whether a map below [`Forecast::layers`] is solved or loaded.
    pub fn is_solved(&self, map: usize) -> bool {
        self.maps.read()[map].is_some()
    }

    /// The number of heads that are forecast, and their channels.
    pub fn heads(&self) -> [usize; 2] {
        [self.shape.q_heads, self.shape.head_dim]
    }

    fn layer(&self, layer: u32) -> Result<usize> {
        if (layer as usize) < self.shape.layers {
            return Ok(layer as usize);
        }
        Err(Error::argument("layer", layer, format!("0 to {}", self.shape.layers - 1)))
    }
}

pub struct AccumulateRequest<'a> {
    layer: usize,
    inputs: Inputs<'a>,
    /// [N, q_heads, head_dim]
    q: Tensor<'a>,
}

impl<'a> AccumulateRequest<'a> {
    pub fn from_c(forecast: &Forecast, c: &'a vwd_forecast_accumulate_args) -> Result<AccumulateRequest<'a>> {
        require_no_flags("flags", c.flags)?;
        let checks = Checks { device: Device::Cpu };
        let (shape, layer) = (&forecast.shape, forecast.layer(c.layer)?);
        let inputs = Inputs::from_c(&checks, shape, &c.x, &c.previous, "N")?;
        let q = checks.input("q", &c.q, DType::FLOATS, &shape.queries(("N", inputs.count())))?;
        Ok(AccumulateRequest { layer, inputs, q })
    }
}

pub struct ProjectRequest<'a> {
    shape: Shape,
    solved: Solved,
    rope: Rope<'a>,
    inputs: Inputs<'a>,
    /// [B]
    positions: Tensor<'a>,
    /// [B, q_heads, head_dim]
    q: Tensor<'a>,
}

impl<'a> ProjectRequest<'a> {
    pub fn from_c(
        forecast: &Forecast,
        c: &'a vwd_forecast_project_args,
        rope: &'a vwd_rope,
    ) -> Result<ProjectRequest<'a>> {
        require_no_flags("flags", c.flags)?;
        let checks = forecast.session.checks();
        let (shape, layer) = (forecast.shape, forecast.layer(c.layer)?);
        let rope = Rope::from_c(&checks, rope, shape.head_dim)?;
        let inputs = Inputs::from_c(&checks, &shape, &c.x, &c.previous, "B")?;
        let batch = ("B", inputs.count());
        let positions = checks.input("positions", &c.positions, &[DType::I32], &[batch])?;
        let q = checks.output("q", &c.q, DType::FLOATS, &shape.queries(batch))?;
        let read = [Some(&inputs.x), inputs.previous.as_ref(), Some(&positions), rope.inv_freq.as_ref()];
        overlap::reject(&[Some(&q)], &read)?;
        let Some(solved) = forecast.maps.read()[layer].clone() else {
            return Err(Error::argument("layer", format!("{layer} has no map"), "a layer that is solved or loaded"));
        };
        Ok(ProjectRequest { shape, solved, rope, inputs, positions, q })
    }
}

impl Forecast {
    pub fn project(&self, request: &ProjectRequest, stream: vwd_stream) -> Result<()> {
        let on = self.session.on(stream)?;
        contents::check(&self.session, &on, || {
            let frequencies = request.rope.inv_freq.map(Rule::finite);
            [Rule::up_to(request.positions, i32::MAX as usize)].into_iter().chain(frequencies).collect()
        })?;
        match on {
            On::Cpu(cpu) => cpu::project(cpu, request),
            On::Cuda(enqueue) => cuda::project(&enqueue, request, request.solved.placed()),
        }
    }

    /// Makes the stream's scratch arena large enough for a projection, unless the stream is being captured.
    pub fn reserve(&self, request: &ProjectRequest, stream: vwd_stream) -> Result<()> {
        if let On::Cuda(enqueue) = self.session.on(stream)?
            && enqueue.is_capturing()?
        {
            return Ok(());
        }
        let bytes = self.session.scratch_bytes(|cuda| cuda::scratch(cuda, request, request.solved.placed()))?;
        self.session.reserve(stream, bytes)
    }
}

/// A rotary embedding, defaults filled in.
struct Rope<'a> {
    interleaved: bool,
    /// The number of channels that rotate, even.
    dim: usize,
    theta: f64,
    /// The factor on the channels that rotate.
    scale: f64,
    /// [dim/2]
    inv_freq: Option<Tensor<'a>>,
}

impl<'a> Rope<'a> {
    fn from_c(checks: &Checks, c: &'a vwd_rope, head_dim: usize) -> Result<Rope<'a>> {
        require_no_flags("rope.flags", c.flags)?;
        let interleaved = match c.style {
            VWD_ROPE_HALVES => false,
            VWD_ROPE_INTERLEAVED => true,
            other => return Err(Error::argument("rope.style", other, "a VWD_ROPE_* value (0 or 1)")),
        };
        let dim = if c.rotary_dim == 0 { head_dim / 2 * 2 } else { c.rotary_dim as usize };
        if dim > head_dim || !dim.is_multiple_of(2) {
            let expected = format!("an even number up to head_dim, {head_dim}");
            return Err(Error::argument("rope.rotary_dim", dim, expected));
        }
        if !(0.0..f32::INFINITY).contains(&c.theta) {
            return Err(Error::argument("rope.theta", c.theta, "a finite number above 0, or 0 for 10000"));
        }
        if !c.attention_factor.is_finite() {
            return Err(Error::argument("rope.attention_factor", c.attention_factor, "a finite number"));
        }
        let pairs = [("rotary_dim/2", dim / 2)];
        let inv_freq = checks.optional_input("rope.inv_freq", &c.inv_freq, &[DType::F32], &pairs)?;
        let or = |value: f32, default: f64| if value == 0.0 { default } else { value as f64 };
        Ok(Rope { interleaved, dim, theta: or(c.theta, 10000.0), scale: or(c.attention_factor, 1.0), inv_freq })
    }

    /// The channels of pair `c`.
    fn pair(&self, c: usize) -> (usize, usize) {
        if self.interleaved { (2 * c, 2 * c + 1) } else { (c, c + self.dim / 2) }
    }
}
