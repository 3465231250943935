//! Structs that are kernels' parameters, and constants that kernels and host share. A kernel's source has the same struct and the
//! same constant, and `kernels/<family>/layout.cuh` states to its compiler where each field lies here and what each constant
//! is: a change on one side alone is an error.

/// Declares a struct as the kernels read it, and in tests its `layout`.
macro_rules! kernel_struct {
    (
        $(#[$attribute:meta])*
        $vis:vis struct $name:ident $(<$stride:ident>)? {
            $($(#[$field_attribute:meta])* $field_vis:vis $field:ident: $type:ty,)*
        }
    ) => {
        $(#[$attribute])*
        #[repr(C)]
        $vis struct $name $(<$stride>)? {
            $($(#[$field_attribute])* $field_vis $field: $type,)*
        }

        #[cfg(test)]
        impl $(<$stride>)? $name $(<$stride>)? {
            /// What `layout.cuh` says of it; `kernels_name` is its name there.
            pub fn layout(kernels_name: &str) -> String {
                let mut text = format!("\nVWD_SIZE({kernels_name}, {})\n", size_of::<Self>());
                $(
                    let (field, at) = (stringify!($field), std::mem::offset_of!(Self, $field));
                    text += &format!("VWD_FIELD({kernels_name}, {field}, {at}, {})\n", size_of::<$type>());
                )*
                text
            }
        }
    };
}
pub(crate) use kernel_struct;

/// Declares constants that the kernels know too, and in tests `kernel_constants`, which states them in `layout.cuh`. The name in
/// the kernels is the same unless `=> "Name"` follows the value; it must be visible where they include `layout.cuh`.
#[allow(unused_macro_rules)]
macro_rules! kernel_constants {
    (@name $name:ident) => { stringify!($name) };
    (@name $name:ident $kernels_name:literal) => { $kernels_name };
    ($(
        $(#[$attribute:meta])*
        $vis:vis const $name:ident: $type:ty = $value:expr $(=> $kernels_name:literal)?;
    )+) => {
        $($(#[$attribute])* $vis const $name: $type = $value;)+

        /// What `layout.cuh` says of the constants.
        #[cfg(test)]
        pub fn kernel_constants() -> String {
            let mut text = String::from("\n");
            $(
                let name = $crate::runtime::cuda::layout::kernel_constants!(@name $name $($kernels_name)?);
                text += &format!("VWD_CONSTANT({name}, {})\n", $name);
            )+
            text
        }
    };
}
pub(crate) use kernel_constants;

/// Whether a stride fits in 32 bits, as those of the common form do: see kernels/common/types.cuh.
pub fn is_near(stride: i64) -> bool {
    stride == stride as i32 as i64
}

/// ⌈log2 n⌉; 0 for 0.
pub fn log2_ceil(n: u32) -> u32 {
    n.max(1).next_power_of_two().trailing_zeros()
}

kernel_struct! {
    /// n / value by a multiplication, for n < 2^31: 2n · magic >> 32 >> shift. Mirrors Divisor of kernels/common/types.cuh.
    #[derive(Clone, Copy, PartialEq)]
    pub struct Divisor {
        pub value: u32,
        magic: u32,
        shift: u32,
    }
}

impl Divisor {
    pub const NONE: Divisor = Divisor { value: 0, magic: 0, shift: 0 };

    /// `value` is not 0.
    pub fn new(value: u32) -> Divisor {
        // Most are powers of two: no division.
        if value.is_power_of_two() {
            return Divisor { value, magic: 1 << 31, shift: value.trailing_zeros() };
        }
        let shift = log2_ceil(value);
        Divisor { value, magic: (1u64 << (31 + shift)).div_ceil(value as u64) as u32, shift }
    }
}

/// Compares with the family's `layout.cuh`, or writes it where `VANWARD_WRITE_LAYOUTS` is set.
#[cfg(test)]
pub fn check(family: &str, source: &str, structs: &[String]) {
    let path = format!("{}/kernels/{family}/layout.cuh", env!("CARGO_MANIFEST_DIR"));
    let text = format!(
        "// Where the fields of {source} lie: `make kernels` writes this, a test compares it.\n#pragma once\n\n\
         #include \"common/layout.cuh\"\n{}",
        structs.concat()
    );
    if std::env::var_os("VANWARD_WRITE_LAYOUTS").is_some() {
        std::fs::write(&path, &text).expect("write the layout");
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == text, "{path} is stale: run `make kernels` and commit kernels/");
}
