//! What copies blocks: the copy engine or one of two kernels.

use super::super::Engine;
use super::tuning;
use crate::runtime::cuda::variants::{Fit, variants};

variants! {
    /// Ways to copy blocks.
    pub enum Variant: "prefetch" {
        /// The device's copy engine, for lists in host memory.
        CopyEngine = "copy_engine",
        /// Bulk copies from host memory by four CTAs, on compute capability 9.0 and later.
        Bulk = "bulk",
        /// Plain loads, of blocks of every form.
        Vectors = "vectors",
    }
}

/// What the choice depends on.
#[derive(Clone, Copy)]
pub struct Gather {
    /// What the call asks for.
    pub engine: Engine,
    pub lists_on_host: bool,
    pub from_host: bool,
    /// The copy engine takes all copies of the call at once and was measured to be faster ([`super::engines`]).
    pub copy_engine_is_faster: bool,
    pub device_has_bulk: bool,
    /// Bytes of a run, whether a block is one run, and the widest unit that every address is a multiple of.
    pub run: u64,
    pub is_one_run: bool,
    pub unit: u64,
}

pub fn fit(variant: Variant, g: Gather) -> Fit {
    const KERNEL: &str = "the call asks for VWD_GATHER_KERNEL";
    const COPY_ENGINE: &str = "the call asks for VWD_GATHER_COPY_ENGINE";
    let by_kernel = Fit::Takes.unless(g.engine == Engine::Copy && g.lists_on_host, COPY_ENGINE);
    match variant {
        Variant::CopyEngine if g.engine == Engine::Auto && !g.copy_engine_is_faster => {
            Fit::Slower.unless(!g.lists_on_host, "the lists are in device memory")
        }
        Variant::CopyEngine => Fit::Takes
            .unless(g.engine == Engine::Kernel, KERNEL)
            .unless(!g.lists_on_host, "the lists are in device memory"),
        Variant::Bulk => by_kernel
            .unless(!g.from_host, "the source is in device memory")
            .unless(!g.is_one_run || g.unit < 16, "blocks are not contiguous multiples of 16 bytes")
            .unless(g.run < tuning::SMALLEST_BULK, "blocks are smaller than 1 KiB")
            .unless(!g.device_has_bulk, "the device has no bulk copies: compute capability 9.0 has them"),
        Variant::Vectors => by_kernel,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::variants::{self, VariantList, choose};

    const PAGES: Gather = Gather {
        engine: Engine::Auto,
        lists_on_host: true,
        from_host: true,
        copy_engine_is_faster: false,
        device_has_bulk: true,
        run: 16 << 10,
        is_one_run: true,
        unit: 16,
    };

    fn chosen(g: Gather) -> Variant {
        choose(None, |variant| fit(variant, g)).unwrap()
    }

    #[test]
    fn auto_takes_the_copy_engine_where_it_is_faster() {
        assert_eq!(chosen(PAGES), Variant::Bulk);
        let faster = Gather { copy_engine_is_faster: true, ..PAGES };
        assert_eq!(chosen(faster), Variant::CopyEngine);
        assert_eq!(chosen(Gather { engine: Engine::Kernel, ..faster }), Variant::Bulk);
        assert_eq!(chosen(Gather { engine: Engine::Copy, ..PAGES }), Variant::CopyEngine);
    }

    #[test]
    fn bulk_copies_take_contiguous_blocks_of_the_host() {
        for g in [
            Gather { from_host: false, ..PAGES },
            Gather { is_one_run: false, ..PAGES },
            Gather { unit: 8, ..PAGES },
            Gather { run: 1008, ..PAGES },
            Gather { device_has_bulk: false, ..PAGES },
        ] {
            assert_eq!(chosen(g), Variant::Vectors);
        }
        assert_eq!(chosen(Gather { run: 1024, lists_on_host: false, ..PAGES }), Variant::Bulk);
    }

    #[test]
    fn docs_name_the_variants() {
        variants::check_docs("prefetch", VariantList::of::<Variant>());
    }
}
