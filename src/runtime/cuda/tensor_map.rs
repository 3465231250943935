//! Maps of tensors, by which a kernel asks for a box of one with a single instruction.

use cudarc::driver::sys::{self, CUresult, CUtensorMap};
use std::ffi::c_void;
use std::sync::OnceLock;

/// Dimensions of a mapped tensor, the innermost first.
const RANK: usize = 4;

/// Mirrors TensorMap of kernels/common/tensor_map.cuh.
#[repr(C, align(128))]
#[derive(Clone, Copy)]
pub struct TensorMap(CUtensorMap);

/// A tensor of 16-bit elements, those of the first dimension adjacent, and the box of it that a copy takes, whose first dimension fills the
/// width of a slab: kernels/common/warpgroup.cuh says how its elements lie in shared memory.
pub struct Boxed {
    pub data: *mut u8,
    pub dims: [usize; RANK],
    /// Bytes from one to the next in each dimension but the first.
    pub steps: [i64; RANK - 1],
    pub lengths: [u32; RANK],
}

type Encode = unsafe extern "C" fn(
    *mut CUtensorMap,
    sys::CUtensorMapDataType,
    u32,
    *mut c_void,
    *const u64,
    *const u64,
    *const u32,
    *const u32,
    sys::CUtensorMapInterleave,
    sys::CUtensorMapSwizzle,
    sys::CUtensorMapL2promotion,
    sys::CUtensorMapFloatOOBfill,
) -> CUresult;

/// The driver's function, where it has one. The driver is open.
fn encode() -> Option<Encode> {
    static FOUND: OnceLock<Option<Encode>> = OnceLock::new();
    // SAFETY: a library that is loaded, whose function of this name has this type.
    *FOUND.get_or_init(|| unsafe { sys::culib().get::<Encode>(b"cuTensorMapEncodeTiled\0").ok().map(|found| *found) })
}

/// Asks the driver, which is open, for what it has, so that no launch does.
pub fn find() {
    encode();
}

impl TensorMap {
    pub const NONE: TensorMap = TensorMap(CUtensorMap { opaque: [0; 16] });

    /// `None` where hardware or driver do not take such a tensor. Allocates nothing on the device, and does not wait.
    pub fn new(of: &Boxed) -> Option<TensorMap> {
        let (dims, steps) = strides(of)?;
        let (mut map, ones) = (TensorMap::NONE, [1; RANK]);
        // SAFETY: the map has its place, and each list its length.
        let encoded = unsafe {
            encode()?(
                &mut map.0,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
                RANK as u32,
                of.data.cast(),
                dims.as_ptr(),
                steps.as_ptr(),
                of.lengths.as_ptr(),
                ones.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        (encoded == CUresult::CUDA_SUCCESS).then_some(map)
    }
}

/// Dimensions and strides as the driver takes them, where hardware does.
fn strides(of: &Boxed) -> Option<([u64; RANK], [u64; RANK - 1])> {
    const ALIGNMENT: i64 = 16;
    let is_taken = |step: i64| (ALIGNMENT..1 << 40).contains(&step) && step % ALIGNMENT == 0;
    // The step of a dimension with one element may be anything.
    let steps: [i64; RANK - 1] = std::array::from_fn(|d| if of.dims[d + 1] > 1 { of.steps[d] } else { ALIGNMENT });
    // Kernels count coordinates in 32 bits with a sign.
    let are_counted = of.dims.iter().all(|dim| (1..1 << 31).contains(dim));
    let is_sound = are_counted && of.data as i64 % ALIGNMENT == 0 && steps.into_iter().all(is_taken);
    is_sound.then(|| (of.dims.map(|dim| dim as u64), steps.map(|step| step as u64)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boxed() -> Boxed {
        Boxed { data: 4096 as *mut u8, dims: [128, 16, 2, 9], steps: [512, 256, 8192], lengths: [64, 16, 1, 1] }
    }

    #[test]
    fn tensors_that_hardware_does_not_copy_in_boxes_have_no_map() {
        let taken = |change: &dyn Fn(&mut Boxed)| {
            let mut of = boxed();
            change(&mut of);
            strides(&of)
        };
        assert_eq!(taken(&|_| ()), Some(([128, 16, 2, 9], [512, 256, 8192])));
        // Heads before tokens, and a step of one page that says nothing.
        assert_eq!(taken(&|of| of.steps[1] = 1 << 20).unwrap().1[1], 1 << 20);
        assert_eq!(taken(&|of| (of.dims[3], of.steps[2]) = (1, 0)).unwrap().1[2], 16);
        let refused: [&dyn Fn(&mut Boxed); 8] = [
            &|of| of.data = 4104 as *mut u8,
            &|of| of.dims[3] = 0,
            &|of| of.dims[1] = 1 << 31,
            &|of| of.steps[0] = 0,
            &|of| of.steps[0] = 264,
            &|of| of.steps[1] = -256,
            &|of| of.steps[2] = 1 << 40,
            &|of| of.steps[2] = 8,
        ];
        for (n, change) in refused.into_iter().enumerate() {
            assert_eq!(taken(change), None, "{n}");
        }
    }
}
