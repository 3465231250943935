//! The speculation budget: how much guessing and drafting pays, from times that were measured once for a shape on a device.
//!
//! `measure` times the calls of a `layer` and a decoder's `strategies` over a grid, `table` interpolates, `ask` chooses, `costs` chooses
//! for a decoder, `file` keeps. PRR hides attention over ⌈r·k⌉ guesses behind selection and repairs what they missed; SELF drafts γ
//! tokens by sparse steps and verifies them by one dense step of γ + 1 positions. What decides both is the ratio of a few times, which
//! differ by device, shape, context and batch.

mod ask;
pub mod costs;
mod file;
mod layer;
mod measure;
mod options;
mod strategies;
pub mod table;

use crate::abi::{vwd_budget_answer, vwd_stream};
use crate::core::status::Result;
use crate::runtime::Session;
pub use ask::Question;
use costs::Costs;
pub use options::Options;
use std::sync::Arc;

pub struct Budget {
    costs: Arc<Costs>,
}

impl Budget {
    fn new(costs: Costs) -> Budget {
        Budget { costs: Arc::new(costs) }
    }

    pub fn profile(session: &Arc<Session>, options: &Options, stream: vwd_stream) -> Result<Budget> {
        let table = measure::measure(session, options, stream)?;
        Ok(Budget::new(Costs { shape: options.shape, device: session.description(), table }))
    }

    pub fn save(&self, path: &str) -> Result<()> {
        file::save(path, &self.costs)
    }

    pub fn load(session: &Session, options: &Options, path: &str) -> Result<Budget> {
        let device = session.description();
        let table = file::load(path, &options.shape, &device)?;
        Ok(Budget::new(Costs { shape: options.shape, device, table }))
    }

    pub fn ask(&self, question: &Question) -> vwd_budget_answer {
        ask::ask(&self.costs.table, question)
    }

    /// What a decoder decides by.
    pub fn costs(&self) -> &Arc<Costs> {
        &self.costs
    }
}
