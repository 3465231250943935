//! What a cache has to hold of blocks that it codes: the bytes of `vwd_kv_quantize` on the CPU over the same tokens, and what they stand for
//! as a slot has it.

use super::{Checked, MOST_BLOCKS, Shape, tensor};
use crate::support::*;
use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use vanward::abi::*;
use vanward::capi::*;

/// A block of one KV head and layer.
pub struct Coded {
    /// Codes of keys and values, the scales of both, and the mean key.
    pub parts: [Vec<u8>; 5],
    /// Keys and values that a slot has of them, once they were asked for.
    in_slot: OnceCell<[Vec<u8>; 2]>,
}

/// First and last token, layer and KV head.
type Key = [u64; 4];

pub struct Codes {
    cpu: Backend,
    known: RefCell<HashMap<Key, Rc<Coded>>>,
}

/// Bytes of a number of a few units, from random bits.
pub fn number(dtype: DType, bits: u64) -> Vec<u8> {
    let [sign, exponent, mantissa] = [bits & 1, bits >> 1 & 3, bits >> 3];
    match dtype {
        F32 => ((sign << 31 | (125 + exponent) << 23 | mantissa & 0x7f_ffff) as u32).to_le_bytes().to_vec(),
        F16 => ((sign << 15 | (13 + exponent) << 10 | mantissa & 0x3ff) as u16).to_le_bytes().to_vec(),
        BF16 => ((sign << 15 | (125 + exponent) << 7 | mantissa & 0x7f) as u16).to_le_bytes().to_vec(),
        _ => panic!("{dtype:?} is not coded"),
    }
}

/// A part of a token: numbers of a few units, seldom zeros, or one among them that is as large or as small as numbers get, or none.
pub fn row(shape: &Shape, part: usize, mut next: impl FnMut() -> u64) -> Vec<u8> {
    let (dtype, kind) = (shape.dtype, next() % 256);
    let [largest, smallest] = if dtype == F16 { [65504.0, 6e-8] } else { [3.3e38, 1e-40] };
    let extremes = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, largest, -largest, smallest, -0.0];
    let mut bytes: Vec<u8> =
        (0..shape.dims[part]).flat_map(|_| number(dtype, if kind == 0 { 0 } else { next() })).collect();
    if kind == 0 {
        bytes.fill(0);
    } else if kind == 1 {
        let at = next() as usize % shape.dims[part] * dtype.bytes();
        dtype.encode_float(extremes[(next() % 7) as usize], &mut bytes[at..][..dtype.bytes()]);
    }
    bytes
}

/// The weights of a KV head's key channels.
pub fn weights(shape: &Shape, layer: usize, head: usize) -> Vec<f32> {
    // One counts as 1.
    let weight = |n: usize| if n == 5 { f32::NAN } else { 0.5 + (n * 37 % 64) as f32 / 64.0 };
    let first = (layer * shape.heads + head) * shape.dims[0];
    (first..first + shape.dims[0]).map(weight).collect()
}

/// Those of all layers and KV heads.
pub fn all_weights(shape: &Shape) -> Vec<f32> {
    let all = (0..shape.layers).flat_map(|layer| (0..shape.heads).map(move |head| (layer, head)));
    all.flat_map(|(layer, head)| weights(shape, layer, head)).collect()
}

impl Codes {
    pub fn new() -> Codes {
        Codes { cpu: Backend::cpu(1), known: RefCell::default() }
    }

    /// The codes of a block whose keys and values are these bytes.
    pub fn of(&self, shape: &Shape, key: Key, content: impl FnOnce() -> [Vec<u8>; 2]) -> Rc<Coded> {
        if let Some(coded) = self.known.borrow().get(&key) {
            return coded.clone();
        }
        let coded = Rc::new(self.quantize(shape, key, content()));
        self.known.borrow_mut().insert(key, coded.clone());
        coded
    }

    fn quantize(&self, shape: &Shape, [_, _, layer, head]: Key, content: [Vec<u8>; 2]) -> Coded {
        let Shape { block, dims: [dim, value_dim], dtype, .. } = *shape;
        let (own, [keys, values]) = (weights(shape, layer as usize, head as usize), content);
        let mut parts =
            [block * dim / 2, block * value_dim / 2, block, block, dim * dtype.bytes()].map(|n| vec![0u8; n]);
        let (lens, mut coded_lens) = ([block as i32], [0i32]);
        let int4 = vwd_int4_kv {
            block_size: block as u32,
            k: tensor(&parts[0], U8, &[1, block, 1, dim / 2]),
            v: tensor(&parts[1], U8, &[1, block, 1, value_dim / 2]),
            k_scale: tensor(&parts[2], F8E4M3, &[1, block, 1]),
            v_scale: tensor(&parts[3], F8E4M3, &[1, block, 1]),
            means: tensor(&parts[4], dtype, &[1, 1, 1, dim]),
            coded_lens: tensor(&coded_lens, I32, &[1]),
            weights: tensor(&own, F32, &[1, dim]),
            ..args()
        };
        let kv = vwd_paged_kv {
            k: tensor(&keys, dtype, &[1, block, 1, dim]),
            v: tensor(&values, dtype, &[1, block, 1, value_dim]),
            seq_lens: tensor(&lens, I32, &[1]),
            int4: &int4,
            ..args()
        };
        let layers = [&raw const kv];
        let call = vwd_kv_quantize_args { layer_count: 1, layers: layers.as_ptr(), ..args() };
        // SAFETY: the tensors are alive, and the outputs nobody else's.
        assert_ok(unsafe { vwd_kv_quantize(self.cpu.session(), &call, self.cpu.stream()) });
        let written = |bytes: &mut Vec<u8>| {
            let at = bytes.as_mut_ptr();
            // SAFETY: written behind the compiler's back.
            (0..bytes.len()).for_each(|n| bytes[n] = unsafe { at.add(n).read_volatile() });
        };
        parts.iter_mut().for_each(written);
        // SAFETY: as above.
        assert_eq!(unsafe { (&raw mut coded_lens[0]).read_volatile() }, block as i32);
        Coded { parts, in_slot: OnceCell::new() }
    }

    /// The mean and the weight of each key channel.
    fn of_channels(&self, shape: &Shape, coded: &Coded, layer: usize, head: usize) -> Vec<[f32; 2]> {
        let (size, means) = (shape.dtype.bytes(), &coded.parts[4]);
        let mean = |d: usize| shape.dtype.decode_float(&means[d * size..][..size]) as f32;
        let weight = |w: f32| if w > 0.0 { w } else { 1.0 };
        weights(shape, layer, head).into_iter().enumerate().map(|(d, w)| [mean(d), weight(w)]).collect()
    }

    /// The bytes that a slot has of a part of token `t`.
    pub fn in_slot(&self, shape: &Shape, coded: &Coded, [layer, head, t, part]: [usize; 4]) -> Vec<u8> {
        let rows =
            |part: usize| (0..shape.block).flat_map(|t| self.rounded(shape, coded, [layer, head, t, part])).collect();
        let all = coded.in_slot.get_or_init(|| [rows(0), rows(1)]);
        let bytes = shape.parts()[part];
        all[part][t * bytes..][..bytes].to_vec()
    }

    /// What codes stand for as a slot has it: the sums of the rotation are exact, and what follows is rounded to float32 operation by operation.
    fn rounded(&self, shape: &Shape, coded: &Coded, [layer, head, t, part]: [usize; 4]) -> Vec<u8> {
        let dim = shape.dims[part];
        let scale = F8E4M3.decode_float(&coded.parts[2 + part][t..=t]);
        let codes = coded.parts[part][t * dim / 2..][..dim / 2].iter().flat_map(|byte| [byte & 15, byte >> 4]);
        let mut y: Vec<f64> = codes.map(|c| (c as f64 - 7.5) * scale).collect();
        let n: usize = 1 << dim.trailing_zeros();
        for distance in (0..n.trailing_zeros()).map(|k| 1 << k) {
            for d in (0..dim).filter(|d| d & distance == 0) {
                (y[d], y[d + distance]) = (y[d] + y[d + distance], y[d] - y[d + distance]);
            }
        }
        let factor = 1.0 / (n as f32).sqrt();
        let row = y.iter().map(|&y| y as f32 * factor);
        let row: Vec<f32> = match part {
            0 => row.zip(self.of_channels(shape, coded, layer, head)).map(|(y, [mean, w])| y * w + mean).collect(),
            _ => row.collect(),
        };
        let mut bytes = vec![0; dim * shape.dtype.bytes()];
        for (x, to) in row.iter().zip(bytes.chunks_mut(shape.dtype.bytes())) {
            shape.dtype.encode_float(if x.is_nan() { f64::NAN } else { *x as f64 }, to);
        }
        bytes
    }
}

/// The newest block, and the first one that may lie in the tail.
#[derive(Clone, Copy)]
pub struct Tail {
    pub newest: i64,
    pub first: i64,
}

impl Default for Tail {
    fn default() -> Tail {
        Tail { newest: -1, first: 0 }
    }
}

impl Tail {
    pub fn holds(&self, block: usize) -> bool {
        block as i64 <= self.newest && block as i64 >= self.first.max(self.newest - 1)
    }
}

impl Checked<'_> {
    /// The codes of a block of these tokens.
    pub fn coded(&self, layer: usize, head: usize, tokens: &[u64]) -> Rc<Coded> {
        let key = [tokens[0], tokens[tokens.len() - 1], layer as u64, head as u64];
        let part = |part: usize| tokens.iter().flat_map(|&token| self.content(token, layer, head, part)).collect();
        self.codes.of(self.shape, key, || [part(0), part(1)])
    }

    /// Every byte of a slot is what `vwd_kv_quantize` makes of its tokens.
    pub fn compare_codes(&self, [layer, head, slot]: [usize; 3], coded: &Coded, pool: &[u8]) {
        let view = &self.views[layer];
        let tensors = [&view.int4_k, &view.int4_v, &view.int4_k_scale, &view.int4_v_scale, &view.int4_means];
        for (part, (t, expected)) in tensors.into_iter().zip(&coded.parts).enumerate() {
            let at = slot * t.strides[0] as usize * t.dtype_bits as usize / 8 + t.data as usize - view.k.data as usize;
            assert!(
                pool[at..][..expected.len()] == expected[..],
                "part {part} of slot {slot}, layer {layer}, head {head}"
            );
        }
    }

    /// A sequence goes on in the middle of a block, of which `all` were the tokens and `tail` the tail: where it was coded, its tokens are from
    /// now on what the codes stand for.
    pub fn reopen(&mut self, at: usize, tail: Tail, all: &[u64]) {
        let Shape { block, heads, layers, dtype, .. } = *self.shape;
        let (end, number) = (self.sequences[at].tokens.len(), self.sequences[at].number as usize);
        let (n, rest) = (end / block, end % block);
        if !self.shape.coded || rest == 0 || n == 0 || tail.holds(n) {
            return;
        }
        self.backend.finish(VWD_OK);
        let first = self.tokens + 1;
        self.tokens += rest as u64;
        for (layer, head) in (0..layers).flat_map(|layer| (0..heads).map(move |head| (layer, head))) {
            let coded = self.coded(layer, head, &all[n * block..(n + 1) * block]);
            let view = &self.views[layer];
            let mut page = [0; 4];
            self.backend.read(view.tail_table.data as usize + (number * MOST_BLOCKS + n) * 4, &mut page);
            let page = u32::from_le_bytes(page) as usize;
            for (t, part) in (0..rest).flat_map(|t| [(t, 0), (t, 1)]) {
                let of = [&view.tail_k, &view.tail_v][part];
                let index = [page, t, head].iter().zip(of.strides).map(|(&n, step)| n * step as usize).sum::<usize>();
                let mut found = vec![0; self.shape.parts()[part]];
                self.backend.read(of.data as usize + index * dtype.bytes(), &mut found);
                let expected = self.codes.in_slot(self.shape, &coded, [layer, head, t, part]);
                assert!(
                    found == expected,
                    "part {part} of token {t} of a block that goes on, layer {layer}, KV head {head}"
                );
                self.decoded.insert([first + t as u64, layer as u64, head as u64, part as u64], found);
            }
        }
        self.sequences[at].tokens.splice(n * block.., first..self.tokens + 1);
    }
}
