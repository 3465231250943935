//! The decoder: how a step begins, and what is foreseen in it.

use super::*;

/// A decoder of one layer that foresees, in a step of three rows, whose lengths it keeps.
struct Decoder<'b> {
    handle: *mut vwd_decoder,
    _lens: Tensor<'b>,
}

impl<'b> Decoder<'b> {
    fn new(backend: &'b Backend) -> Decoder<'b> {
        let policy = vwd_decoder_policy {
            method: VWD_SELECT_MINMAX,
            k: 2,
            init_blocks: 0,
            local_blocks: 1,
            dense_below: 0,
            window: 0,
            strategy: VWD_STRATEGY_FORESEEN,
            predict: 0,
            ratio: 0.0,
            holt: vwd_holt { alpha: 0.0, beta: 0.0, gamma: 0.0 },
            reserved: [0; 4],
        };
        let options = vwd_decoder_options {
            layers: 1,
            max_rows: 3,
            max_positions: 2,
            query_heads: 4,
            kv_heads: 2,
            key_dim: 16,
            value_dim: 16,
            dtype_code: F32.code as u32,
            dtype_bits: F32.bits as u32,
            page_size: 8,
            pages: 6,
            block_size: 8,
            policy,
            ..args()
        };
        let lens = Tensor::ints(backend, I32, &Array::new(&[3], vec![7, 5, 8]), &Layout::default());
        let mut handle = std::ptr::null_mut();
        let step = vwd_decoder_step { seq_lens: lens.c(), ..args() };
        // SAFETY: everything is valid.
        unsafe {
            assert_ok(vwd_decoder_create(backend.session(), &options, &mut handle));
            assert_ok(vwd_decoder_begin(handle, &step, std::ptr::null_mut()));
        }
        Decoder { handle, _lens: lens }
    }

    /// A call on it.
    fn call<T: Versioned + 'static>(
        self,
        backend: &'b Backend,
        name: &'static str,
        invoke: impl Fn(*const vwd_decoder, *const T, vwd_stream) -> vwd_status + 'b,
    ) -> Call<'b> {
        let handle = ("decoder", self.handle.cast_const().cast());
        Call::with::<T>(backend, name, SIZES, handle, move |handle, args, stream| {
            let _alive = &self;
            invoke(handle.cast(), args.cast(), stream)
        })
    }
}

impl Drop for Decoder<'_> {
    fn drop(&mut self) {
        // SAFETY: created above, released once.
        unsafe { vwd_decoder_release(self.handle) };
    }
}

pub fn decoder_begin(backend: &Backend) -> Call<'_> {
    type Args = vwd_decoder_step;
    let mut call = Decoder::new(backend).call::<Args>(backend, "vwd_decoder_begin", |handle, args, stream| {
        // SAFETY: the table passes a decoder (or NULL) and arguments (or less), as C might.
        unsafe { vwd_decoder_begin(handle, args, stream) }
    });
    call.args_are_called("step");
    call.scalar("flags", offset_of!(Args, flags), 0, FLAGS);
    call.scalar("positions", offset_of!(Args, positions), 2, &[3, u32::MAX]);
    call.input("seq_lens", offset_of!(Args, seq_lens), I32, "B").values(&[16, 3, 9]);
    call.input("page_table", offset_of!(Args, page_table), I32, "B max_pages?").optional().values(&[0, 1, 2, 3, 4, 5]);
    call.input("q_lens", offset_of!(Args, q_lens), I32, "B").optional().values(&[2, 1, 0]);
    call.input("begin", offset_of!(Args, begin), I32, "B").optional().values(&[0, 1, 2]);
    call.input("modes", offset_of!(Args, modes), I32, "B").optional().values(&[0, 1, 2]);
    call.input("sequences", offset_of!(Args, sequences), I32, "B").optional().values(&[2, 0, -1]);
    call.input("tree", offset_of!(Args, tree), U32, "B 2 1").optional();
    call
}

pub fn decoder_foresee(backend: &Backend) -> Call<'_> {
    type Args = vwd_decoder_foresee_args;
    let mut call = Decoder::new(backend).call::<Args>(backend, "vwd_decoder_foresee", |handle, args, stream| {
        // SAFETY: as above.
        unsafe { vwd_decoder_foresee(handle, std::ptr::null(), args, stream) }
    });
    call.scalar("flags", offset_of!(Args, flags), 0, FLAGS);
    call.scalar("layer", offset_of!(Args, layer), 0, &[1, u32::MAX]);
    call.input("q", offset_of!(Args, q), F16, "B Hq D");
    call.refused("x", offset_of!(Args, x));
    call.refused("previous", offset_of!(Args, previous));
    call
}
