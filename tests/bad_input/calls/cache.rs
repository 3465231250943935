//! The tiered KV cache.

use super::*;

/// A cache with three sequences of two layers, which have room for two blocks.
struct KvCache(*mut vwd_kv_cache);

impl KvCache {
    fn new(backend: &Backend, dtype: DType) -> KvCache {
        let options = vwd_kv_cache_options {
            layers: 2,
            kv_heads: 2,
            block_size: 4,
            key_dim: 16,
            value_dim: 24,
            dtype_code: dtype.code as u32,
            dtype_bits: dtype.bits as u32,
            token_scales: (dtype == F8E4M3) as u32,
            max_sequences: 3,
            max_blocks: 2,
            host_blocks: 6,
            slots: 1000,
            ..args()
        };
        let mut cache = std::ptr::null_mut();
        // SAFETY: everything is valid.
        unsafe {
            assert_ok(vwd_kv_cache_create(backend.session(), &options, &mut cache));
            for _ in 0..3 {
                let mut sequence = 0;
                assert_ok(vwd_kv_cache_add(cache, &mut sequence, std::ptr::null_mut()));
                assert_ok(vwd_kv_cache_extend(cache, sequence, 8, std::ptr::null_mut()));
            }
        }
        KvCache(cache)
    }

    /// A call on it.
    fn call<'b, T: Versioned + 'static>(
        self,
        backend: &'b Backend,
        name: &'static str,
        function: unsafe extern "C" fn(*const vwd_kv_cache, *const T, vwd_stream) -> vwd_status,
    ) -> Call<'b> {
        let handle = ("cache", self.0.cast_const().cast());
        Call::with::<T>(backend, name, SIZES, handle, move |handle, args, stream| {
            let _alive = &self;
            // SAFETY: the table passes a cache (or NULL) and arguments (or less), as C might.
            unsafe { function(handle.cast(), args.cast(), stream) }
        })
    }
}

impl Drop for KvCache {
    fn drop(&mut self) {
        // SAFETY: created above, released once.
        unsafe { vwd_kv_cache_release(self.0) };
    }
}

pub fn kv_cache_append(backend: &Backend) -> Call<'_> {
    let mut call = kv_cache_append_of(backend, F16);
    call.refused("k_scale", offset_of!(vwd_kv_cache_append_args, k_scale));
    call.refused("v_scale", offset_of!(vwd_kv_cache_append_args, v_scale));
    call
}

pub fn kv_cache_append_scales(backend: &Backend) -> Call<'_> {
    let mut call = kv_cache_append_of(backend, F8E4M3);
    call.input("k_scale", offset_of!(vwd_kv_cache_append_args, k_scale), F32, "B Q Hk");
    call.input("v_scale", offset_of!(vwd_kv_cache_append_args, v_scale), F32, "B Q Hk");
    call
}

fn kv_cache_append_of(backend: &Backend, dtype: DType) -> Call<'_> {
    type Args = vwd_kv_cache_append_args;
    let cache = KvCache::new(backend, dtype);
    let mut call = cache.call::<Args>(backend, "vwd_kv_cache_append", vwd_kv_cache_append);
    call.scalar("flags", offset_of!(Args, flags), 0, FLAGS);
    call.scalar("layer", offset_of!(Args, layer), 1, &[2, u32::MAX]);
    call.input("sequences", offset_of!(Args, sequences), I32, "B").values(&[2, 0, 1]);
    call.input("begin", offset_of!(Args, begin), I32, "B").values(&[0, 0, 0]);
    call.input("lens", offset_of!(Args, lens), I32, "B").optional().values(&[8, 3, 0]);
    call.input("k", offset_of!(Args, k), dtype, "B Q Hk D");
    call.input("v", offset_of!(Args, v), dtype, "B Q Hk Dv");
    call
}

pub fn kv_cache_compact(backend: &Backend) -> Call<'_> {
    type Args = vwd_kv_cache_compact_args;
    let cache = KvCache::new(backend, F16);
    let mut call = cache.call::<Args>(backend, "vwd_kv_cache_compact", vwd_kv_cache_compact);
    call.scalar("flags", offset_of!(Args, flags), 0, FLAGS);
    call.input("sequences", offset_of!(Args, sequences), I32, "B").values(&[2, 0, 1]);
    call.input("bases", offset_of!(Args, bases), I64, "B").values(&[0, 5, 1]);
    call.input("path", offset_of!(Args, path), I32, "B Q?");
    call.input("accepted", offset_of!(Args, accepted), I32, "B").optional().values(&[0, 1, 0]);
    call
}

pub fn kv_cache_resolve(backend: &Backend, rows: Rows) -> Call<'_> {
    type Args = vwd_kv_cache_resolve_args;
    let cache = KvCache::new(backend, F16);
    let mut call = cache.call::<Args>(backend, "vwd_kv_cache_resolve", vwd_kv_cache_resolve);
    let [ids, counts] = if matches!(rows, Rows::Own) { ["B Q Hk cap", "B Q Hk"] } else { ["B Hk cap", "B Hk"] };
    call.scalar("flags", offset_of!(Args, flags), 0, FLAGS);
    call.scalar("layer", offset_of!(Args, layer), 1, &[2, u32::MAX]);
    call.input("sequences", offset_of!(Args, sequences), I32, "B").values(&[2, 0, 1]);
    let (wanted, resident) = (offset_of!(Args, wanted), offset_of!(Args, resident));
    call.input("wanted.ids", wanted + offset_of!(vwd_block_list, ids), I32, ids);
    call.input("wanted.counts", wanted + offset_of!(vwd_block_list, counts), I32, counts);
    call.output("wanted.slots", wanted + offset_of!(vwd_block_list, slots), I32, ids);
    call.output("resident.ids", resident + offset_of!(vwd_block_list, ids), I32, ids);
    call.output("resident.counts", resident + offset_of!(vwd_block_list, counts), I32, counts);
    call.output("resident.slots", resident + offset_of!(vwd_block_list, slots), I32, ids);
    call.output("missed_counts", offset_of!(Args, missed_counts), I32, counts).optional();
    call
}
