//! Families of kernels. A family of calls says what its kernels are compiled from and finds them once that is loaded; all
//! families are loaded when a session is created, so that no kernel loads inside a graph capture.

use super::Facts;
use super::arena::Allocating;
use super::context::Context;
use super::module::{Image, Kernel, Module};
use super::variants::VariantList;
use crate::core::quiet;
use crate::core::status::{Code, Error, Result};
use parking_lot::Mutex;
use std::any::{Any, TypeId};
use std::cell::Cell;

/// The kernels of one family of calls.
pub trait Kernels: Any + Send + Sync + Sized {
    const SOURCES: &'static [Source];
    /// What the family chooses among.
    const VARIANTS: &'static [VariantList] = &[];

    /// Finds them among the modules made of the sources. The context is current.
    fn find(modules: &Modules) -> Result<Self>;
}

/// `kernels/<name>.cu`, compiled for each target that it names, ascending.
pub struct Source {
    pub name: &'static str,
    pub images: &'static [(Target, Image)],
}

/// What PTX is compiled for, as the compiler calls it.
#[allow(non_camel_case_types)]
#[derive(Clone, Copy)]
pub enum Target {
    compute_80,
    compute_90,
    /// For 9.0 alone: later devices lack some of what it uses.
    compute_90a,
}

impl Target {
    fn runs_on(self, capability: u32) -> bool {
        match self {
            Target::compute_80 => capability >= 80,
            Target::compute_90 => capability >= 90,
            Target::compute_90a => capability == 90,
        }
    }

    /// Whether the machine code assembled of the PTX does. It is of the first device, and serves its major version.
    fn is_assembled_for(self, capability: u32) -> bool {
        match self {
            Target::compute_80 => capability / 10 == 8,
            Target::compute_90 | Target::compute_90a => capability / 10 == 9,
        }
    }
}

impl Source {
    /// The last that the device runs.
    fn image_for(&self, capability: u32) -> Option<Image> {
        let (target, image) = self.images.iter().rev().find(|(target, _)| target.runs_on(capability))?;
        Some(Image { code: image.code.filter(|_| target.is_assembled_for(capability)), ..*image })
    }
}

/// The [`Source`] of a file in `kernels/`: `source!("pack/pack", compute_80, compute_90)`.
macro_rules! source {
    ($name:literal, $($target:ident),+) => {
        $crate::runtime::cuda::Source {
            name: $name,
            images: &[$((
                $crate::runtime::cuda::Target::$target,
                $crate::runtime::cuda::Image {
                    ptx: include_bytes!(concat!(env!("OUT_DIR"), "/ptx/", $name, ".", stringify!($target), ".ptx.z")),
                    code: $crate::runtime::cuda::Image::machine_code(include_bytes!(
                        concat!(env!("OUT_DIR"), "/cubin/", $name, ".", stringify!($target), ".cubin.z")
                    )),
                },
            )),+],
        }
    };
}
pub(crate) use source;

/// A family, before its kernels are loaded.
#[derive(Clone, Copy)]
pub struct Family {
    sources: &'static [Source],
    variants: &'static [VariantList],
    kernels: fn() -> TypeId,
    find: fn(&Modules) -> Result<Box<dyn Any + Send + Sync>>,
}

impl Family {
    pub const fn of<K: Kernels>() -> Family {
        Family {
            sources: K::SOURCES,
            variants: K::VARIANTS,
            kernels: TypeId::of::<K>,
            find: |modules| Ok(Box::new(K::find(modules)?)),
        }
    }

    pub fn variants(&self) -> &'static [VariantList] {
        self.variants
    }
}

/// What was loaded of one family's sources.
pub struct Modules<'m> {
    modules: &'m [Module],
    facts: &'m Facts,
    found: &'m Cell<u32>,
}

impl Modules<'_> {
    pub fn facts(&self) -> &Facts {
        self.facts
    }

    /// A source without a target that the device runs is not there.
    pub fn has(&self, source: &str) -> bool {
        self.modules.iter().any(|module| module.name() == source)
    }

    pub fn kernel(&self, source: &str, name: &'static str) -> Result<Kernel> {
        let Some(module) = self.modules.iter().find(|module| module.name() == source) else {
            let text = format!("kernel {name}: no PTX of {source} for compute capability {}", self.facts.capability);
            return Err(Error::new(Code::Internal, text));
        };
        self.found.update(|n| n + 1);
        module.kernel(name)
    }
}

/// The kernels of every family, loaded.
pub struct Loaded {
    /// Few: a call finds its own by looking at each.
    families: Vec<(TypeId, Box<dyn Any + Send + Sync>)>,
    modules: Vec<Module>,
    variants: Vec<VariantList>,
    count: u32,
}

impl Loaded {
    /// The context is current.
    pub fn load(families: &[Family], context: &Context, facts: &Facts) -> Result<Loaded> {
        let for_device = |family: &Family| {
            let sources = family.sources.iter();
            sources.filter_map(|source| Some((source.name, source.image_for(facts.capability)?))).collect::<Vec<_>>()
        };
        let per_family: Vec<_> = families.iter().map(for_device).collect();
        let modules = load_modules(&per_family.concat(), context)?;
        let variants = families.iter().flat_map(Family::variants).copied().collect();
        let found = Cell::new(0);
        let mut rest = &modules[..];
        let families = families.iter().zip(&per_family).map(|(family, sources)| {
            let modules = rest.split_off(..sources.len()).expect("a module for each source");
            Ok(((family.kernels)(), (family.find)(&Modules { modules, facts, found: &found })?))
        });
        let families = families.collect::<Result<_>>()?;
        Ok(Loaded { families, modules, variants, count: found.get() })
    }

    /// The kernels of one family.
    pub fn of<K: Kernels>(&self) -> &K {
        let family = self.families.iter().find(|(kernels, _)| *kernels == TypeId::of::<K>());
        family.and_then(|(_, kernels)| kernels.downcast_ref()).expect("the session was created with this family")
    }

    pub fn count(&self) -> u32 {
        self.count
    }

    pub fn modules(&self) -> &[Module] {
        &self.modules
    }

    /// What the families choose among.
    pub fn variants(&self) -> &[VariantList] {
        &self.variants
    }

    /// Unloads everything. The context is current.
    pub fn release(&mut self) {
        self.families.clear();
        self.modules.clear();
    }
}

/// Where the driver has to compile PTX and has not kept the result of an earlier time, a file takes up to seconds: several
/// threads ask it at once.
fn load_modules(sources: &[(&'static str, Image)], context: &Context) -> Result<Vec<Module>> {
    let mut slots: Vec<Option<Result<Module>>> = sources.iter().map(|_| None).collect();
    let queue = Mutex::new(sources.iter().zip(&mut slots));
    let work = || {
        loop {
            let Some(((name, image), slot)) = queue.lock().next() else { break };
            *slot = Some(context.enter().and_then(|_entered| {
                let _allocating = Allocating::enter()?;
                Module::load(name, image)
            }));
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(sources.len());
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // A thread that cannot be started is not needed: this one loads what the others do not.
            let _ = std::thread::Builder::new().spawn_scoped(scope, || {
                quiet::enter();
                work();
            });
        }
        work();
    });
    slots.into_iter().map(|slot| slot.expect("the queue is empty")).collect()
}
