//! The device's memory, modules and streams, and what is to be done on them.

use crate::decode;
use crate::instruction::Kernel;
use crate::machine::{self, Choices, Launch};
use crate::memory::{Fault, Pieces};
use crate::parse;
use crate::races::{Current, Global};
use crate::streams::Works;
use parking_lot::Mutex;
use std::alloc::Layout;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

/// Variables of a module, and where they lie.
pub type Globals = Vec<(String, u64)>;

/// Each byte of memory that nobody wrote: NaN as floats, −1 as indices.
pub const GARBAGE: u8 = 0xff;

/// The number in `VANWARD_EMULATOR_<NAME>`.
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
    /// Races are looked for.
    pub finds_races: bool,
    /// Reports races in global memory and goes on.
    pub passes_races: bool,
    /// Says on stderr what each launch took.
    pub traces: bool,
    /// The file to which the kernels that were launched are appended.
    pub launched: Option<PathBuf>,
}

#[derive(Default)]
pub struct Device {
    /// Pieces by their beginning: bytes, and how they were allocated; the caller's own memory was not, and is registered.
    pieces: BTreeMap<u64, (u64, Option<Layout>)>,
    /// Bytes of those that are the host's.
    pinned: usize,
    /// Modules that were loaded, by their text.
    modules: HashMap<Arc<str>, Arc<Module>>,
    launches: u64,
    /// Kernels that were launched, by name and target, as far as that is recorded.
    launched: HashSet<String>,
    /// The order of works, and the accesses that they made, where races are looked for.
    pub works: Works,
    global: RefCell<Global>,
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

/// The most that a launch may ask for.
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
    /// It may begin before the launch in front of it has ended.
    pub depends: bool,
    pub parameters: Vec<u64>,
}

#[derive(Clone)]
pub enum Work {
    Kernel(KernelLaunch),
    Fill { to: u64, byte: u8, bytes: usize },
    Copy { to: u64, from: u64, bytes: usize },
}

impl Work {
    fn name(&self) -> &str {
        match self {
            Work::Kernel(launch) => &launch.function.name,
            Work::Fill { .. } => "a fill",
            Work::Copy { .. } => "a copy",
        }
    }
    fn depends(&self) -> bool {
        matches!(self, Work::Kernel(launch) if launch.depends)
    }
}

/// A work of a graph, and the others that it comes after.
#[derive(Clone)]
pub struct Node {
    pub work: Work,
    pub before: Vec<usize>,
}

pub static DEVICE: Mutex<Option<Device>> = Mutex::new(None);

pub fn settings() -> &'static Settings {
    static SETTINGS: std::sync::OnceLock<Settings> = std::sync::OnceLock::new();
    SETTINGS.get_or_init(|| Settings {
        capability: setting("CAPABILITY", 90),
        multiprocessors: setting("MULTIPROCESSORS", 132),
        seed: setting("SEED", 0),
        finds_races: setting("RACES", 0) != 0,
        passes_races: setting("RACES", 0) == 2,
        traces: setting("TRACE", 0) != 0,
        launched: std::env::var_os("VANWARD_EMULATOR_LAUNCHED").map(PathBuf::from),
    })
}

pub fn with<T>(work: impl FnOnce(&mut Device) -> T) -> T {
    work(DEVICE.lock().get_or_insert_default())
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
        self.pieces.insert(start as u64, (bytes as u64, Some(layout)));
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
        let Some(&(bytes, Some(layout))) = self.pieces.get(&address) else { return false };
        self.pieces.remove(&address);
        // SAFETY: allocated above with this layout.
        unsafe { std::alloc::dealloc(address as *mut u8, layout) };
        self.global.get_mut().forget(address, bytes);
        true
    }

    /// Lets kernels touch the caller's memory. Fails where it overlaps other pieces.
    pub fn register(&mut self, address: u64, bytes: u64) -> bool {
        let end = address + bytes;
        let is_free = self.pieces.range(..end).next_back().is_none_or(|(&begin, &(size, _))| begin + size <= address);
        if is_free {
            self.pieces.insert(address, (bytes, None));
            self.pinned += bytes as usize;
        }
        is_free
    }

    pub fn unregister(&mut self, address: u64) -> bool {
        let Some(&(bytes, None)) = self.pieces.get(&address) else { return false };
        self.pieces.remove(&address);
        self.pinned -= bytes as usize;
        self.global.get_mut().forget(address, bytes);
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

    /// Does a work of a stream.
    pub fn perform(&mut self, work: &Work, stream: usize) -> Result<(), Fault> {
        if !settings().finds_races {
            return self.execute(work, None);
        }
        let number = self.works.enqueue(stream, work.name(), work.depends());
        self.execute(work, Some(number))?;
        self.works.ends(stream, number, matches!(work, Work::Kernel(_)));
        Ok(())
    }

    /// Does a graph's works in the order in which they were added.
    pub fn perform_graph(&mut self, nodes: &[Node], stream: usize) -> Result<(), Fault> {
        let mut numbers: Vec<u32> = vec![];
        for Node { work, before } in nodes {
            let number = settings().finds_races.then(|| {
                let before: Vec<u32> = before.iter().map(|&n| numbers[n]).collect();
                self.works.enqueue_node(stream, work.name(), &before, work.depends())
            });
            numbers.extend(number);
            self.execute(work, number)?;
        }
        if settings().finds_races {
            self.works.ends_graph(stream, &numbers);
        }
        Ok(())
    }

    fn execute(&mut self, work: &Work, number: Option<u32>) -> Result<(), Fault> {
        if let Some(fault) = &self.fault {
            return Err(fault.clone());
        }
        let done = self.touch(work, number).and_then(|()| match work {
            Work::Kernel(launch) => self.launch(launch, number),
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
        });
        if let Err(fault) = &done {
            eprintln!("emulated device: {fault}");
            self.fault = Some(fault.clone());
        }
        done
    }

    /// A fill's or a copy's part in races.
    fn touch(&self, work: &Work, number: Option<u32>) -> Result<(), Fault> {
        let Some(number) = number else { return Ok(()) };
        let current = Current { work: number, interval: self.works.interval(number).clone(), works: &self.works };
        let (written, read) = match work {
            Work::Kernel(_) => return Ok(()),
            Work::Fill { to, bytes, .. } => ((*to, *bytes), (*to, 0)),
            Work::Copy { to, from, bytes } => ((*to, *bytes), (*from, *bytes)),
        };
        for ((begin, bytes), is_read) in [(read, true), (written, false)] {
            if bytes > 0 && self.covers(begin, bytes) {
                self.global.borrow_mut().touch_range(begin, bytes as u64, is_read, &current)?;
            }
        }
        Ok(())
    }

    /// Appends the kernel's name and target to the file of launched kernels, at its first launch.
    fn record(&mut self, function: &Function) {
        let Some(path) = &settings().launched else { return };
        let line = format!("{} {}\n", function.name, function.module.target());
        if self.launched.insert(line.clone()) {
            let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
            if let Err(error) = file.and_then(|mut file| file.write_all(line.as_bytes())) {
                eprintln!("emulated device: {}: {error}", path.display());
            }
        }
    }

    fn launch(&mut self, launch: &KernelLaunch, number: Option<u32>) -> Result<(), Fault> {
        let function = &launch.function;
        let named = |fault: Fault| format!("{}: {fault}", function.name);
        let kernel = self.kernel(function).map_err(named)?;
        self.record(function);
        let pieces = Pieces(self.pieces.iter().map(|(&begin, &(bytes, _))| (begin, begin + bytes)).collect());
        self.launches += 1;
        let seed = settings().seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(self.launches);
        // SAFETY: eight bytes each.
        let parameters =
            unsafe { std::slice::from_raw_parts(launch.parameters.as_ptr().cast::<u8>(), launch.parameters.len() * 8) };
        self.global.get_mut().goes_on = settings().passes_races;
        let current =
            number.map(|work| Current { work, interval: self.works.interval(work).clone(), works: &self.works });
        let of_machine = Launch {
            kernel: &kernel,
            ctas: launch.ctas,
            threads: launch.threads,
            cluster: launch.cluster,
            shared: launch.shared as u64,
            parameters,
            pieces: &pieces,
            finds_races: settings().finds_races,
            global: current.as_ref().map(|current| (&self.global, current)),
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
    /// The target that the module was compiled for: `sm_90`.
    fn target(&self) -> &str {
        let after = self.text.split_once(".target").map_or("", |(_, after)| after.trim_start());
        after.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap_or_default()
    }

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
