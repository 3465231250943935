//! What the host spends in calls of the sparse families: one sequence of 32,768 tokens, 32 query heads on 8 KV heads of 128
//! channels, bfloat16, 64 blocks of 64 tokens for each KV head.

use crate::device::{Buffer, Device, args, check_status, tensor};
use crate::{FLOAT, INT};
use vanward::abi::*;
use vanward::capi::*;

const BFLOAT: u8 = 4;
const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;
const BLOCK: usize = 64;
const BLOCKS: usize = 512;
const K: usize = 64;

/// The tensors of all the calls. What floats hold does not matter to the host.
pub struct Sparse<'d> {
    device: &'d Device,
    session: *mut vwd_session,
    buffers: Vec<Buffer>,
}

impl<'d> Sparse<'d> {
    pub fn new(device: &'d Device, session: *mut vwd_session) -> Sparse<'d> {
        Sparse { device, session, buffers: Vec::new() }
    }

    /// Hands each call to `measure`, by its name.
    pub fn each(mut self, mut measure: impl FnMut(&str, &dyn Fn())) {
        let keys = [BLOCKS, BLOCK, KV_HEADS, DIM];
        let (k, v) = (self.floats(BFLOAT, 16, &keys), self.floats(BFLOAT, 16, &keys));
        let seq_lens = self.ints(&[1], |_| (BLOCKS * BLOCK) as i32);
        let page_table = self.ints(&[1, BLOCKS], |n| n as i32);
        let q = self.floats(BFLOAT, 16, &[1, HEADS, DIM]);
        let out = self.floats(BFLOAT, 16, &[1, HEADS, DIM]);
        let summaries = [1, BLOCKS, KV_HEADS, DIM];
        let (key_max, key_min) = (self.floats(BFLOAT, 16, &summaries), self.floats(BFLOAT, 16, &summaries));
        let selected = self.list();
        let predicted = self.list();
        let (stream, session) = (self.device.stream.cast(), self.session);

        let index = vwd_index { kind: VWD_INDEX_MINMAX, block_size: BLOCK as u32, key_max, key_min, ..args() };
        let begin = self.ints(&[1], |_| (BLOCKS * BLOCK) as i32 - 1);
        let update = vwd_index_update_args { index: &index, k, page_table, seq_lens, begin, ..args() };
        // SAFETY: here and below all tensors are device memory that outlives the calls.
        measure("index_update", &|| check_status(unsafe { vwd_index_update(session, &update, stream) }));

        let select = vwd_select_blocks_args {
            method: VWD_SELECT_MINMAX,
            block_size: BLOCK as u32,
            k: K as u32,
            index: &index,
            q,
            seq_lens,
            selected,
            ..args()
        };
        measure("select_blocks", &|| check_status(unsafe { vwd_select_blocks(session, &select, stream) }));

        let scores = self.floats(FLOAT, 32, &[KV_HEADS, BLOCKS]);
        let (ids, counts) = (self.ints(&[KV_HEADS, K], |_| 0), self.ints(&[KV_HEADS], |_| 0));
        let topk = vwd_topk_args { k: K as u32, order: VWD_TOPK_ASCENDING, scores, ids, counts, ..args() };
        measure("topk", &|| check_status(unsafe { vwd_topk(session, &topk, stream) }));

        let kv = vwd_paged_kv { k, v, page_table, seq_lens, ..args() };
        let states = |of: &mut Sparse, entries: &[usize]| {
            let shape = [&[1, HEADS], entries].concat();
            let acc = of.floats(FLOAT, 32, &[&shape[..], &[DIM]].concat());
            (acc, of.floats(FLOAT, 32, &shape), of.floats(FLOAT, 32, &shape))
        };
        let (acc, m, l) = states(&mut self, &[K]);
        let partials = vwd_attention_partials { acc, m, l };
        let attention =
            vwd_attention_args { block_size: BLOCK as u32, kv: &kv, q, list: predicted, out, partials, ..args() };
        measure("attention", &|| check_status(unsafe { vwd_attention(session, &attention, stream) }));

        let repair = vwd_repair_args {
            mode: VWD_REPAIR_EXACT,
            block_size: BLOCK as u32,
            kv: &kv,
            q,
            predicted,
            selected,
            predicted_partials: partials,
            out,
            ..args()
        };
        measure("repair", &|| check_status(unsafe { vwd_repair(session, &repair, stream) }));
    }

    fn floats(&mut self, code: u8, bits: u8, shape: &[usize]) -> vwd_tensor {
        let zeros = vec![0u8; shape.iter().product::<usize>() * bits as usize / 8];
        self.keep(&zeros, code, bits, shape)
    }

    fn ints(&mut self, shape: &[usize], value: impl Fn(usize) -> i32) -> vwd_tensor {
        let values: Vec<i32> = (0..shape.iter().product()).map(value).collect();
        self.keep(&values, INT, 32, shape)
    }

    /// The first blocks, for every KV head.
    fn list(&mut self) -> vwd_block_list {
        let ids = self.ints(&[1, KV_HEADS, K], |n| (n % K) as i32);
        vwd_block_list { ids, counts: self.ints(&[1, KV_HEADS], |_| K as i32), slots: tensor(0, 0, 0, &[]) }
    }

    fn keep<T: Copy>(&mut self, values: &[T], code: u8, bits: u8, shape: &[usize]) -> vwd_tensor {
        let buffer = self.device.upload(values);
        let address = buffer.address;
        self.buffers.push(buffer);
        tensor(address, code, bits, shape)
    }
}
