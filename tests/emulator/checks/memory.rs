//! Memory ends where it ends, addresses are multiples, and narrow values are extended.

use super::check;

#[test]
fn memory_ends() {
    check("st.global.u32 [%rd2+4], %r1;").fails("not the device's");
    check("add.s64 %rd10, %rd3, -4; ld.global.u32 %r10, [%rd10];").fails("not the device's");
    check("st.shared.u32 [%r2+5000], %r1;").fails("past its end");
    check("mov.u64 %rd10, 0; ld.u32 %r10, [%rd10];").fails("not the device's");
}

#[test]
fn addresses_are_multiples_of_what_they_point_to() {
    check("st.global.u64 [%rd2+4], %rd1;").fails("not a multiple");
    check("ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r2];").fails("not a multiple");
}

#[test]
fn shared_memory_that_nobody_wrote_is_garbage() {
    check("ld.shared.u32 %r10, [%r2]; st.global.u32 [%rd2], %r10;").gives(|_| !0);
}

#[test]
fn narrow_values_are_extended_as_their_type_says() {
    for (kind, expected) in [("u8", 0xfe), ("s8", 0xffff_fffe), ("u16", 0xfdfe), ("s16", 0xffff_fdfe)] {
        let body = format!("ld.global.{kind} %r10, [%rd3]; st.global.u32 [%rd2], %r10;");
        check(body).input(vec![0xfcfb_fdfe]).gives(|_| expected);
    }
}

#[test]
fn narrow_values_are_stored_alone() {
    check("st.global.u16 [%rd2], 0x1234; st.global.u8 [%rd2+3], 0x56;").gives(|_| 0x5600_1234);
}

#[test]
fn vectors_follow_each_other() {
    let body = "ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd3]; add.s32 %r10, %r10, %r13; sub.s32 %r11, %r12, %r11; \
                mad.lo.s32 %r10, %r10, 1000, %r11; st.global.u32 [%rd2], %r10;";
    check(body).input(vec![1, 20, 50, 4]).gives(|_| 5030);
}

#[test]
fn generic_addresses_find_shared_and_global_memory() {
    let body = "cvt.u64.u32 %rd10, %r2; cvta.shared.u64 %rd10, %rd10; st.u32 [%rd10], %r1; ld.shared.u32 %r10, [%r2]; \
                st.u32 [%rd2], %r10;";
    check(body).gives(|thread| thread);
}

#[test]
fn what_is_not_known_is_told() {
    check("tanh.approx.f32 %f1, %f2;").fails("not known");
    check("mov.u32 %r10, %clock;").fails("what is %clock");
    check("trap;").fails("trap");
}

#[test]
fn registered_memory_overlaps_nothing_and_stays_the_callers() {
    let mut device = crate::device::Device::default();
    let words = [0u64; 8];
    let address = words.as_ptr() as u64;
    let free = device.free_bytes();
    assert!(device.register(address, 32));
    assert_eq!(device.free_bytes(), free, "the caller's memory is none of the device's");
    assert!(!device.register(address + 24, 32), "the last word is registered");
    assert!(device.register(address + 32, 32));
    assert!(!device.free(address) && !device.unregister(address + 8));
    assert!(device.unregister(address) && !device.unregister(address));
}
