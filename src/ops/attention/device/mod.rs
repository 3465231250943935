//! What attention and repair have in common on CUDA: the kernels of kernels/attention/ and their launch.

mod latent;
mod latent_many;
mod params;
mod plain;
mod plan;

pub use params::{MAX_INPUTS, MergeParams, Params, RepairParams, StateView};
pub use plan::{
    FACTS_BYTES, Job, Pairs, Plan, THREADS, TILE, WARP_ROWS, WARPS, fastest, is_copied_by_16, lists, pairs, plan,
    results,
};

use super::Outputs;
use crate::core::status::Result;
use crate::runtime::cuda::layout::Divisor;
use crate::runtime::cuda::views::element_code;
use crate::runtime::cuda::{self, Enqueue, Facts, Grid, Kernel, Kind, LARGEST_CLUSTER, Modules, Source, source};
use latent::Clusters;
use plain::Rows;
use plan::{Element, Engine, STATIC_SHARED, Width};

/// Of repair in one launch.
const CLUSTER_SIZES: [u32; 4] = [1, 2, 4, LARGEST_CLUSTER];

pub struct Kernels {
    /// By width.
    f16: [Kernel; 3],
    bf16: [Kernel; 3],
    fp8: [Kernel; 3],
    plain: Option<Plain>,
    /// Where clusters can run.
    latent: Option<Latent>,
    latent_many: Option<LatentMany>,
    general: Kernel,
    cut: Kernel,
    pub repair: Kernel,
    /// In one launch, by element; then the same of the common case.
    repair_at_once: Vec<Kernel>,
    repair_plain: Vec<Kernel>,
    /// CTAs of the clusters that those can form, ascending; none where they do not run.
    pub cluster_sizes: Vec<u32>,
    /// Of 1, 2, 3 … CTAs: clusters of the common case that run at the same time.
    pub active_clusters: [u32; LARGEST_CLUSTER as usize],
    pub merge: Kernel,
}

/// Of the common case, by rows: up to 4, 8 and 16.
struct Plain {
    f16: [Kernel; 3],
    bf16: [Kernel; 3],
    fp8: [Kernel; 3],
}

struct Latent {
    /// Of float16 and bfloat16.
    kernels: [Kernel; 2],
    clusters: Clusters,
}

/// On compute capability 9.0.
struct LatentMany {
    /// Of float16 and bfloat16.
    kernels: [Kernel; 2],
    join: Kernel,
}

impl cuda::Kernels for Kernels {
    const SOURCES: &[Source] = &[
        source!("attention/mma_f16", compute_80, compute_90),
        source!("attention/mma_bf16", compute_80, compute_90),
        source!("attention/mma_fp8", compute_80, compute_90),
        source!("attention/decode128_f16", compute_90),
        source!("attention/decode128_bf16", compute_90),
        source!("attention/decode128_fp8", compute_90),
        source!("attention/mla16", compute_90),
        source!("attention/mla64", compute_90a),
        source!("attention/general", compute_80, compute_90),
        source!("attention/split", compute_80, compute_90),
        source!("attention/repair_two_launches", compute_80, compute_90),
        source!("attention/repair_one_launch", compute_90),
        source!("attention/repair_decode128", compute_90),
        source!("attention/merge", compute_80),
    ];

    fn find(modules: &Modules) -> Result<Kernels> {
        let facts = modules.facts();
        let of = |source, name| sharing(modules, source, name, most_shared(facts));
        let by_width = |source, [narrow, wide, widest]: [&'static str; 3]| {
            Ok([of(source, narrow)?, of(source, wide)?, of(source, widest)?])
        };
        let by_element = |source, names: [&'static str; 3]| -> Result<Vec<Kernel>> {
            let names = if modules.has(source) { &names[..] } else { &[] };
            names.iter().map(|name| of(source, name)).collect()
        };
        let repair_at_once = by_element(
            "attention/repair_one_launch",
            ["repair_one_launch_f16_128", "repair_one_launch_bf16_128", "repair_one_launch_fp8_128"],
        )?;
        let names = ["repair_decode128_f16", "repair_decode128_bf16", "repair_decode128_fp8"];
        let repair_plain = by_element("attention/repair_decode128", names)?;
        let active = |kernel: &Kernel, size| kernel.sharing(most_shared(facts)).active_clusters(size, THREADS);
        let forms = |kernel: &Kernel, size| active(kernel, size) > 0;
        let fewest = |size| repair_plain.iter().map(|kernel| active(kernel, size)).min().unwrap_or(0);
        let active_clusters = std::array::from_fn(|n| fewest(n as u32 + 1));
        let both = repair_at_once.iter().chain(&repair_plain);
        let can_form = |&size: &u32| size == 1 || both.clone().all(|kernel| forms(kernel, size));
        let sizes = if repair_at_once.is_empty() { &[] } else { &CLUSTER_SIZES[..] };
        let plain = if modules.has("attention/decode128_f16") { Some(Plain::find(modules)?) } else { None };
        let latent = if modules.has("attention/mla16") { Some(Latent::find(of)?) } else { None };
        let latent_many = if modules.has("attention/mla64") { Some(LatentMany::find(modules, of)?) } else { None };
        Ok(Kernels {
            plain,
            latent_many,
            latent: latent.filter(|latent| latent.clusters.exist()),
            cluster_sizes: sizes.iter().copied().filter(can_form).collect(),
            active_clusters,
            repair_at_once,
            repair_plain,
            f16: by_width(
                "attention/mma_f16",
                ["attention_mma_f16_128", "attention_mma_f16_256", "attention_mma_f16_576"],
            )?,
            bf16: by_width(
                "attention/mma_bf16",
                ["attention_mma_bf16_128", "attention_mma_bf16_256", "attention_mma_bf16_576"],
            )?,
            fp8: by_width(
                "attention/mma_fp8",
                ["attention_mma_fp8_128", "attention_mma_fp8_256", "attention_mma_fp8_576"],
            )?,
            general: of("attention/general", "attention_general")?,
            cut: modules.kernel("attention/split", "attention_split")?,
            repair: of("attention/repair_two_launches", "repair_find_missed")?,
            merge: modules.kernel("attention/merge", "merge_states")?,
        })
    }
}

/// A kernel that may have so many bytes of dynamic shared memory.
fn sharing(modules: &Modules, source: &str, name: &'static str, most: u32) -> Result<Kernel> {
    let kernel = modules.kernel(source, name)?;
    kernel.allow_shared(most)?;
    Ok(kernel)
}

impl Plain {
    fn find(modules: &Modules) -> Result<Plain> {
        let of = |source, name| sharing(modules, source, name, plain::most_shared(modules.facts()));
        let by_rows =
            |source, [few, more, most]: [&'static str; 3]| Ok([of(source, few)?, of(source, more)?, of(source, most)?]);
        let f16 = ["attention_decode128_f16_4", "attention_decode128_f16_8", "attention_decode128_f16_16"];
        let bf16 = ["attention_decode128_bf16_4", "attention_decode128_bf16_8", "attention_decode128_bf16_16"];
        let fp8 = ["attention_decode128_fp8_4", "attention_decode128_fp8_8", "attention_decode128_fp8_16"];
        Ok(Plain {
            f16: by_rows("attention/decode128_f16", f16)?,
            bf16: by_rows("attention/decode128_bf16", bf16)?,
            fp8: by_rows("attention/decode128_fp8", fp8)?,
        })
    }

    fn of(&self, element: Element, rows: Rows) -> &Kernel {
        let by_rows = match element {
            Element::F16 => &self.f16,
            Element::Bf16 => &self.bf16,
            Element::Fp8 => &self.fp8,
        };
        &by_rows[rows as usize]
    }
}

impl Latent {
    fn find(of: impl Fn(&'static str, &'static str) -> Result<Kernel>) -> Result<Latent> {
        let kernels = [of("attention/mla16", "attention_mla16_f16")?, of("attention/mla16", "attention_mla16_bf16")?];
        Ok(Latent { clusters: Clusters::of(&kernels[0]), kernels })
    }

    fn of(&self, element: Element) -> &Kernel {
        &self.kernels[(element == Element::Bf16) as usize]
    }
}

impl LatentMany {
    fn find(modules: &Modules, of: impl Fn(&'static str, &'static str) -> Result<Kernel>) -> Result<LatentMany> {
        let source = "attention/mla64";
        let kernels = [of(source, "attention_mla64_f16")?, of(source, "attention_mla64_bf16")?];
        Ok(LatentMany { kernels, join: modules.kernel(source, "join_mla64")? })
    }
}

/// Of a kernel's family that a plan names.
const PLANNED: &str = "only what runs is planned";

impl Kernels {
    fn has_plain(&self) -> bool {
        self.plain.is_some()
    }

    fn has_latent_many(&self) -> bool {
        self.latent_many.is_some()
    }

    fn clusters(&self) -> Option<&Clusters> {
        self.latent.as_ref().map(|latent| &latent.clusters)
    }

    /// Repair in one launch, where there is such a kernel.
    pub fn repair_of(&self, engine: Engine) -> Option<&Kernel> {
        match engine {
            Engine::Mma(element, Width::W128) => self.repair_at_once.get(element as usize),
            _ => None,
        }
    }

    /// The same of the common case, and bytes of an element.
    pub fn repair_plain_of(&self, engine: Engine) -> Option<(&Kernel, u32)> {
        match engine {
            Engine::Mma(element, Width::W128) => Some((self.repair_plain.get(element as usize)?, element.bytes())),
            _ => None,
        }
    }

    fn of(&self, engine: Engine) -> &Kernel {
        let (element, width) = match engine {
            Engine::General => return &self.general,
            Engine::Plain(element, rows) => return self.plain.as_ref().expect(PLANNED).of(element, rows),
            Engine::Latent(element) => return self.latent.as_ref().expect(PLANNED).of(element),
            Engine::LatentMany(element) => {
                return &self.latent_many.as_ref().expect(PLANNED).kernels[(element == Element::Bf16) as usize];
            }
            Engine::Mma(element, width) => (element, width),
        };
        let by_width = match element {
            Element::F16 => &self.f16,
            Element::Bf16 => &self.bf16,
            Element::Fp8 => &self.fp8,
        };
        match width {
            Width::W128 => &by_width[0],
            Width::W256 => &by_width[1],
            Width::W576 => &by_width[2],
        }
    }
}

/// Of kernels that wait themselves for the one before.
pub fn grid(enqueue: &Enqueue, ctas: u32) -> Grid {
    let kind = enqueue.dependent_kind();
    Grid { ctas, threads: THREADS, kind }
}

/// Launches a plan that has its scratch.
///
/// # Safety
/// The op's caller keeps the tensors of the plan valid until the stream has passed.
pub unsafe fn launch(enqueue: &Enqueue, plan: &Plan) -> Result<()> {
    let kernels: &Kernels = enqueue.kernels();
    let params = &raw const plan.params;
    // SAFETY: Params is the kernels' struct, the rest are of the kernels' types, and the plan's addresses are those of valid
    // tensors.
    unsafe {
        if plan.is_cut_apart {
            let (items, ctas) = (&raw const plan.params.cta_shares, &raw const plan.ctas);
            enqueue.launch(&kernels.cut, grid(enqueue, 1), [params.cast(), items.cast(), ctas.cast()])?;
        }
        let kernel = kernels.of(plan.engine).sharing(plan.shared);
        let grid = match plan.cluster {
            None => Grid { threads: plan.threads, ..grid(enqueue, plan.ctas) },
            Some(size) => Grid { ctas: plan.ctas, threads: plan.threads, kind: Kind::DependentClusters(size) },
        };
        enqueue.launch(&kernel, grid, [params.cast()])?;
        if let (1.., Some(many)) = (plan.joining, &kernels.latent_many) {
            let threads = latent_many::joining_threads(plan.params.ctas.value);
            let grid = Grid { threads, ..self::grid(enqueue, plan.joining) };
            enqueue.launch(&many.join, grid, [params.cast()])?;
        }
        Ok(())
    }
}

/// Of the others.
pub fn plain_grid(ctas: u32) -> Grid {
    Grid { ctas, threads: THREADS, kind: Kind::Plain }
}

/// Dynamic shared memory that a kernel can have.
pub fn most_shared(facts: &Facts) -> u32 {
    facts.shared_bytes - STATIC_SHARED
}

pub fn type_of_out(outputs: &Outputs) -> u32 {
    outputs.out.as_ref().map_or(0, |out| element_code(out.dtype))
}

/// Entries that share a kept state, for the kernels.
pub fn bundle(entries: usize) -> Divisor {
    Divisor::new(entries as u32)
}
