//! Verification and packing.

use super::*;

pub fn verify(backend: &Backend) -> Call<'_> {
    let sizes = [("B", 3), ("γ", 4), ("γ+1", 5)];
    let mut call = Call::new::<vwd_verify_args>(backend, "vwd_verify", &sizes, vwd_verify);
    call.scalar("flags", offset_of!(vwd_verify_args, flags), 0, FLAGS);
    call.input("draft", offset_of!(vwd_verify_args, draft), I32, "B γ");
    call.input("target", offset_of!(vwd_verify_args, target), I32, "B γ+1");
    call.input("draft_lens", offset_of!(vwd_verify_args, draft_lens), I32, "B").optional();
    call.output("accepted", offset_of!(vwd_verify_args, accepted), I32, "B");
    call.output("next_token", offset_of!(vwd_verify_args, next_token), I32, "B");
    call.output("mismatch", offset_of!(vwd_verify_args, mismatch), I32, "B").optional();
    call.output("committed", offset_of!(vwd_verify_args, committed), I32, "B γ+1").optional();
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
    let sizes = [("B", 3), ("B+1", 4), ("γ", 4), ("γ+1", 5), ("cap", 12), ("D", 16), ("Hk", 2), ("E", 8)];
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
    call
}
