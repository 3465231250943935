//! The floating-point environment. The inference engine may round otherwise, flush subnormals to zero or trap; results do
//! not depend on it.

/// While a value of this type lives, its thread computes as Rust expects: to nearest, with subnormals, without traps.
pub struct Floats {
    /// The thread's control register before [`Floats::enter`], if it differed from the default.
    saved: Option<control::Register>,
}

impl Floats {
    #[inline]
    pub fn enter() -> Floats {
        let saved = control::read();
        if control::is_default(saved) {
            return Floats { saved: None };
        }
        control::write(control::DEFAULT);
        Floats { saved: Some(saved) }
    }
}

impl Drop for Floats {
    #[inline]
    fn drop(&mut self) {
        if let Some(saved) = self.saved {
            control::write(saved);
        }
    }
}

/// The control register of x86-64, MXCSR.
#[cfg(target_arch = "x86_64")]
mod control {
    use std::arch::asm;

    pub type Register = u32;
    pub const DEFAULT: Register = 0x1f80;
    /// The control bits. The six lowest bits are status flags, which computing sets.
    const CONTROL: Register = 0xffc0;

    pub fn is_default(register: Register) -> bool {
        register & CONTROL == DEFAULT
    }

    #[inline]
    pub fn read() -> Register {
        let mut register = 0;
        // SAFETY: stores four bytes.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut register, options(nostack, preserves_flags)) };
        register
    }

    #[cold]
    pub fn write(register: Register) {
        // SAFETY: the value is the default, or what was read.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const register, options(nostack, preserves_flags, readonly)) };
    }
}

/// The control register of AArch64, FPCR.
#[cfg(target_arch = "aarch64")]
mod control {
    use std::arch::asm;

    pub type Register = u64;
    pub const DEFAULT: Register = 0;

    pub fn is_default(register: Register) -> bool {
        register == DEFAULT
    }

    #[inline]
    pub fn read() -> Register {
        let register;
        // SAFETY: reads a register.
        unsafe { asm!("mrs {}, fpcr", out(reg) register, options(nomem, nostack, preserves_flags)) };
        register
    }

    #[cold]
    pub fn write(register: Register) {
        // SAFETY: the value is the default, or what was read.
        unsafe { asm!("msr fpcr, {}", in(reg) register, options(nostack, preserves_flags)) };
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod control {
    pub type Register = ();
    pub const DEFAULT: Register = ();

    pub fn is_default(_: Register) -> bool {
        true
    }

    pub fn read() -> Register {}

    pub fn write(_: Register) {}
}
