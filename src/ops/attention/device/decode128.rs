//! The plan of kernels/attention/decode128.cuh, variants decode128, decode64 and decode256: for each list some CTAs, each with a multiprocessor of its own.

use super::params::Params;
use super::plan::{Element, Entry, Plan, Rows, Scratch, Sizes, THREADS, TILE, TOKEN_INFO_BYTES, WARP_ROWS, WARPS};
use super::verify128;
use crate::runtime::cuda::layout::Divisor;

pub const CHANNELS: u32 = 128;
/// Those of decode64 and of decode256, which take up to eight rows, and decode256 16 bits alone.
pub const NARROW_CHANNELS: u32 = 64;
pub const BROAD_CHANNELS: u32 = 256;
/// Lists that the kernels number.
pub const MOST_LISTS: u64 = 1 << 20;
/// Shared memory that the kernels declare, rounded up.
const STATIC_SHARED: u32 = 5 << 10;
/// Longer lists of several sequences differ in length, and are better split by what there is to do.
const MOST_TOKENS: u64 = 12 << 10;
/// The same of attention to all tokens of sequences, of which one may be as long as sequences may be, and all others short: where lists are so
/// many that the longest one is soon done beside the others, where they are few, where there is one for each multiprocessor, and in between.
const MOST_TOKENS_OF_MANY: u64 = 8 << 10;
const MOST_TOKENS_OF_SOME: u64 = 4 << 10;
const MOST_TOKENS_OF_ALL: u64 = 2 << 10;
/// CTAs of a list.
const MOST_CTAS: u32 = 16;
/// Lists of fewer tokens in all leave half of the multiprocessors to the kernel that follows, which then is there before they end.
const FEW_TOKENS: u64 = 64 << 10;

/// Whether lists may differ so much in length that CTAs would wait for the longest.
pub fn is_uneven(multiprocessors: u32, sizes: &Sizes, has_lists: bool) -> bool {
    let (lists, multiprocessors) = (sizes.split_lists(), u64::from(multiprocessors));
    // The lists of one sequence are equally long.
    if lists <= sizes.kv_heads as u64 {
        return false;
    }
    // What else takes FP8 and other heads takes longer, for heads of 64 channels nearly always.
    let times = match (sizes.element, sizes.dim) {
        _ if has_lists => 1,
        (_, NARROW_CHANNELS) => 64,
        (_, BROAD_CHANNELS) => 2,
        (Some(Element::Fp8), _) => 4,
        _ => 1,
    };
    let are_few = lists.saturating_mul(sizes.list_tokens) < verify128::DENSE_TOKENS * times;
    let most = if has_lists || lists <= 2 * multiprocessors / u64::from(MOST_CTAS) {
        MOST_TOKENS
    } else if are_few || lists.saturating_mul(2) >= 5 * multiprocessors {
        MOST_TOKENS_OF_MANY
    } else if lists > multiprocessors {
        MOST_TOKENS_OF_SOME
    } else {
        MOST_TOKENS_OF_ALL
    };
    let longest = if has_lists { sizes.list_tokens } else { sizes.list_tokens.min(sizes.window_tokens) };
    longest > most * times
}

/// How a list is split.
#[derive(Clone, Copy)]
pub struct Shape {
    ctas: u32,
    /// Warps that share a unit, none of which has a second unit; `None` where a warp adds up units of its own.
    sharing: Option<u32>,
}

impl Shape {
    pub fn adds_up_units(&self) -> bool {
        self.sharing.is_none()
    }
}

pub fn shape(multiprocessors: u32, sizes: &Sizes, rows: Rows, has_partials: bool) -> Shape {
    // Partials are written the faster the more CTAs write them.
    let few = match (has_partials, rows) {
        (false, _) => FEW_TOKENS,
        (true, Rows::UpTo4) => FEW_TOKENS / 2,
        (true, _) => FEW_TOKENS / 4,
    };
    let leaves_room = sizes.split_lists().saturating_mul(sizes.list_tokens) <= few;
    let share = if leaves_room { multiprocessors / 2 } else { multiprocessors } as u64;
    let ctas = (share / sizes.split_lists().max(1)).clamp(1, MOST_CTAS as u64) as u32;
    let sharing = if has_partials { sharing(sizes.unit_tiles, sizes.units, ctas) } else { Some(1) };
    Shape { ctas, sharing }
}

/// The plan of a call that fits.
pub fn plan(multiprocessors: u32, shared_bytes: u32, params: &Params, sizes: &Sizes) -> Option<Plan> {
    let form @ Form { element, rows, channels } = Form::of(sizes)?;
    let has_partials = !params.partials.acc.data.is_null();
    let Shape { ctas, sharing } = shape(multiprocessors, sizes, rows, has_partials);
    let stages = form.stages(shared_bytes, sharing.is_none())?;
    let lists = sizes.lists as u32;
    let unit_warps = sharing.unwrap_or(1);
    let params = Params {
        work_items: lists,
        ctas: Divisor::new(ctas),
        most_units: sizes.units as u32,
        unit_tiles: Divisor::new(sizes.unit_tiles / unit_warps),
        log_share: unit_warps.ilog2(),
        log_members: (rows == Rows::UpTo16) as u32,
        warp_rows: rows.count(),
        stages,
        v_offset: form.tile_bytes(),
        q_offset: form.ring_bytes(stages),
        q_pitch: form.warp_bytes(sharing.is_none()),
        ..*params
    };
    let states = if ctas > 1 { lists as usize * (ctas * state_bytes(rows, channels)) as usize } else { 0 };
    Some(Plan {
        params,
        entry: match channels {
            NARROW_CHANNELS => Entry::Decode64(element, rows),
            BROAD_CHANNELS => Entry::Decode256(element, rows),
            _ => Entry::Decode128(element, rows),
        },
        ctas: lists * ctas,
        threads: THREADS,
        cluster: None,
        joining: 0,
        shared: form.shared(sharing.is_none(), stages),
        is_split_first: false,
        in_boxes: false,
        scratch: Scratch::of_states(states),
    })
}

/// Dynamic shared memory that a kernel can have.
pub fn most_shared(shared_bytes: u32) -> u32 {
    shared_bytes.saturating_sub(STATIC_SHARED)
}

fn sharing(unit_tiles: u32, units: u64, ctas: u32) -> Option<u32> {
    let has_one = |&warps: &u32| unit_tiles.is_multiple_of(warps) && units <= (WARPS / warps * ctas) as u64;
    (0..=WARPS.ilog2()).map(|log| 1 << log).rfind(has_one)
}

/// Which kernel takes a call.
#[derive(Clone, Copy)]
pub struct Form {
    element: Element,
    rows: Rows,
    /// Channels of a key and of a value.
    channels: u32,
}

impl Form {
    /// `None` where no kernel takes the types or the rows.
    pub fn of(sizes: &Sizes) -> Option<Form> {
        Some(Form { element: sizes.element?, rows: Rows::of(sizes.rows)?, channels: sizes.dim })
    }

    pub fn rows(self) -> Rows {
        self.rows
    }

    /// Stages of a warp's ring: as many as pay and have room in the `shared_bytes` of a CTA.
    pub fn stages(self, shared_bytes: u32, adds_up_units: bool) -> Option<u32> {
        const CHANNELS_BYTES: u32 = CHANNELS * 2;
        let counts: &[u32] = match (self.channels * self.element.bytes(), self.rows) {
            (..CHANNELS, _) => &[8],
            (..CHANNELS_BYTES, _) => &[4],
            (CHANNELS_BYTES, Rows::UpTo16) => &[3, 2],
            (CHANNELS_BYTES, _) => &[2],
            _ => &[1],
        };
        let most = most_shared(shared_bytes);
        counts.iter().copied().find(|&stages| self.shared(adds_up_units, stages) <= most)
    }

    fn tile_bytes(self) -> u32 {
        TILE * (self.channels * self.element.bytes() + 16)
    }

    fn ring_bytes(self, stages: u32) -> u32 {
        WARPS * stages * (TOKEN_INFO_BYTES + 2 * self.tile_bytes())
    }

    fn shared(self, adds_up_units: bool, stages: u32) -> u32 {
        self.ring_bytes(stages) + self.cta_bytes() + WARPS * self.warp_bytes(adds_up_units)
    }

    fn query_bytes(self) -> u32 {
        self.rows.count() * (self.channels * 2 + 16)
    }

    /// What all warps share: the queries of more than eight rows.
    fn cta_bytes(self) -> u32 {
        if self.rows == Rows::UpTo16 { self.query_bytes() } else { 0 }
    }

    /// What each warp has: queries; once those are in registers, the total of its units where it adds them up.
    fn warp_bytes(self, adds_up_units: bool) -> u32 {
        let queries = if self.rows == Rows::UpTo16 { 0 } else { self.query_bytes() };
        let state = self.rows.count().next_multiple_of(WARP_ROWS) * self.channels * size_of::<f32>() as u32;
        if adds_up_units { queries.max(state) } else { queries }
    }
}

/// What a CTA leaves for the others of its list: acc, m and l of each row, where m and l are there once for each slice of the channels.
pub fn state_bytes(rows: Rows, channels: u32) -> u32 {
    let slice = if channels > CHANNELS { 32 } else { 16 };
    rows.count() * (channels + 2 * channels / slice) * size_of::<f32>() as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::attention::device::choose::tests::SIZES;

    #[test]
    fn any_number_of_lists_is_even_or_not() {
        let sizes = Sizes { lists: u64::MAX, list_tokens: 8 << 10, ..SIZES };
        assert!(!is_uneven(132, &sizes, false));
        assert!(is_uneven(132, &Sizes { list_tokens: u64::MAX, ..sizes }, false));
    }

    #[test]
    fn warps_share_a_unit_as_long_as_none_has_a_second() {
        // Blocks of 64 tokens, by eight CTAs a list.
        for (tokens, warps) in [(512, Some(4)), (1024, Some(4)), (2048, Some(2)), (4096, Some(1)), (8192, None)] {
            assert_eq!(sharing(4, tokens / 64, 8), warps, "{tokens} tokens");
        }
        assert_eq!(sharing(3, 1, 16), Some(1));
        assert_eq!(sharing(16, 1, 1), Some(8));
    }
}
