//! Parameters of the kernels of kernels/attention/.

use crate::ops::views::State;
use crate::runtime::cuda::layout::{Divisor, kernel_struct};
use crate::runtime::cuda::views::{NO_DIM, View};

/// acc [B, Q, Hq, bundles, Dv], m and l [B, Q, Hq, bundles]. Mirrors StateView.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct StateView {
    pub acc: View<5>,
    pub m: View<4>,
    pub l: View<4>,
}

impl StateView {
    pub const ABSENT: StateView = StateView { acc: View::ABSENT, m: View::ABSENT, l: View::ABSENT };

    /// One state of each row.
    pub fn of_state(state: &State) -> StateView {
        let (acc, sums) = if state.acc.rank() == 4 {
            ([0, 1, 2, NO_DIM, 3], [0, 1, 2, NO_DIM])
        } else {
            ([0, NO_DIM, 1, NO_DIM, 2], [0, NO_DIM, 1, NO_DIM])
        };
        StateView { acc: View::new(&state.acc, acc), m: View::new(&state.m, sums), l: View::new(&state.l, sums) }
    }

    /// One state of each bundle of list entries.
    pub fn of_partials(state: &State) -> StateView {
        StateView { acc: View::by_position(&state.acc), m: View::by_position(&state.m), l: View::by_position(&state.l) }
    }

    pub fn optional(state: &Option<State>, view: impl Fn(&State) -> StateView) -> StateView {
        state.as_ref().map_or(StateView::ABSENT, view)
    }
}

kernel_struct! {
    /// Mirrors AttentionParams of kernels/attention/attention.cuh, where the fields are explained.
    #[derive(Clone, Copy)]
    pub struct Params {
        pub work_items: u32,
        pub row_blocks: Divisor,
        pub kv_heads: Divisor,
        pub list_positions: Divisor,
        pub group: Divisor,
        pub positions: u32,
        pub rows: u32,
        pub own_lists: u32,
        pub window: u32,
        pub token_capacity: u32,
        pub list_capacity: u32,
        pub pages: u32,
        pub block: Divisor,
        pub page: Divisor,
        pub log_granule: u32,
        pub unit_tokens: u32,
        pub least_units: u32,
        pub target_chunks: Divisor,
        pub unit_tiles: Divisor,
        pub most_units: u32,
        pub half_value: Divisor,
        pub dim: u32,
        pub value_dim: u32,
        pub scale: f32,
        pub soft_cap: f32,
        pub out_type: u32,
        pub log_members: u32,
        pub warp_rows: u32,
        pub stages: u32,
        pub log_share: u32,
        pub v_offset: u32,
        pub stage_bytes: u32,
        pub q_offset: u32,
        pub q_pitch: u32,
        pub totals_offset: u32,
        pub q_type: u32,
        pub kv_type: u32,
        pub scales_per_token: u32,
        pub unit_entries: Divisor,
        pub ctas: Divisor,
        pub cta_shares: *mut u8,
        pub scratch: *mut u8,
        pub counters: *mut u8,
        pub seq_lens: View<1>,
        pub q_lens: View<1>,
        pub counts: View<3>,
        pub ids: View<4>,
        pub table: View<2>,
        pub q: View<4>,
        pub k: View<4>,
        pub v: View<4>,
        pub out: View<4>,
        pub lse: View<3>,
        pub sinks: View<1>,
        pub state: StateView,
        pub partials: StateView,
        pub start: StateView,
        pub slots: View<4>,
        pub k_scale: View<3>,
        pub v_scale: View<3>,
        pub kept_past: View<1>,
        pub far: i64,
        pub near_pages: u32,
        pub octave_chunks: u32,
    }
}

kernel_struct! {
    /// Mirrors RepairParams.
    pub struct RepairParams {
        pub to: Params,
        pub predicted: View<4>,
        pub predicted_counts: View<3>,
        pub missed: View<3>,
        pub kept: StateView,
        pub ids: *mut u8,
        pub slots: *mut u8,
        pub counts: *mut u8,
        pub exact: u32,
        pub predicted_capacity: u32,
        pub entries: Divisor,
        pub kept_offset: u32,
        pub received_offset: u32,
        pub lists_offset: u32,
    }
}

pub const MAX_INPUTS: usize = 16;

kernel_struct! {
    /// Mirrors MergeParams.
    pub struct MergeParams {
        pub to: Params,
        pub inputs: u32,
        pub heads: u32,
        pub input: [StateView; MAX_INPUTS],
    }
}

impl Params {
    /// Nothing: what is absent is NULL, what counts is 0 or 1.
    pub fn none() -> Params {
        let one = Divisor::new(1);
        // SAFETY: zeros are valid for every field: numbers and addresses.
        let zero = unsafe { std::mem::zeroed() };
        Params { row_blocks: one, kv_heads: one, list_positions: one, group: one, block: one, page: one, ..zero }
    }
}

impl RepairParams {
    pub fn none() -> RepairParams {
        // SAFETY: zeros are valid for every field: numbers and addresses.
        unsafe { std::mem::zeroed() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::chunks;
    use super::*;
    use crate::runtime::cuda::layout;

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        let size = |name: &str, bytes| format!("\nVWD_SIZE({name}, {bytes})\n");
        let structs = [
            size("View<4>", size_of::<View<4>>()),
            size("StateView", size_of::<StateView>()),
            Divisor::layout("Divisor"),
            Params::layout("AttentionParams"),
            RepairParams::layout("RepairParams"),
            MergeParams::layout("MergeParams"),
            chunks::kernel_constants(),
        ];
        layout::check("attention", file!(), &structs);
    }
}
