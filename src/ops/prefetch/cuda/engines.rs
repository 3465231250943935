//! Which engine VWD_GATHER_AUTO takes, as it was measured: `benches/gpu/gather.py` prints a device's rows (`auto`).

/// Where a device's copy engine, given all copies in one call of the driver, beats the kernels.
pub struct Engines {
    device: &'static str,
    /// Most copies, for up to so many bytes each, in ascending order; of larger ones any number.
    most: &'static [(u64, u64)],
}

/// The first stands for devices that nobody measured.
static MEASURED: [Engines; 1] =
    [Engines { device: "NVIDIA H200", most: &[(1 << 10, 128), (8 << 10, 32), (16 << 10, 16), (32 << 10, 128)] }];

impl Engines {
    pub fn of(device: &str) -> &'static Engines {
        MEASURED.iter().find(|measured| measured.device == device).unwrap_or(&MEASURED[0])
    }

    /// Whether the copy engine is to take so many copies of so many bytes.
    pub fn take_copies(&self, bytes: u64, copies: u64) -> bool {
        self.most.iter().find(|(up_to, _)| bytes <= *up_to).is_none_or(|&(_, most)| copies <= most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// KiB of a block, blocks, GB/s of the kernel and of the copy engine: benches/results/2026-11-22-h200-gather.md.
    const H200: [(u64, u64, f64, f64); 48] = [
        (1, 16, 2.0, 3.6),
        (1, 32, 3.7, 6.5),
        (1, 64, 6.7, 10.9),
        (1, 128, 11.7, 13.7),
        (1, 256, 18.3, 14.8),
        (1, 512, 26.0, 0.6),
        (4, 16, 7.5, 12.0),
        (4, 32, 13.0, 18.0),
        (4, 64, 20.7, 19.2),
        (4, 128, 29.3, 20.4),
        (4, 256, 36.7, 20.9),
        (4, 512, 42.3, 21.3),
        (8, 16, 12.8, 19.6),
        (8, 32, 20.6, 26.5),
        (8, 64, 29.2, 29.5),
        (8, 128, 36.7, 32.4),
        (8, 256, 42.1, 33.6),
        (8, 512, 45.7, 34.3),
        (16, 16, 20.5, 24.7),
        (16, 32, 29.1, 28.9),
        (16, 64, 36.7, 31.5),
        (16, 128, 42.4, 33.2),
        (16, 256, 45.7, 34.1),
        (16, 512, 48.3, 34.4),
        (32, 16, 29.2, 37.8),
        (32, 32, 37.2, 44.6),
        (32, 64, 42.8, 46.9),
        (32, 128, 46.2, 48.5),
        (32, 256, 48.7, 49.3),
        (32, 512, 50.0, 49.6),
        (64, 16, 37.0, 45.2),
        (64, 32, 43.2, 49.7),
        (64, 64, 46.7, 52.5),
        (64, 128, 48.9, 53.8),
        (64, 256, 50.1, 54.6),
        (64, 512, 50.7, 54.6),
        (128, 16, 43.1, 49.8),
        (128, 32, 46.8, 52.4),
        (128, 64, 49.0, 53.9),
        (128, 128, 50.1, 54.5),
        (128, 256, 50.8, 55.0),
        (128, 512, 51.1, 55.2),
        (256, 16, 46.9, 52.0),
        (256, 32, 49.1, 53.9),
        (256, 64, 50.2, 54.4),
        (256, 128, 50.8, 55.0),
        (256, 256, 51.1, 55.1),
        (256, 512, 51.3, 55.3),
    ];

    #[test]
    fn auto_takes_the_faster_engine_wherever_both_were_measured() {
        for (kib, count, kernel, copy) in H200 {
            let taken = if Engines::of("NVIDIA H200").take_copies(kib << 10, count) { copy } else { kernel };
            assert!(
                taken > 0.98 * kernel.max(copy),
                "{count} blocks of {kib} KiB: {taken} of {kernel} and {copy} GB/s"
            );
        }
    }

    #[test]
    fn tables_ascend() {
        for measured in &MEASURED {
            assert!(measured.most.is_sorted_by(|(one, _), (next, _)| one < next), "{}", measured.device);
        }
    }

    #[test]
    fn a_device_that_nobody_measured_takes_what_the_first_does() {
        assert!(std::ptr::eq(Engines::of("NVIDIA GeForce RTX 4090"), &MEASURED[0]));
    }
}
