//! Calls of a tiered KV cache.

use crate::case::{Answer, Case, of};
use crate::content::Content;
use crate::support::*;
use std::ffi::c_void;
use std::ptr::null_mut;
use vanward::abi::*;
use vanward::capi::*;

const SEQUENCES: i64 = 4;
const BLOCKS: i64 = 6;
const LAYERS: u32 = 2;

/// What a cache is made for.
#[derive(Clone, Copy)]
struct Shape {
    heads: i64,
    block: i64,
    dims: [i64; 2],
    dtype: DType,
    is_coded: bool,
    is_decoded: bool,
}

impl Shape {
    fn random(rng: &mut Rng) -> Shape {
        if rng.one_in(4) {
            let dims = [64, 80].map(|dim| if rng.one_in(2) { dim } else { 64 });
            return Shape {
                heads: rng.int(1..=2),
                block: 16,
                dims,
                dtype: rng.pick(&[F32, F16, BF16]),
                is_coded: true,
                is_decoded: rng.one_in(2),
            };
        }
        Shape {
            is_coded: false,
            is_decoded: false,
            heads: rng.int(1..=3),
            block: rng.int(1..=5),
            dims: [16, 24].map(|dim| if rng.one_in(2) { dim } else { 16 }),
            dtype: rng.pick(&[F32, F16, BF16, F8E4M3, F8E5M2]),
        }
    }

    fn has_scales(&self) -> bool {
        self.dtype == F8E4M3
    }

    /// A cache whose sequences have room for all their blocks.
    fn cache(&self, session: &Session) -> Cache {
        let options = vwd_kv_cache_options {
            layers: LAYERS,
            kv_heads: self.heads as u32,
            block_size: self.block as u32,
            key_dim: self.dims[0] as u32,
            value_dim: self.dims[1] as u32,
            dtype_code: self.dtype.code as u32,
            dtype_bits: self.dtype.bits as u32,
            token_scales: self.has_scales() as u32,
            max_sequences: SEQUENCES as u32,
            max_blocks: BLOCKS as u32,
            host_blocks: (SEQUENCES * BLOCKS) as u32,
            layer_slots: [1 << 11, 1 << 10].as_ptr(),
            coding: if self.is_coded { VWD_CODING_INT4 } else { VWD_CODING_EXACT },
            slot_coding: if self.is_decoded { VWD_SLOTS_DECODED } else { VWD_SLOTS_AS_STORED },
            ..args()
        };
        let mut cache = null_mut();
        // SAFETY: everything is valid.
        unsafe {
            assert_ok(vwd_kv_cache_create(session.raw(), &options, &mut cache));
            for _ in 1..SEQUENCES {
                let mut sequence = 0;
                assert_ok(vwd_kv_cache_add(cache, &mut sequence, null_mut()));
                assert_ok(vwd_kv_cache_extend(cache, sequence, (BLOCKS * self.block) as u64, null_mut()));
            }
        }
        Cache(cache)
    }

    /// Tokens for all sequences but one, in every layer.
    fn fill(&self, cache: &Cache) {
        let (host, tokens) = (Backend::cpu(1), (BLOCKS * self.block - 1) as usize);
        let batch = SEQUENCES as usize - 1;
        let plain = Layout::default();
        let part = |dim: i64| {
            let shape = [batch, tokens, self.heads as usize, dim as usize];
            let bytes = vec![0x3c; shape.iter().product::<usize>() * self.dtype.bytes()];
            Tensor::raw(&host, self.dtype, &shape, &bytes, &plain)
        };
        let scales = Tensor::floats(&host, F32, &Array::filled(&[batch, tokens, self.heads as usize], 1.0), &plain);
        let scale = || if self.has_scales() { scales.c() } else { absent() };
        let sequences = Tensor::ints(&host, I32, &Array::from_fn(&[batch], |at| at[0] as i64), &plain);
        let begin = Tensor::ints(&host, I32, &Array::filled(&[batch], 0), &plain);
        let [k, v] = self.dims.map(part);
        for layer in 0..LAYERS {
            let call = vwd_kv_cache_append_args {
                layer,
                sequences: sequences.c(),
                begin: begin.c(),
                k: k.c(),
                v: v.c(),
                k_scale: scale(),
                v_scale: scale(),
                ..args()
            };
            // SAFETY: everything is valid.
            assert_ok(unsafe { vwd_kv_cache_append(cache.0, &call, null_mut()) });
        }
    }
}

struct Cache(*mut vwd_kv_cache);

impl Cache {
    /// The bytes of all tails of a layer: zero where nothing was written.
    fn tails(&self, layer: u32) -> Vec<u8> {
        let mut view: vwd_kv_cache_layer = args();
        // SAFETY: the handle is live, and view has a place; the slots of tails come first.
        unsafe {
            assert_ok(vwd_kv_cache_view(self.0, layer, &mut view));
            let run = view.k.strides[0] as usize * view.k.dtype_bits as usize / 8;
            let slots = (view.tail_k.shape[0] * view.tail_k.shape[2]) as usize;
            std::slice::from_raw_parts(view.k.data.cast::<u8>(), slots * run).to_vec()
        }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // SAFETY: created above, released once.
        unsafe { vwd_kv_cache_release(self.0) };
    }
}

pub fn append(case: &mut Case) {
    type Args = vwd_kv_cache_append_args;
    let shape = Shape::random(&mut case.rng);
    let args = case.call_with::<Args>(move |session, args: *const c_void| -> Answer {
        let cache = shape.cache(session);
        // SAFETY: the arguments are what the case describes.
        let status = unsafe { vwd_kv_cache_append(cache.0, args.cast(), null_mut()) };
        let tails: Vec<u8> = (0..LAYERS).flat_map(|layer| cache.tails(layer)).collect();
        assert!(status == VWD_OK || tails.iter().all(|&byte| byte == 0), "written in spite of an error");
        (status, if status == VWD_OK { tails } else { vec![] })
    });
    let layer = case.rng.size(0..=LAYERS as usize - 1);
    case.number(of!(args, Args, layer), layer as u32);
    let (batch, tokens) = (case.extent(1..=SEQUENCES as usize), case.extent(0..=(2 * shape.block) as usize));
    let [key, value] = shape.dims;
    case.input(of!(args, Args, sequences), I32, &[batch], Content::Distinct(SEQUENCES));
    case.input(of!(args, Args, begin), I32, &[batch], Content::Counts(shape.block));
    case.maybe_input(of!(args, Args, lens), I32, &[batch], Content::Counts(tokens));
    case.input(of!(args, Args, k), shape.dtype, &[batch, tokens, shape.heads, key], Content::Bytes);
    case.input(of!(args, Args, v), shape.dtype, &[batch, tokens, shape.heads, value], Content::Bytes);
    for scale in [of!(args, Args, k_scale), of!(args, Args, v_scale)] {
        let field = case.input(scale, F32, &[batch, tokens, shape.heads], Content::Floats);
        if !shape.has_scales() {
            case.optional(false, field);
        }
    }
}

/// Paths in the tails of a cache that is full, whose bytes are the answer.
pub fn compact(case: &mut Case) {
    type Args = vwd_kv_cache_compact_args;
    let shape = Shape::random(&mut case.rng);
    let args = case.call_with::<Args>(move |session, args: *const c_void| -> Answer {
        let cache = shape.cache(session);
        shape.fill(&cache);
        let before: Vec<u8> = (0..LAYERS).flat_map(|layer| cache.tails(layer)).collect();
        // SAFETY: the arguments are what the case describes.
        let status = unsafe { vwd_kv_cache_compact(cache.0, args.cast(), null_mut()) };
        let tails: Vec<u8> = (0..LAYERS).flat_map(|layer| cache.tails(layer)).collect();
        assert!(status == VWD_OK || tails == before, "tokens moved in spite of an error");
        (status, if status == VWD_OK { tails } else { vec![] })
    });
    let (batch, places) = (case.extent(1..=SEQUENCES as usize), case.rng.size(1..=9) as i64);
    let bases = case.rng.pick(&[I32, I64]);
    case.input(of!(args, Args, sequences), I32, &[batch], Content::Distinct(SEQUENCES));
    case.input(of!(args, Args, bases), bases, &[batch], Content::Counts(BLOCKS * shape.block));
    case.input(of!(args, Args, path), I32, &[batch, places], Content::Indices(2 * shape.block));
    case.maybe_input(of!(args, Args, accepted), I32, &[batch], Content::Counts(places - 1));
}

pub fn resolve(case: &mut Case) {
    type Args = vwd_kv_cache_resolve_args;
    let shape = Shape::random(&mut case.rng);
    let args = case.call_with::<Args>(move |session, args: *const c_void| -> Answer {
        let cache = shape.cache(session);
        shape.fill(&cache);
        // SAFETY: the arguments are what the case describes.
        (unsafe { vwd_kv_cache_resolve(cache.0, args.cast(), null_mut()) }, vec![])
    });
    let layer = case.rng.size(0..=LAYERS as usize - 1);
    case.number(of!(args, Args, layer), layer as u32);
    let (batch, cap) = (case.extent(1..=SEQUENCES as usize), case.extent(0..=6));
    let own = if case.rng.one_in(3) { vec![case.extent(1..=3)] } else { vec![] };
    let lead = [&[batch], &own[..], &[shape.heads]].concat();
    let ids = [&lead[..], &[cap]].concat();
    case.input(of!(args, Args, sequences), I32, &[batch], Content::Indices(SEQUENCES));
    let wanted = of!(args, Args, wanted);
    case.input(of!(wanted, vwd_block_list, ids), I32, &ids, Content::Indices(BLOCKS + 1));
    case.input(of!(wanted, vwd_block_list, counts), I32, &lead, Content::Counts(cap));
    case.output(of!(wanted, vwd_block_list, slots), I32, &ids);
    let (resident, is_given) = (of!(args, Args, resident), case.rng.one_in(2));
    for (place, shape) in [
        (of!(resident, vwd_block_list, ids), &ids),
        (of!(resident, vwd_block_list, counts), &lead),
        (of!(resident, vwd_block_list, slots), &ids),
    ] {
        let field = case.output(place, I32, shape);
        if !is_given {
            case.optional(false, field);
        }
    }
    case.maybe_output(of!(args, Args, missed_counts), I32, &lead);
}
