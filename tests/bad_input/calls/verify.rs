//! Verification and packing.

use super::*;

pub fn verify(backend: &Backend) -> Call<'_> {
    let sizes = [("B", 3), ("γ", 4), ("γ+1", 5), ("S", 2)];
    let mut call = Call::new::<vwd_verify_args>(backend, "vwd_verify", &sizes, vwd_verify);
    call.scalar("flags", offset_of!(vwd_verify_args, flags), 0, FLAGS);
    call.input("draft", offset_of!(vwd_verify_args, draft), I32, "B γ");
    call.input("target", offset_of!(vwd_verify_args, target), I32, "B γ+1");
    call.input("draft_lens", offset_of!(vwd_verify_args, draft_lens), I32, "B").optional();
    call.output("accepted", offset_of!(vwd_verify_args, accepted), I32, "B");
    call.output("next_token", offset_of!(vwd_verify_args, next_token), I32, "B");
    call.output("mismatch", offset_of!(vwd_verify_args, mismatch), I32, "B").optional();
    call.output("committed", offset_of!(vwd_verify_args, committed), I32, "B γ+1").optional();
    end!(call, vwd_verify_args);
    call.refused("bonus", offset_of!(vwd_verify_args, bonus));
    call
}

/// Drafts one after the other.
pub fn verify_flat(backend: &Backend) -> Call<'_> {
    type Args = vwd_verify_args;
    let sizes = [("B", 3), ("N", 12), ("M", 5), ("S", 2)];
    let mut call = Call::new::<Args>(backend, "vwd_verify", &sizes, vwd_verify);
    call.scalar("flags", offset_of!(Args, flags), 0, FLAGS);
    call.input("draft", offset_of!(Args, draft), I32, "N");
    call.input("target", offset_of!(Args, target), I32, "N");
    call.input("draft_ends", offset_of!(Args, draft_ends), I32, "B").values(&[4, 4, 12]);
    call.input("bonus", offset_of!(Args, bonus), I32, "B");
    call.output("accepted", offset_of!(Args, accepted), I32, "B");
    call.output("next_token", offset_of!(Args, next_token), I32, "B");
    call.output("mismatch", offset_of!(Args, mismatch), I32, "B").optional();
    call.output("committed", offset_of!(Args, committed), I32, "B M?").optional();
    end!(call, Args);
    call.refused("draft_lens", offset_of!(Args, draft_lens));
    call.is_new_to_its_struct();
    call
}

/// rows and packed, two of each.
fn pack_arrays(call: &mut Call, count: usize, rows_at: usize, packed_at: usize) {
    let rows = Box::leak(Box::new([absent(); 2])).as_mut_ptr();
    let packed = Box::leak(Box::new([absent(); 2])).as_mut_ptr();
    call.scalar("tensor_count", count, 2, &[0]);
    call.array("rows", rows_at, rows);
    call.array("packed", packed_at, packed);
    call.field("rows[0]", rows, Role::In, F16, "B γ D").any_dtype();
    call.field("rows[1]", rows.wrapping_add(1), Role::In, F32, "B γ Hk E").any_dtype();
    call.field("packed[0]", packed, Role::Out, F16, "cap? D").any_dtype();
    call.field("packed[1]", packed.wrapping_add(1), Role::Out, F32, "cap? Hk E").any_dtype();
}

pub fn pack(backend: &Backend) -> Call<'_> {
    let sizes = [("B", 3), ("B+1", 4), ("γ", 4), ("cap", 12), ("D", 16), ("Hk", 2), ("E", 8)];
    let mut call = Call::new::<vwd_pack_args>(backend, "vwd_pack", &sizes, vwd_pack);
    call.scalar("flags", offset_of!(vwd_pack_args, flags), 0, FLAGS);
    let count = offset_of!(vwd_pack_args, tensor_count);
    pack_arrays(&mut call, count, offset_of!(vwd_pack_args, rows), offset_of!(vwd_pack_args, packed));
    call.input("accepted", offset_of!(vwd_pack_args, accepted), I32, "B").values(&[4, 0, 2]);
    call.output("offsets", offset_of!(vwd_pack_args, offsets), I32, "B+1");
    call
}

pub fn verify_pack(backend: &Backend) -> Call<'_> {
    let sizes = [("B", 3), ("B+1", 4), ("γ", 4), ("γ+1", 5), ("S", 2), ("cap", 12), ("D", 16), ("Hk", 2), ("E", 8)];
    let mut call = Call::new::<vwd_verify_pack_args>(backend, "vwd_verify_pack", &sizes, vwd_verify_pack);
    call.scalar("flags", offset_of!(vwd_verify_pack_args, flags), 0, FLAGS);
    let count = offset_of!(vwd_verify_pack_args, tensor_count);
    pack_arrays(&mut call, count, offset_of!(vwd_verify_pack_args, rows), offset_of!(vwd_verify_pack_args, packed));
    call.input("draft", offset_of!(vwd_verify_pack_args, draft), I32, "B γ");
    call.input("target", offset_of!(vwd_verify_pack_args, target), I32, "B γ+1");
    call.input("draft_lens", offset_of!(vwd_verify_pack_args, draft_lens), I32, "B").optional();
    call.output("accepted", offset_of!(vwd_verify_pack_args, accepted), I32, "B");
    call.output("next_token", offset_of!(vwd_verify_pack_args, next_token), I32, "B");
    call.output("offsets", offset_of!(vwd_verify_pack_args, offsets), I32, "B+1");
    call.output("mismatch", offset_of!(vwd_verify_pack_args, mismatch), I32, "B").optional();
    call.output("committed", offset_of!(vwd_verify_pack_args, committed), I32, "B γ+1").optional();
    end!(call, vwd_verify_pack_args);
    call
}

/// Sampling from a tensor with the rows of each request, or from one that has the rows of all requests one after the other.
pub fn verify_sample(backend: &Backend, is_flat: bool) -> Call<'_> {
    type Args = vwd_verify_sample_args;
    let sizes = [("B", 3), ("γ", 4), ("γ+1", 5), ("N", 11), ("V", 16), ("Vd", 8), ("S", 2)];
    let mut call = Call::new::<Args>(backend, "vwd_verify_sample", &sizes, vwd_verify_sample);
    call.has_scratch(vwd_verify_sample_scratch);
    call.scalar("flags", offset_of!(Args, flags), 0, &[8, 1 << 31]);
    call.scalar("rule", offset_of!(Args, rule), VWD_ACCEPT_AUTO, &[4, u32::MAX]);
    call.input("draft", offset_of!(Args, draft), I32, "B γ");
    call.input("draft_lens", offset_of!(Args, draft_lens), I32, "B").optional();
    if is_flat {
        call.input("target", offset_of!(Args, target), F32, "N? V?").goes_with("target_begin");
        call.input("target_begin", offset_of!(Args, target_begin), I32, "B").goes_with("target").values(&[0, 3, 8]);
    } else {
        call.input("target", offset_of!(Args, target), F32, "B γ+1 V?");
        call.refused("target_begin", offset_of!(Args, target_begin));
    }
    call.input("draft_rows", offset_of!(Args, draft_rows), BF16, "B γ Vd").optional();
    call.input("draft_map", offset_of!(Args, draft_map), I32, "Vd").optional();
    call.input("temperature", offset_of!(Args, temperature), F32, "B").optional();
    call.input("top_k", offset_of!(Args, top_k), I32, "B").optional();
    call.input("top_p", offset_of!(Args, top_p), F32, "B").optional();
    call.input("min_p", offset_of!(Args, min_p), F32, "B").optional();
    call.input("seeds", offset_of!(Args, seeds), I64, "B");
    call.input("positions", offset_of!(Args, positions), I64, "B");
    end!(call, Args);
    call.output("next_token", offset_of!(Args, next_token), I32, "B");
    call.output("accepted", offset_of!(Args, accepted), I32, "B").optional();
    call.output("committed", offset_of!(Args, committed), I32, "B γ+1").optional();
    call.output("status", offset_of!(Args, status), U32, "B").optional();
    call.output("logprobs", offset_of!(Args, logprobs), F32, "B γ+1").optional();
    call
}
