//! Which vector instructions the CPU backend uses.

use super::status::{Error, Result};
use std::sync::OnceLock;

/// Vector instructions, each level with those before it. Results may differ between levels in their last bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Instructions {
    /// What every processor of the target has.
    Portable,
    /// AVX2, FMA and F16C: vectors of eight lanes.
    Avx2,
    /// AVX-512 F, BW, DQ and VL: vectors of sixteen lanes.
    Avx512,
}

/// The environment variable that names the most that a process uses.
pub const INSTRUCTIONS_VARIABLE: &str = "VANWARD_INSTRUCTIONS";

/// The most that is used unasked. On AMD's Zen 4 attention with AVX-512 is up to 12 % faster over keys and values in the cache, and slower by as much
/// over those in memory with several query heads a KV head. On the one Intel Xeon that was measured it gains there, too (benches/results, 2026-11-30-cpu-avx512).
const UNASKED: Instructions = Instructions::Avx2;

static USED: OnceLock<Instructions> = OnceLock::new();

impl Instructions {
    const ALL: [(&'static str, Instructions); 3] =
        [("portable", Instructions::Portable), ("avx2", Instructions::Avx2), ("avx512", Instructions::Avx512)];

    /// What this process uses.
    #[inline]
    pub fn used() -> Instructions {
        *USED.get_or_init(|| UNASKED.min(Instructions::of_machine()))
    }

    /// The most that this machine has.
    pub fn of_machine() -> Instructions {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            let has_avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            return if has_avx512 { Instructions::Avx512 } else { Instructions::Avx2 };
        }
        Instructions::Portable
    }

    /// Keeps this process to the instructions that the environment names, `named`, and those below. The first session decides:
    /// bits must not change while a process runs.
    pub fn limit(named: Option<&str>) -> Result<()> {
        if let Some(most) = Instructions::parse(named)? {
            USED.get_or_init(|| most.min(Instructions::of_machine()));
        }
        Ok(())
    }

    fn parse(named: Option<&str>) -> Result<Option<Instructions>> {
        let Some(named) = named.filter(|name| !name.is_empty()) else { return Ok(None) };
        match Instructions::ALL.into_iter().find(|(name, _)| *name == named) {
            Some((_, most)) => Ok(Some(most)),
            None => Err(Error::argument(INSTRUCTIONS_VARIABLE, format!("{named:?}"), "portable, avx2 or avx512")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environment_names_the_most_instructions() {
        for (named, expected) in [
            (None, None),
            (Some(""), None),
            (Some("portable"), Some(Instructions::Portable)),
            (Some("avx2"), Some(Instructions::Avx2)),
            (Some("avx512"), Some(Instructions::Avx512)),
        ] {
            assert_eq!(Instructions::parse(named), Ok(expected), "{named:?}");
        }
        let text = Instructions::parse(Some("sse")).unwrap_err().to_string();
        assert_eq!(text, "VANWARD_INSTRUCTIONS: \"sse\"; expected portable, avx2 or avx512");
    }
}
