//! Draft trees.

use super::*;

const TREE: &[(&str, usize)] = &[("B", 3), ("N", 5), ("⌈N/32⌉", 1), ("M", 4), ("V", 9), ("S", 2)];

pub fn tree_prepare(backend: &Backend, has_parents: bool) -> Call<'_> {
    type Args = vwd_tree_prepare_args;
    let mut call = Call::new::<Args>(backend, "vwd_tree_prepare", TREE, vwd_tree_prepare);
    call.scalar("flags", offset_of!(Args, flags), 0, FLAGS);
    if has_parents {
        call.input("parents", offset_of!(Args, parents), I32, "B N");
    } else {
        call.input("first_child", offset_of!(Args, first_child), I64, "B N");
        call.input("next_sibling", offset_of!(Args, next_sibling), I64, "B N");
        call.refused("parents", offset_of!(Args, parents));
    }
    call.input("node_counts", offset_of!(Args, node_counts), I32, "B").optional().values(&[5, 0, 9]);
    call.input("bases", offset_of!(Args, bases), I64, "B");
    call.output("tree_parents", offset_of!(Args, tree_parents), I32, "B N").optional();
    call.output("depths", offset_of!(Args, depths), I32, "B N").optional();
    call.output("positions", offset_of!(Args, positions), I64, "B N");
    call.output("ranks", offset_of!(Args, ranks), I32, "B N").optional();
    call.output("mask", offset_of!(Args, mask), U32, "B N ⌈N/32⌉").optional();
    call.output("status", offset_of!(Args, status), U32, "B").optional();
    call
}

pub fn verify_tree(backend: &Backend, has_logits: bool) -> Call<'_> {
    type Args = vwd_verify_tree_args;
    let mut call = Call::new::<Args>(backend, "vwd_verify_tree", TREE, vwd_verify_tree);
    call.has_scratch(vwd_verify_tree_scratch);
    call.scalar("flags", offset_of!(Args, flags), 0, FLAGS);
    call.input("tokens", offset_of!(Args, tokens), I32, "B N");
    call.input("parents", offset_of!(Args, parents), I32, "B N");
    call.input("node_counts", offset_of!(Args, node_counts), I32, "B").optional().values(&[5, 0, 9]);
    if has_logits {
        // Without logits the call asks for target.
        call.input("logits", offset_of!(Args, logits), F16, "B N V?").optional();
        call.refused("target", offset_of!(Args, target));
    } else {
        call.input("target", offset_of!(Args, target), I32, "B N");
    }
    call.output("accepted", offset_of!(Args, accepted), I32, "B");
    call.output("path", offset_of!(Args, path), I32, "B M");
    call.output("next_token", offset_of!(Args, next_token), I32, "B");
    call.output("committed", offset_of!(Args, committed), I32, "B M").optional();
    call.output("status", offset_of!(Args, status), U32, "B").optional();
    end!(call, Args);
    call
}

pub fn sampled_tree(backend: &Backend) -> Call<'_> {
    type Args = vwd_verify_tree_args;
    let sizes = [TREE, &[("Vd", 7)]].concat();
    let mut call = Call::new::<Args>(backend, "vwd_verify_tree", &sizes, vwd_verify_tree);
    call.has_scratch(vwd_verify_tree_scratch);
    call.scalar("flags", offset_of!(Args, flags), 0, &[8, 1 << 31]);
    call.scalar("walk", offset_of!(Args, walk), VWD_WALK_DISTINCT, &[4, u32::MAX]);
    call.input("tokens", offset_of!(Args, tokens), I32, "B N");
    call.input("parents", offset_of!(Args, parents), I32, "B N");
    call.input("node_counts", offset_of!(Args, node_counts), I32, "B").optional().values(&[5, 0, 9]);
    call.input("logits", offset_of!(Args, logits), F16, "B N V?");
    call.refused("target", offset_of!(Args, target));
    call.input("draft_rows", offset_of!(Args, draft_rows), BF16, "B N Vd").optional();
    call.input("draft_map", offset_of!(Args, draft_map), I32, "Vd").optional();
    call.input("temperature", offset_of!(Args, temperature), F32, "B").optional();
    call.input("top_k", offset_of!(Args, top_k), I32, "B").optional();
    call.input("top_p", offset_of!(Args, top_p), F32, "B").optional();
    call.input("min_p", offset_of!(Args, min_p), F32, "B").optional();
    call.input("seeds", offset_of!(Args, seeds), I64, "B");
    call.input("positions", offset_of!(Args, positions), I64, "B");
    call.output("accepted", offset_of!(Args, accepted), I32, "B");
    call.output("path", offset_of!(Args, path), I32, "B M");
    call.output("next_token", offset_of!(Args, next_token), I32, "B");
    call.output("committed", offset_of!(Args, committed), I32, "B M").optional();
    call.output("status", offset_of!(Args, status), U32, "B").optional();
    call
}

/// A call on a compactor of two caches, which lasts as long as the process.
pub fn compact(backend: &Backend) -> Call<'_> {
    type Args = vwd_compact_args;
    let memory: &'static mut [u64] = Box::leak(vec![0; 1 << 10].into_boxed_slice());
    let mut caches = [absent(); 2];
    for (n, cache) in caches.iter_mut().enumerate() {
        let data = memory.as_mut_ptr().wrapping_add(n * 512).cast();
        let (shape, strides) = ([6, 8, 16, 0, 0], [128, 16, 1, 0, 0]);
        *cache = vwd_tensor {
            data,
            device_type: 1,
            dtype_code: 2,
            dtype_bits: 16,
            lanes: 1,
            ndim: 3,
            shape,
            strides,
            ..absent()
        };
    }
    let options = vwd_compactor_options { cache_count: 2, caches: caches.as_ptr(), ..args() };
    let mut compactor = std::ptr::null_mut();
    // SAFETY: the pointers are valid; the caches live as long as the process.
    assert_ok(unsafe { vwd_compactor_create(backend.session(), &options, &mut compactor) });
    let sizes = [("B", 3), ("M", 4), ("max_pages", 2)];
    let handle = ("compactor", compactor.cast_const().cast());
    // SAFETY: the table passes the compactor (or NULL) and arguments, as C might.
    let mut call = Call::with::<Args>(backend, "vwd_compact", &sizes, handle, |compactor, args, stream| unsafe {
        vwd_compact(compactor.cast(), args.cast(), stream)
    });
    call.scalar("flags", offset_of!(Args, flags), 0, FLAGS);
    call.input("page_table", offset_of!(Args, page_table), I32, "B max_pages?").optional();
    call.input("bases", offset_of!(Args, bases), I32, "B");
    call.input("path", offset_of!(Args, path), I32, "B M?");
    call.input("accepted", offset_of!(Args, accepted), I32, "B").optional();
    call
}
