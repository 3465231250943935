//! Modules, loaded from machine code or PTX, and the kernels in them.

use super::driver::check;
use crate::core::status::{Code, Error, Result};
use cudarc::driver::sys::{
    self, CUfunction, CUgraph, CUgraphNode, CUjit_option_enum as Jit, CUmodule, CUresult, CUstream,
};
use std::ffi::{CString, c_void};
use std::time::{Duration, Instant};

/// What one source was compiled to, compressed by build.rs.
#[derive(Clone, Copy)]
pub struct Image {
    pub ptx: &'static [u8],
    /// What the pinned assembler made of the PTX, if the library carries it and it is for this device.
    pub code: Option<&'static [u8]>,
}

impl Image {
    /// build.rs writes an empty file for a source without machine code.
    pub const fn machine_code(file: &'static [u8]) -> Option<&'static [u8]> {
        if file.is_empty() { None } else { Some(file) }
    }
}

/// What a module was loaded from.
#[derive(Clone, Copy, PartialEq)]
pub enum Form {
    MachineCode,
    Ptx,
}

impl Form {
    pub fn name(self) -> &'static str {
        match self {
            Form::MachineCode => "machine code",
            Form::Ptx => "PTX",
        }
    }
}

/// One source's kernels in a context, unloaded on drop.
pub struct Module {
    name: &'static str,
    raw: CUmodule,
    pub form: Form,
    pub loaded_in: Duration,
    /// Why PTX was taken although there is machine code for the device.
    pub refused: Option<Error>,
}

// SAFETY: a module handle may be used from any thread; the driver locks.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Loads machine code where there is some that the driver takes, or else PTX, which every driver compiles
    /// (CUDA_FORCE_PTX_JIT=1 has it refuse machine code). The context is current.
    pub fn load(name: &'static str, image: &Image) -> Result<Module> {
        let inflate = |data| {
            let inflated = miniz_oxide::inflate::decompress_to_vec_zlib(data);
            inflated.map_err(|e| Error::new(Code::Internal, format!("kernel module {name} is damaged: {e}")))
        };
        let started = Instant::now();
        let made = |raw, form, refused| Module { name, raw, form, loaded_in: started.elapsed(), refused };
        let refused = match image.code {
            Some(code) => match Module::load_data(name, &inflate(code)?) {
                Ok(raw) => return Ok(made(raw, Form::MachineCode, None)),
                Err(error) => Some(error),
            },
            None => None,
        };
        let mut ptx = inflate(image.ptx)?;
        ptx.push(0);
        Ok(made(Module::load_data(name, &ptx)?, Form::Ptx, refused))
    }

    /// Loads a cubin, or PTX that ends in NUL.
    fn load_data(name: &'static str, image: &[u8]) -> Result<CUmodule> {
        const LOG_BYTES: usize = 8 << 10;
        let mut log = vec![0u8; LOG_BYTES];
        let mut options = [Jit::CU_JIT_ERROR_LOG_BUFFER, Jit::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), LOG_BYTES as *mut c_void];
        let mut raw = std::ptr::null_mut();
        // SAFETY: the image is a whole cubin, which says its own length, or PTX with its NUL; the log buffer outlives the call
        // and has the size that is passed.
        let result = unsafe {
            let count = options.len() as u32;
            sys::cuModuleLoadDataEx(&mut raw, image.as_ptr().cast(), count, options.as_mut_ptr(), values.as_mut_ptr())
        };
        if result == CUresult::CUDA_SUCCESS {
            return Ok(raw);
        }
        let log = String::from_utf8_lossy(log.split(|&b| b == 0).next().unwrap_or_default()).trim().to_owned();
        let error = check(result, "cuModuleLoadDataEx").unwrap_err();
        let text = format!("kernel module {name}: {}; JIT log: {log}", error.message);
        Err(Error::new(error.code, text))
    }

    /// Finds and loads one function. The context is current.
    pub fn kernel(&self, name: &'static str) -> Result<Kernel> {
        let symbol = CString::new(name).expect("kernel names hold no NUL");
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded; the symbol is NUL-terminated.
        let result = unsafe {
            check(sys::cuModuleGetFunction(&mut function, self.raw, symbol.as_ptr()), "cuModuleGetFunction")
                .and_then(|()| check(sys::cuFuncLoad(function), "cuFuncLoad"))
        };
        match result {
            Ok(()) => Ok(Kernel { name, function, shared: 0 }),
            Err(error) => {
                let text = format!("kernel {name} of module {}: {}", self.name, error.message);
                Err(Error::new(error.code, text))
            }
        }
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded once; the session makes the context current before it drops its modules.
        let _ = unsafe { sys::cuModuleUnload(self.raw) };
    }
}

/// A loaded `__global__` function.
#[derive(Clone, Copy)]
pub struct Kernel {
    name: &'static str,
    function: CUfunction,
    /// Bytes of shared memory that a launch adds to what the kernel declares.
    shared: u32,
}

// SAFETY: as for Module.
unsafe impl Send for Kernel {}
// SAFETY: as for Module.
unsafe impl Sync for Kernel {}

/// How a kernel is launched.
#[derive(Clone, Copy)]
pub struct Grid {
    pub ctas: u32,
    /// Threads of a CTA.
    pub threads: u32,
    pub kind: Kind,
}

#[derive(Clone, Copy)]
pub enum Kind {
    Plain,
    /// The kernel may start while the one before it on the stream still runs; it waits itself for what it needs. Needs
    /// compute capability 9.0.
    Dependent,
    /// So many CTAs form a cluster; the grid is a multiple of them. Needs compute capability 9.0.
    Clusters(u32),
    /// Both of these.
    DependentClusters(u32),
}

impl Kernel {
    /// The kernel whose launches add so many bytes of shared memory to what it declares.
    pub fn sharing(self, bytes: u32) -> Kernel {
        Kernel { shared: bytes, ..self }
    }

    /// Bytes of shared memory that the kernel declares. The context is current.
    pub fn declared_shared(&self) -> Result<u32> {
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        let mut bytes = 0;
        // SAFETY: the function is loaded.
        check(unsafe { sys::cuFuncGetAttribute(&mut bytes, attribute, self.function) }, self.name)?;
        Ok(bytes as u32)
    }

    /// Lets launches add up to `bytes` of shared memory. The context is current.
    pub fn allow_shared(&self, bytes: u32) -> Result<()> {
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded.
        check(unsafe { sys::cuFuncSetAttribute(self.function, attribute, bytes as i32) }, self.name)
    }

    /// Has multiprocessors that run the kernel give all that they can to shared memory: with just what its CTAs need, CTAs of a kernel
    /// that is to start while it runs would find no room. The context is current.
    pub fn prefer_shared(&self) -> Result<()> {
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: the function is loaded.
        check(unsafe { sys::cuFuncSetAttribute(self.function, attribute, 100) }, self.name)
    }

    /// Lets launches ask for clusters of more than [`super::LARGEST_CLUSTER`] CTAs. The context is current.
    pub fn allow_large_clusters(&self) -> Result<()> {
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
        // SAFETY: the function is loaded.
        check(unsafe { sys::cuFuncSetAttribute(self.function, attribute, 1) }, self.name)
    }

    /// Enqueues the kernel.
    ///
    /// # Safety
    /// `params` point to the kernel's parameters, each of its type; the addresses in them are the device's and valid until
    /// the stream has passed, and the context is current. All that a dependent kernel touches before it waits was ready when
    /// the one before began.
    pub unsafe fn launch<const N: usize>(
        &self,
        grid: Grid,
        stream: CUstream,
        mut params: [*const c_void; N],
    ) -> Result<()> {
        let (params, none) = (params.as_mut_ptr().cast::<*mut c_void>(), std::ptr::null_mut());
        let Grid { ctas, threads, kind } = grid;
        let dependent = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let (mut attributes, count) = match kind {
            Kind::Plain => {
                // SAFETY: the caller vouches for parameters and context; the driver copies the parameters during the call.
                let launched = unsafe {
                    sys::cuLaunchKernel(self.function, ctas, 1, 1, threads, 1, 1, self.shared, stream, params, none)
                };
                return check(launched, self.name);
            }
            Kind::Dependent => ([dependent; 2], 1),
            Kind::Clusters(size) => ([clusters_of(size); 2], 1),
            Kind::DependentClusters(size) => ([dependent, clusters_of(size)], 2),
        };
        let mut config = config(ctas, threads, stream, &mut attributes[..count]);
        config.sharedMemBytes = self.shared;
        // SAFETY: as above, configuration and attribute included.
        check(unsafe { sys::cuLaunchKernelEx(&config, self.function, params, none) }, self.name)
    }

    /// Adds the kernel to a graph, after some of its nodes, which end before it begins whatever the kind of launch.
    ///
    /// # Safety
    /// As for [`Kernel::launch`], whenever the graph is launched; the nodes are the graph's.
    pub unsafe fn add_node<const N: usize>(
        &self,
        graph: CUgraph,
        before: &[CUgraphNode],
        grid: Grid,
        mut params: [*const c_void; N],
    ) -> Result<CUgraphNode> {
        let node = sys::CUDA_KERNEL_NODE_PARAMS {
            func: self.function,
            gridDimX: grid.ctas,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared,
            kernelParams: params.as_mut_ptr().cast(),
            extra: std::ptr::null_mut(),
            kern: std::ptr::null_mut(),
            ctx: std::ptr::null_mut(),
        };
        let mut added = std::ptr::null_mut();
        // SAFETY: the caller vouches for graph and parameters, which the driver copies during the call.
        let result = unsafe { sys::cuGraphAddKernelNode_v2(&mut added, graph, before.as_ptr(), before.len(), &node) };
        check(result, self.name)?;
        if let Kind::Clusters(size) | Kind::DependentClusters(size) = grid.kind {
            let clusters = clusters_of(size);
            // SAFETY: the node was added just now; the driver reads the value during the call.
            check(unsafe { sys::cuGraphKernelNodeSetAttribute(added, clusters.id, &clusters.value) }, self.name)?;
        }
        Ok(added)
    }

    /// Clusters of so many CTAs that the device can run at once; 0 where it cannot run them, or not in this process's share of
    /// it. The context is current.
    pub fn active_clusters(&self, size: u32, threads: u32) -> u32 {
        let mut attribute = [clusters_of(size)];
        let mut config = config(size, threads, std::ptr::null_mut(), &mut attribute);
        config.sharedMemBytes = self.shared;
        let mut clusters = 0;
        // SAFETY: the function is loaded; the driver reads configuration and attribute during the call.
        let result = unsafe { sys::cuOccupancyMaxActiveClusters(&mut clusters, self.function, &config) };
        if result == CUresult::CUDA_SUCCESS { clusters as u32 } else { 0 }
    }

    /// The launch kind of a kernel of a few CTAs that runs at the same time as other kernels: clusters of two, where the device can form
    /// them, so that two CTAs lie on neighbouring multiprocessors. Each by itself would lie in another part of the device, and take a
    /// pair of multiprocessors from kernels whose CTAs come in pairs.
    /// The context is current.
    pub fn in_pairs(&self, threads: u32) -> Kind {
        if self.active_clusters(2, threads) > 0 { Kind::Clusters(2) } else { Kind::Plain }
    }
}

fn clusters_of(ctas: u32) -> sys::CUlaunchAttribute {
    let dimension = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: ctas, y: 1, z: 1 };
    sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { clusterDim: dimension },
    }
}

fn config(ctas: u32, threads: u32, stream: CUstream, attributes: &mut [sys::CUlaunchAttribute]) -> sys::CUlaunchConfig {
    sys::CUlaunchConfig {
        gridDimX: ctas,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        hStream: stream,
        attrs: attributes.as_mut_ptr(),
        numAttrs: attributes.len() as u32,
    }
}
