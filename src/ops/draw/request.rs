//! How the requests of a call are sampled: the arguments that sampling calls have alike, and their checks.

use super::{Form, MOST_TOKENS, Settings};
use crate::abi::{
    VWD_SAMPLE_DRAFT_PROBABILITIES, VWD_SAMPLE_TARGET_PROBABILITIES, VWD_SAMPLE_TEMPERATURE_LAST, vwd_tensor,
};
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Checks, Tensor, given};
use crate::ops::contents::{Number, Rule};
use crate::ops::verify::integer;

/// The arguments of a call that are about sampling.
pub struct GivenSampling<'a> {
    pub flags: u32,
    pub draft_rows: &'a vwd_tensor,
    pub draft_map: &'a vwd_tensor,
    pub temperature: &'a vwd_tensor,
    pub top_k: &'a vwd_tensor,
    pub top_p: &'a vwd_tensor,
    pub min_p: &'a vwd_tensor,
    pub seeds: &'a vwd_tensor,
    pub positions: &'a vwd_tensor,
    /// Where every request is greedy, and seeds and positions may be absent.
    pub greedy: &'static str,
}

/// Sizes of a call.
pub struct Sizes {
    pub batch: usize,
    /// Draft rows of a request, with the name of their number.
    pub draft_rows: (&'static str, usize),
    /// V
    pub tokens: usize,
}

/// Checked arguments.
#[derive(Clone, Copy)]
pub struct Sampling<'a> {
    pub target_form: Form,
    pub draft_form: Form,
    pub temperature_last: bool,
    /// Every request is greedy, whatever its temperature: there are no random numbers.
    pub is_greedy: bool,
    /// [B, rows, Vd]
    pub draft_rows: Option<Tensor<'a>>,
    /// [Vd]
    pub draft_map: Option<Tensor<'a>>,
    /// [B] each.
    pub temperature: Option<Tensor<'a>>,
    pub top_k: Option<Tensor<'a>>,
    pub top_p: Option<Tensor<'a>>,
    pub min_p: Option<Tensor<'a>>,
    pub seeds: Option<Tensor<'a>>,
    pub positions: Option<Tensor<'a>>,
    /// V
    tokens: usize,
}

impl<'a> Sampling<'a> {
    pub fn check(checks: &Checks, sizes: &Sizes, is_greedy: bool, c: &GivenSampling<'a>) -> Result<Sampling<'a>> {
        const FLAGS: u32 =
            VWD_SAMPLE_TARGET_PROBABILITIES | VWD_SAMPLE_DRAFT_PROBABILITIES | VWD_SAMPLE_TEMPERATURE_LAST;
        if c.flags & !FLAGS != 0 {
            return Err(Error::argument("flags", format!("{:#x}", c.flags), "VWD_SAMPLE_* flags alone (bits 0 to 2)"));
        }
        let form = |flag| if c.flags & flag != 0 { Form::Weights } else { Form::Logits };
        let (draft_rows, draft_map) = draft(checks, sizes, c)?;
        let column = [("B", sizes.batch)];
        let floats = |name, t| checks.optional_input(name, t, &[DType::F32], &column);
        let sampling = Sampling {
            target_form: form(VWD_SAMPLE_TARGET_PROBABILITIES),
            draft_form: form(VWD_SAMPLE_DRAFT_PROBABILITIES),
            temperature_last: c.flags & VWD_SAMPLE_TEMPERATURE_LAST != 0,
            is_greedy,
            draft_rows,
            draft_map,
            temperature: floats("temperature", c.temperature)?,
            top_k: checks.optional_input("top_k", c.top_k, &[DType::I32], &column)?,
            top_p: floats("top_p", c.top_p)?,
            min_p: floats("min_p", c.min_p)?,
            seeds: checks.optional_input("seeds", c.seeds, &[DType::U64, DType::I64], &column)?,
            positions: checks.optional_input("positions", c.positions, DType::TOKENS, &column)?,
            tokens: sizes.tokens,
        };
        if !is_greedy && sizes.batch > 0 {
            for (name, t) in [("seeds", sampling.seeds), ("positions", sampling.positions)] {
                if t.is_none() {
                    return Err(Error::argument(name, "data is NULL", format!("a tensor, unless {}", c.greedy)));
                }
            }
        }
        Ok(sampling)
    }

    pub fn inputs(&self) -> [Option<&Tensor<'a>>; 8] {
        let [rows, map, temperature, top_k] = [&self.draft_rows, &self.draft_map, &self.temperature, &self.top_k];
        [rows, map, temperature, top_k, &self.top_p, &self.min_p, &self.seeds, &self.positions].map(Option::as_ref)
    }

    /// What a session that checks contents reads.
    pub fn contents(&self) -> [Option<Rule<'a>>; 2] {
        let ids = self.draft_map.map(|map| Rule::within(map, 0, Number::constant(self.tokens)));
        [ids, self.draft_map.map(Rule::ascending)]
    }

    /// Vd; 0 without draft rows.
    pub fn draft_tokens(&self) -> usize {
        self.draft_rows.map_or(0, |rows| rows.dim(2))
    }

    /// The settings of a request.
    ///
    /// # Safety
    /// The tensors are valid, and `i` is below the batch size; so for all that follows.
    pub unsafe fn settings(&self, i: usize) -> Settings {
        const PLAIN: Settings = Settings::PLAIN;
        // SAFETY: forwarded to the caller.
        let float = |t: &Option<Tensor>, absent| t.map_or(absent, |t| unsafe { t.get::<f32, 1>([i]) });
        Settings {
            temperature: if self.is_greedy { 0.0 } else { float(&self.temperature, PLAIN.temperature) },
            // SAFETY: forwarded to the caller.
            top_k: self.top_k.map_or(PLAIN.top_k, |t| unsafe { t.get::<i32, 1>([i]) }),
            top_p: float(&self.top_p, PLAIN.top_p),
            min_p: float(&self.min_p, PLAIN.min_p),
            temperature_last: self.temperature_last,
        }
    }

    /// The seed of a request, and the position of its first row.
    ///
    /// # Safety
    /// As for [`Sampling::settings`].
    pub unsafe fn noise(&self, i: usize) -> (u64, i64) {
        // SAFETY: forwarded to the caller. A seed is 64 bits, signed or not.
        unsafe {
            let seed = self.seeds.map_or(0, |t| t.data().cast::<u64>().offset(i as isize * t.stride(0)).read());
            (seed, self.positions.map_or(0, |t| integer(&t, [i])))
        }
    }
}

/// draft_rows and draft_map.
fn draft<'a>(
    checks: &Checks,
    sizes: &Sizes,
    c: &GivenSampling<'a>,
) -> Result<(Option<Tensor<'a>>, Option<Tensor<'a>>)> {
    if sizes.draft_rows.1 == 0 {
        return Ok((None, None));
    }
    let shape = [("B", sizes.batch), sizes.draft_rows, ("Vd", ANY)];
    let Some(rows) = checks.optional_input("draft_rows", c.draft_rows, DType::FLOATS, &shape)? else {
        return Ok((None, None));
    };
    let has_map = given(c.draft_map).is_some();
    let most = if has_map { MOST_TOKENS } else { sizes.tokens };
    if rows.dim(2) == 0 || rows.dim(2) > most {
        let found = format!("{} tokens a row", rows.dim(2));
        let why = if has_map { "" } else { ", as target has and draft_map is absent" };
        return Err(Error::argument("draft_rows", found, format!("1 to {most}{why}")));
    }
    let columns = [("Vd of draft_rows", rows.dim(2))];
    Ok((Some(rows), checks.optional_input("draft_map", c.draft_map, &[DType::I32], &columns)?))
}
