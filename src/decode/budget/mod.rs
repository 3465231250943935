//! The speculation budget: how much guessing and drafting pays, from times that were measured once for a shape on a device.
//!
//! `measure` times the calls of a `layer` over a grid, `table` interpolates, `ask` chooses, `file` keeps. PRR hides attention over
//! ⌈r·k⌉ guesses behind selection and repairs what they missed; SELF drafts γ tokens by sparse steps and verifies them by one dense
//! step of γ + 1 positions. What decides both is the ratio of a few times, which differ by device, shape, context and batch.

mod ask;
mod file;
mod layer;
mod measure;
mod options;
mod table;

use crate::abi::{vwd_budget_answer, vwd_stream};
use crate::core::status::Result;
use crate::runtime::Session;
pub use ask::Question;
pub use options::Options;
use options::Shape;
use std::sync::Arc;
use table::Table;

pub struct Budget {
    shape: Shape,
    device: String,
    table: Table,
}

impl Budget {
    pub fn profile(session: &Arc<Session>, options: &Options, stream: vwd_stream) -> Result<Budget> {
        let table = measure::measure(session, options, stream)?;
        Ok(Budget { shape: options.shape, device: session.description(), table })
    }

    pub fn save(&self, path: &str) -> Result<()> {
        file::save(path, &self.shape, &self.device, &self.table)
    }

    pub fn load(session: &Session, options: &Options, path: &str) -> Result<Budget> {
        let device = session.description();
        let table = file::load(path, &options.shape, &device)?;
        Ok(Budget { shape: options.shape, device, table })
    }

    pub fn ask(&self, question: &Question) -> vwd_budget_answer {
        ask::ask(&self.table, question)
    }
}
