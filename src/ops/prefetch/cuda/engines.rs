//! Which engine VWD_GATHER_AUTO takes, as it was measured: `benches/gpu/gather.py` prints a device's rows (`auto`).

/// Of a device: where its copy engine, given all copies in one call of the driver, beats the kernels.
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

    /// So many copies of so many bytes.
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
        (1, 64, 6.8, 10.8),
        (1, 128, 11.9, 13.1),
        (1, 256, 18.9, 14.2),
        (1, 512, 26.3, 2.1),
        (4, 16, 7.5, 11.8),
        (4, 32, 12.9, 17.0),
        (4, 64, 20.6, 18.4),
        (4, 128, 29.0, 19.3),
        (4, 256, 36.9, 19.7),
        (4, 512, 42.1, 20.1),
        (8, 16, 12.9, 19.0),
        (8, 32, 20.4, 25.9),
        (8, 64, 29.2, 28.5),
        (8, 128, 36.7, 31.0),
        (8, 256, 42.4, 32.0),
        (8, 512, 45.7, 32.8),
        (16, 16, 20.7, 23.7),
        (16, 32, 29.2, 27.7),
        (16, 64, 36.9, 30.4),
        (16, 128, 42.3, 31.6),
        (16, 256, 45.7, 32.1),
        (16, 512, 48.4, 32.8),
        (32, 16, 29.4, 37.8),
        (32, 32, 36.8, 43.1),
        (32, 64, 42.8, 45.7),
        (32, 128, 46.3, 46.9),
        (32, 256, 48.7, 47.8),
        (32, 512, 50.1, 48.1),
        (64, 16, 37.6, 45.2),
        (64, 32, 43.1, 49.7),
        (64, 64, 46.7, 52.4),
        (64, 128, 49.0, 53.6),
        (64, 256, 50.2, 54.6),
        (64, 512, 50.8, 55.0),
        (128, 16, 43.5, 49.7),
        (128, 32, 46.9, 52.4),
        (128, 64, 49.0, 53.5),
        (128, 128, 50.2, 54.5),
        (128, 256, 50.8, 54.9),
        (128, 512, 51.0, 55.2),
        (256, 16, 47.1, 52.4),
        (256, 32, 49.1, 53.9),
        (256, 64, 50.3, 54.7),
        (256, 128, 50.9, 55.0),
        (256, 256, 51.1, 55.2),
        (256, 512, 51.2, 55.3),
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
