//! What a decoder foresees.

use crate::calls::FLOATS;
use crate::case::{Answer, Case, of};
use crate::content::Content;
use crate::support::*;
use std::ffi::c_void;
use std::ptr::null_mut;
use vanward::abi::*;
use vanward::capi::*;

struct Decoder(*mut vwd_decoder);

impl Drop for Decoder {
    fn drop(&mut self) {
        // SAFETY: created below, released once.
        unsafe { vwd_decoder_release(self.0) };
    }
}

const ROWS: usize = 3;
const DIM: i64 = 16;

/// Foresees in a step of three rows; the answer is how many blocks each list has.
pub fn foresee(case: &mut Case) {
    type Args = vwd_decoder_foresee_args;
    let heads = case.rng.pick(&[[1, 1], [2, 1], [4, 2]]);
    let strategy = case.rng.pick(&[VWD_STRATEGY_SERIAL, VWD_STRATEGY_PRR, VWD_STRATEGY_FORESEEN]);
    let lens: [i64; ROWS] = std::array::from_fn(|_| case.rng.int(0..=64));
    let args = case.call_with::<Args>(move |session, args: *const c_void| -> Answer {
        let policy = vwd_decoder_policy {
            method: VWD_SELECT_MINMAX,
            k: 3,
            init_blocks: 1,
            local_blocks: 0,
            dense_below: 0,
            window: 0,
            strategy,
            predict: (strategy == VWD_STRATEGY_PRR) as u32 * VWD_PREDICT_FORESEEN,
            ratio: 0.0,
            holt: vwd_holt { alpha: 0.0, beta: 0.0, gamma: 0.0 },
            reserved: [0; 4],
        };
        let options = vwd_decoder_options {
            layers: 2,
            max_rows: ROWS as u32,
            query_heads: heads[0],
            kv_heads: heads[1],
            key_dim: DIM as u32,
            value_dim: DIM as u32,
            dtype_code: F32.code as u32,
            dtype_bits: F32.bits as u32,
            page_size: 64,
            pages: ROWS as u32,
            block_size: 8,
            policy,
            ..args_of()
        };
        let host = Backend::cpu(1);
        let seq_lens = Tensor::ints(&host, I32, &Array::new(&[ROWS], lens.to_vec()), &Layout::default());
        let (mut handle, mut details) = (null_mut(), args_of::<vwd_decoder_details>());
        let step = vwd_decoder_step { seq_lens: seq_lens.c(), ..args_of() };
        // SAFETY: the arguments are valid, or what the case describes.
        unsafe {
            assert_ok(vwd_decoder_create(session.raw(), &options, &mut handle));
            let decoder = Decoder(handle);
            assert_ok(vwd_decoder_begin(decoder.0, &step, null_mut()));
            let status = vwd_decoder_foresee(decoder.0, std::ptr::null(), args.cast(), null_mut());
            assert_ok(vwd_decoder_info(decoder.0, &mut details));
            let bytes = details.predicted.shape.iter().take(3).product::<i64>() as usize * 4;
            let counts = std::slice::from_raw_parts(details.predicted.data.cast::<u8>(), bytes).to_vec();
            assert!(status == VWD_OK || counts.iter().all(|&byte| byte == 0), "written in spite of an error");
            (status, if status == VWD_OK { counts } else { vec![] })
        }
    });
    let layer = case.rng.size(0..=1) as u32;
    case.number(of!(args, Args, layer), layer);
    let (dtype, heads) = (case.rng.pick(&FLOATS), case.rng.pick(&heads) as i64);
    case.input(of!(args, Args, q), dtype, &[ROWS as i64, heads, DIM], Content::Floats);
}

fn args_of<T: Versioned>() -> T {
    crate::support::args()
}
