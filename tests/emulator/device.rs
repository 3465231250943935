//! The device's memory, modules and streams, and what is to be done on them.

use crate::decode;
use crate::instruction::Kernel;
use crate::machine::{self, Choices, Launch};
use crate::memory::{Fault, Pieces};
use crate::parse;
use parking_lot::Mutex;
use std::alloc::Layout;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Variables of a module, and where they lie.
pub type Globals = Vec<(String, u64)>;

/// What memory holds before it is written: as numbers NaN, as indices −1.
pub const GARBAGE: u8 = 0xff;

/// What `VANWARD_EMULATOR_<NAME>` says.
fn setting(name: &str, default: u64) -> u64 {
    std::env::var(format!("VANWARD_EMULATOR_{name}")).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// Bytes of the device's memory.
pub const MEMORY: usize = 8 << 30;

pub struct Settings {
    /// 90 for compute capability 9.0.
    pub capability: u64,
    pub multiprocessors: u64,
    pub seed: u64,
    /// Has races for shared memory looked for.
    pub finds_races: bool,
    /// Says on stderr what each launch took.
    pub traces: bool,
}

#[derive(Default)]
pub struct Device {
    /// Pieces by their beginning: bytes, and how they were allocated.
    pieces: BTreeMap<u64, (u64, Layout)>,
    /// Bytes of those that are the host's.
    pinned: usize,
    /// Modules that were loaded, by their text.
    modules: HashMap<Arc<str>, Arc<Module>>,
    launches: u64,
    /// Why nothing goes on any more.
    pub fault: Option<Fault>,
}

/// Parsed when a kernel of it is first launched.
pub struct Module {
    text: Arc<str>,
    parsed: Mutex<Option<Result<(parse::Module, Globals), Fault>>>,
    functions: Mutex<HashMap<String, Arc<Function>>>,
}

/// A kernel, decoded when it is first launched.
pub struct Function {
    pub module: Arc<Module>,
    pub name: String,
    kernel: Mutex<Option<Result<Arc<Kernel>, Fault>>>,
    pub limits: Mutex<Limits>,
}

/// What launches may ask for.
#[derive(Clone, Copy)]
pub struct Limits {
    pub shared: u32,
    pub cluster: u32,
}

#[derive(Clone)]
pub struct KernelLaunch {
    pub function: Arc<Function>,
    pub ctas: u32,
    pub threads: u32,
    pub cluster: u32,
    pub shared: u32,
    pub parameters: Vec<u64>,
}

#[derive(Clone)]
pub enum Work {
    Kernel(KernelLaunch),
    Fill { to: u64, byte: u8, bytes: usize },
    Copy { to: u64, from: u64, bytes: usize },
}

pub static DEVICE: Mutex<Option<Device>> = Mutex::new(None);

pub fn settings() -> &'static Settings {
    static SETTINGS: std::sync::OnceLock<Settings> = std::sync::OnceLock::new();
    SETTINGS.get_or_init(|| Settings {
        capability: setting("CAPABILITY", 90),
        multiprocessors: setting("MULTIPROCESSORS", 132),
        seed: setting("SEED", 0),
        finds_races: setting("RACES", 0) != 0,
        traces: setting("TRACE", 0) != 0,
    })
}

impl Device {
    pub fn free_bytes(&self) -> usize {
        (MEMORY + self.pinned).saturating_sub(self.pieces.values().map(|piece| piece.0 as usize).sum())
    }

    pub fn alloc(&mut self, bytes: usize) -> Option<u64> {
        if bytes > self.free_bytes() {
            return None;
        }
        let layout = Layout::from_size_align(bytes.max(1), 512).ok()?;
        // SAFETY: the layout is not empty.
        let start = unsafe { std::alloc::alloc(layout) };
        if start.is_null() {
            return None;
        }
        // SAFETY: just allocated.
        unsafe { start.write_bytes(GARBAGE, bytes) };
        self.pieces.insert(start as u64, (bytes as u64, layout));
        Some(start as u64)
    }

    pub fn alloc_pinned(&mut self, bytes: usize) -> Option<u64> {
        let address = self.alloc(bytes)?;
        self.pinned += bytes;
        Some(address)
    }

    pub fn free_pinned(&mut self, address: u64) -> bool {
        self.pinned -= self.pieces.get(&address).map_or(0, |piece| piece.0 as usize);
        self.free(address)
    }

    pub fn free(&mut self, address: u64) -> bool {
        let Some((_, layout)) = self.pieces.remove(&address) else { return false };
        // SAFETY: allocated above with this layout.
        unsafe { std::alloc::dealloc(address as *mut u8, layout) };
        true
    }

    pub fn module(&mut self, text: &str) -> Arc<Module> {
        if let Some(module) = self.modules.get(text) {
            return module.clone();
        }
        let text: Arc<str> = text.into();
        let module = Arc::new(Module { text: text.clone(), parsed: Mutex::default(), functions: Mutex::default() });
        self.modules.insert(text, module.clone());
        module
    }

    pub fn kernel(&mut self, function: &Function) -> Result<Arc<Kernel>, Fault> {
        let mut kernel = function.kernel.lock();
        if kernel.is_none() {
            let mut parsed = function.module.parsed.lock();
            let parsed = parsed.get_or_insert_with(|| {
                let module = parse::module(&function.module.text)?;
                let globals = self.globals(&module)?;
                Ok((module, globals))
            });
            *kernel = Some(match parsed {
                Ok((module, globals)) => decode::kernel(module, globals, &function.name).map(Arc::new),
                Err(fault) => Err(fault.clone()),
            });
        }
        kernel.clone().expect("set above")
    }

    fn globals(&mut self, module: &parse::Module) -> Result<Globals, Fault> {
        let globals = module.variables.iter().filter(|variable| variable.space == ".global" && variable.bytes > 0);
        let place = |variable: &parse::Variable| {
            let address = self.alloc(variable.bytes as usize).ok_or("no memory for a variable")?;
            let value = variable.value.as_deref().unwrap_or("0");
            let bits = match value.strip_prefix("0f") {
                Some(bits) => i64::from_str_radix(bits, 16).ok(),
                None => value.parse::<i64>().ok(),
            };
            let bytes = bits.ok_or_else(|| format!("what is {value}?"))?.to_ne_bytes();
            let count = (variable.bytes as usize).min(8);
            // SAFETY: so many bytes were allocated.
            unsafe {
                (address as *mut u8).write_bytes(0, variable.bytes as usize);
                (address as *mut u8).copy_from_nonoverlapping(bytes.as_ptr(), count);
            }
            Ok((variable.name.clone(), address))
        };
        globals.map(place).collect()
    }

    fn covers(&self, address: u64, bytes: usize) -> bool {
        let piece = self.pieces.range(..=address).next_back();
        piece.is_some_and(|(&begin, &(size, _))| address + bytes as u64 <= begin + size)
    }

    pub fn perform(&mut self, work: &Work) -> Result<(), Fault> {
        if let Some(fault) = &self.fault {
            return Err(fault.clone());
        }
        let done = match work {
            Work::Kernel(launch) => self.launch(launch),
            Work::Fill { to, byte, bytes } if self.covers(*to, *bytes) => {
                // SAFETY: so many bytes are the device's.
                unsafe { (*to as *mut u8).write_bytes(*byte, *bytes) };
                Ok(())
            }
            Work::Fill { to, bytes, .. } => Err(format!("{bytes} bytes at {to:#x} are filled, and not the device's")),
            Work::Copy { to, from, bytes } if self.covers(*to, *bytes) || self.covers(*from, *bytes) => {
                // SAFETY: one side is the device's, and the caller vouches for the other.
                unsafe { (*to as *mut u8).copy_from_nonoverlapping(*from as *const u8, *bytes) };
                Ok(())
            }
            Work::Copy { to, from, bytes } => {
                Err(format!("{bytes} bytes from {from:#x} to {to:#x} are not the device's"))
            }
        };
        if let Err(fault) = &done {
            eprintln!("emulated device: {fault}");
            self.fault = Some(fault.clone());
        }
        done
    }

    fn launch(&mut self, launch: &KernelLaunch) -> Result<(), Fault> {
        let function = &launch.function;
        let named = |fault: Fault| format!("{}: {fault}", function.name);
        let kernel = self.kernel(function).map_err(named)?;
        let pieces = Pieces(self.pieces.iter().map(|(&begin, &(bytes, _))| (begin, begin + bytes)).collect());
        self.launches += 1;
        let seed = settings().seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(self.launches);
        // SAFETY: eight bytes each.
        let parameters =
            unsafe { std::slice::from_raw_parts(launch.parameters.as_ptr().cast::<u8>(), launch.parameters.len() * 8) };
        let of_machine = Launch {
            kernel: &kernel,
            ctas: launch.ctas,
            threads: launch.threads,
            cluster: launch.cluster,
            shared: launch.shared as u64,
            parameters,
            pieces: &pieces,
            finds_races: settings().finds_races,
            choices: Choices::new(if settings().seed == 0 { 0 } else { seed }),
        };
        let started = std::time::Instant::now();
        let executed = machine::run(&of_machine).map_err(named)?;
        if settings().traces {
            let (name, ctas, cluster) = (&function.name, launch.ctas, launch.cluster);
            eprintln!(
                "{name}: {ctas} CTAs of {} in clusters of {cluster}: {executed} in {:?}",
                launch.threads,
                started.elapsed()
            );
        }
        Ok(())
    }
}

impl Module {
    /// The kernel of that name, if there is one.
    pub fn function(self: &Arc<Module>, name: &str) -> Option<Arc<Function>> {
        if !self.text.contains(&format!(".entry {name}(")) {
            return None;
        }
        let mut functions = self.functions.lock();
        let function = functions.entry(name.to_owned()).or_insert_with(|| {
            let limits = Mutex::new(Limits { shared: 48 << 10, cluster: 8 });
            Arc::new(Function { module: self.clone(), name: name.to_owned(), kernel: Mutex::default(), limits })
        });
        Some(function.clone())
    }
}
