//! What the calls of a shape cost on a device, and so whether a decoder's strategy is faster than SERIAL.

use super::ask::MARGIN;
use super::options::Shape;
use super::table::{Kind, Table};

pub struct Costs {
    pub shape: Shape,
    pub device: String,
    pub table: Table,
}

/// A layer's strategy beside SERIAL.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trade {
    /// Prr, PrrForeseen or Foreseen.
    pub kind: Kind,
    /// Blocks of a list that is made ahead, as a multiple of k.
    pub ratio: f64,
    /// The share of the selected blocks that such a list misses; without a meaning for Foreseen.
    pub missed: f64,
}

impl Costs {
    /// Whether the strategy is faster than SERIAL, by more than the margin, for sequences of a length and a number of them.
    pub fn pays(&self, trade: &Trade, context: usize, batch: usize) -> bool {
        let grid = &self.table.grid;
        let (times, _) = self.table.at(context.max(1) as f64, batch.max(1) as f64);
        let time = match trade.kind {
            Kind::Prr => grid.at_share(&times.prr, trade.ratio, trade.missed),
            Kind::PrrForeseen => grid.at_share(&times.prr_foreseen, trade.ratio, trade.missed),
            _ => grid.at_ratio(&times.foreseen, trade.ratio),
        };
        times.serial > time * (1.0 + MARGIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::versioned::zeroed;
    use crate::decode::budget::options::Options;
    use crate::decode::budget::table::Grid;

    /// SERIAL takes 100 µs at 1000 tokens and 200 at 2000, a strategy as long as at 1500.
    fn costs() -> Costs {
        let grid = Grid {
            contexts: vec![1000.0, 2000.0],
            batches: vec![1.0, 4.0],
            ratios: vec![1.0, 2.0],
            shares: vec![0.0, 1.0],
            max_draft: 1,
        };
        let of_kind = |kind: Kind| {
            let count = grid.contexts.len() * grid.batches.len();
            let inner: usize = grid.inner(kind).iter().product();
            match kind {
                Kind::Serial => vec![100.0, 100.0, 200.0, 200.0],
                Kind::Foreseen => [150.0, 180.0].repeat(count),
                Kind::Prr => [140.0, 170.0, 150.0, 190.0].repeat(count),
                _ => vec![f32::INFINITY; count * inner],
            }
        };
        let table = Table { times: Kind::ALL.map(of_kind), grid: grid.clone() };
        let options = vwd_options();
        Costs { shape: Options::from_c(&options).expect("options").shape, device: String::new(), table }
    }

    fn vwd_options() -> crate::abi::vwd_budget_options {
        crate::abi::vwd_budget_options {
            query_heads: 1,
            kv_heads: 1,
            key_dim: 16,
            value_dim: 16,
            dtype_code: 2,
            dtype_bits: 32,
            page_size: 16,
            block_size: 16,
            method: 1,
            k: 4,
            ..zeroed()
        }
    }

    #[test]
    fn strategies_pay_from_the_length_on_where_they_are_faster_by_the_margin() {
        let costs = costs();
        let pays = |kind, ratio, missed, context| costs.pays(&Trade { kind, ratio, missed }, context, 1);
        // 150·1.02 = 153: from 1530 tokens on.
        assert_eq!(
            [1, 1000, 1529, 1531, 9000].map(|n| pays(Kind::Foreseen, 1.0, 0.0, n)),
            [false, false, false, true, true]
        );
        // Halfway between the ratios: 165·1.02 = 168.3.
        assert_eq!([1680, 1690].map(|n| pays(Kind::Foreseen, 1.5, 0.0, n)), [false, true]);
        // A quarter of the blocks missed: 147.5·1.02 = 150.45.
        assert_eq!([1500, 1510].map(|n| pays(Kind::Prr, 1.0, 0.25, n)), [false, true]);
        assert!(!pays(Kind::PrrForeseen, 1.0, 0.0, 2000), "a strategy that the shape has not");
    }
}
