//! Every call, described once.

/// What ends a request.
macro_rules! end {
    ($call:ident, $Args:ty) => {
        $call.input("stop", offset_of!($Args, stop), I64, "S?").optional();
        $call.input("ignore_stop", offset_of!($Args, ignore_stop), U8, "B").optional();
        $call.input("remaining", offset_of!($Args, remaining), I32, "B").optional();
        $call.input("min_remaining", offset_of!($Args, min_remaining), I32, "B").optional();
        $call.output("committed_len", offset_of!($Args, committed_len), I32, "B").optional();
        $call.output("finish", offset_of!($Args, finish), U8, "B").optional();
    };
}

mod attention;
mod cache;
mod decoder;
mod int4;
mod predict;
mod select;
mod tree;
mod verify;

use crate::support::*;
use crate::table::{Call, Role};
use attention::*;
use cache::*;
use decoder::*;
use int4::*;
use predict::*;
use select::*;
use std::ffi::c_void;
use std::mem::offset_of;
use tree::*;
use vanward::abi::*;
use vanward::capi::*;
use verify::*;

type Describe = fn(&Backend) -> Call<'_>;

pub const ALL: &[(&str, Describe)] = &[
    ("vwd_verify", verify),
    ("vwd_verify of drafts one after the other", verify_flat),
    ("vwd_pack", pack),
    ("vwd_verify_pack", verify_pack),
    ("vwd_verify_sample", |b| verify_sample(b, false)),
    ("vwd_verify_sample of rows one after the other", |b| verify_sample(b, true)),
    ("vwd_tree_prepare", |b| tree_prepare(b, true)),
    ("vwd_tree_prepare of children and siblings", |b| tree_prepare(b, false)),
    ("vwd_verify_tree", |b| verify_tree(b, false)),
    ("vwd_verify_tree from logits", |b| verify_tree(b, true)),
    ("vwd_verify_tree by sampling", sampled_tree),
    ("vwd_compact", compact),
    ("vwd_index_update of MINMAX", |b| index_update(b, VWD_INDEX_MINMAX, false)),
    ("vwd_index_update of MEAN", |b| index_update(b, VWD_INDEX_MEAN, false)),
    ("vwd_index_update of LABEL", |b| index_update(b, VWD_INDEX_LABEL, false)),
    ("vwd_index_update of AXIS", |b| index_update(b, VWD_INDEX_AXIS, false)),
    ("vwd_index_update of MINMAX of FP8", |b| index_update(b, VWD_INDEX_MINMAX, true)),
    ("vwd_index_update of LABEL of FP8", |b| index_update(b, VWD_INDEX_LABEL, true)),
    ("vwd_index_update_layers of MINMAX", |b| index_update_layers(b, VWD_INDEX_MINMAX)),
    ("vwd_index_update_layers of LABEL", |b| index_update_layers(b, VWD_INDEX_LABEL)),
    ("vwd_channel_importance", channel_importance),
    ("vwd_select_blocks by MINMAX", |b| select_blocks(b, VWD_SELECT_MINMAX, Rows::One)),
    ("vwd_select_blocks by MEAN_SOFTMAX", |b| select_blocks(b, VWD_SELECT_MEAN_SOFTMAX, Rows::One)),
    ("vwd_select_blocks by MEAN_DOT", |b| select_blocks(b, VWD_SELECT_MEAN_DOT, Rows::One)),
    ("vwd_select_blocks by LABEL_MASS", |b| select_blocks(b, VWD_SELECT_LABEL_MASS, Rows::One)),
    ("vwd_select_blocks by AXIS", |b| select_blocks(b, VWD_SELECT_AXIS, Rows::One)),
    ("vwd_select_blocks for rows that share lists", |b| select_blocks(b, VWD_SELECT_MINMAX, Rows::Shared)),
    ("vwd_select_blocks for rows with lists of their own", |b| select_blocks(b, VWD_SELECT_LABEL_MASS, Rows::Own)),
    ("vwd_select_tokens", |b| select_tokens(b, Rows::One)),
    ("vwd_select_tokens for rows with lists of their own", |b| select_tokens(b, Rows::Own)),
    ("vwd_topk", topk),
    ("vwd_attention over a list", |b| attention(b, true)),
    ("vwd_attention over everything", |b| attention(b, false)),
    ("vwd_attention of rows over FP8", attention_of_rows),
    ("vwd_attention over slots", attention_over_slots),
    ("vwd_attention over INT4", attention_over_int4),
    ("vwd_attention with a remainder", attention_with_a_remainder),
    ("vwd_remainder_update", remainder_update),
    ("vwd_kv_quantize", kv_quantize),
    ("vwd_kv_weights", kv_weights),
    ("vwd_merge_states", |b| merge_states(b, STATE)),
    ("vwd_merge_states of rows", |b| merge_states(b, STATE_OF_ROWS)),
    ("vwd_repair to a superset", |b| repair(b, VWD_REPAIR_SUPERSET)),
    ("vwd_repair exactly", |b| repair(b, VWD_REPAIR_EXACT)),
    ("vwd_repair of rows", repair_of_rows),
    ("vwd_gather_blocks", gather_blocks),
    ("vwd_gather_blocks of lists per KV head", gather_blocks_per_head),
    ("vwd_kv_cache_append", kv_cache_append),
    ("vwd_kv_cache_append with scales", kv_cache_append_scales),
    ("vwd_kv_cache_compact", kv_cache_compact),
    ("vwd_kv_cache_resolve", |b| kv_cache_resolve(b, Rows::One)),
    ("vwd_kv_cache_resolve of rows with lists of their own", |b| kv_cache_resolve(b, Rows::Own)),
    ("vwd_predictor_reset", predictor_reset),
    ("vwd_predictor_predict", predictor_predict),
    ("vwd_predictor_update", predictor_update),
    ("vwd_predictor_calibrate", predictor_calibrate),
    ("vwd_forecast_accumulate", forecast_accumulate),
    ("vwd_forecast_project", forecast_project),
    ("vwd_decoder_begin", decoder_begin),
    ("vwd_decoder_foresee", decoder_foresee),
];

/// Values that no flags field takes.
const FLAGS: &[u32] = &[1, 1 << 31, u32::MAX];
/// Those of calls that may keep rows.
const FLAGS_BUT_KEEP_ROWS: &[u32] = &[2, 3, 1 << 31, u32::MAX];

/// Values that no factor takes.
const NO_NUMBER: &[f32] = &[f32::NAN, f32::INFINITY, f32::NEG_INFINITY];

/// Values that no scale takes.
const NO_SCALE: &[f32] = &[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0];

/// Sizes that the families share; small, and such that none can be taken for another.
const SIZES: &[(&str, usize)] = &[
    ("B", 3),
    ("Hk", 2),
    ("Hq", 4),
    ("D", 16),
    ("pages", 6),
    ("P", 8),
    ("max_pages", 2),
    ("r", 10),
    ("r/2", 5),
    ("4·⌈D/32⌉", 4),
    ("index_pages", 7),
    ("rows", 9),
    ("cap", 5),
    ("cap2", 7),
    ("nb", 11),
    ("Q", 13),
    ("Dv", 24),
    ("1", 1),
    ("2", 2),
];

/// The fields of the vwd_block_list at `base`.
fn list(call: &mut Call, names: [&'static str; 2], base: usize, role: Role, cap: &'static str) {
    let (ids, counts) = (offset_of!(vwd_block_list, ids), offset_of!(vwd_block_list, counts));
    let at = call.address(base + ids);
    call.field(names[0], at, role, I32, cap);
    let at = call.address(base + counts);
    call.field(names[1], at, role, I32, "B Hk");
}

/// Query positions of a selection.
#[derive(Clone, Copy, PartialEq)]
enum Rows {
    One,
    Shared,
    Own,
}

impl Rows {
    fn q(self, heads: &'static str) -> &'static str {
        match (self, heads) {
            (Rows::One, "Hk") => "B Hk D",
            (Rows::One, _) => "B Hq D",
            _ => "B Q? Hq D",
        }
    }

    /// The shapes of a tensor with a row for each list, ending with this.
    fn lists(self, last: &'static str) -> &'static str {
        let shapes = [("", "B Hk", "B Q Hk"), ("cap?", "B Hk cap?", "B Q Hk cap?"), ("cap", "B Hk cap", "B Q Hk cap")];
        let more = [("cap2?", "B Hk cap2?", "B Q Hk cap2?"), ("nb?", "B Hk nb?", "B Q Hk nb?")];
        let found = shapes.into_iter().chain(more).find(|shape| shape.0 == last).expect("a known shape");
        if self == Rows::Own { found.2 } else { found.1 }
    }
}

/// The fields of the vwd_block_list at `base`, and slots, which it must not have.
fn list_of(call: &mut Call, names: [&'static str; 3], base: usize, role: Role, rows: Rows, cap: &'static str) {
    let at = call.address(base + offset_of!(vwd_block_list, ids));
    call.field(names[0], at, role, I32, rows.lists(cap));
    let at = call.address(base + offset_of!(vwd_block_list, counts));
    call.field(names[1], at, role, I32, rows.lists(""));
    call.refused(names[2], base + offset_of!(vwd_block_list, slots));
}
