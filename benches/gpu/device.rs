//! What the GPU benchmarks share: memory, an empty kernel, and the two ways to time a call.

use cudarc::driver::sys::{self, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUresult, CUstream};
use std::ffi::{CStr, c_void};
use vanward::abi::*;

pub fn check(result: CUresult) {
    assert!(result == CUresult::CUDA_SUCCESS, "the driver refused: {result:?}");
}

pub fn check_status(status: vwd_status) {
    if status != 0 {
        let mut text = [0; 512];
        // SAFETY: the buffer has the length that is passed.
        let words = unsafe {
            vanward::capi::vwd_last_error(text.as_mut_ptr(), text.len());
            CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned()
        };
        panic!("status {status}: {words}");
    }
}

/// The primary context of device 0, current on this thread, a stream in it, and an empty kernel.
pub struct Device {
    pub stream: CUstream,
    empty: CUfunction,
    /// Compute capability 9.0 or later: the library launches kernels in clusters, and some before the one before has ended.
    is_hopper_or_later: bool,
    /// Larger than any L2 cache: writing it evicts everything else.
    flush: CUdeviceptr,
}

const FLUSH_BYTES: usize = 256 << 20;
const EMPTY_PTX: &CStr = c".version 8.1\n.target sm_80\n.address_size 64\n\
    .visible .entry empty(.param .align 8 .b8 params[256])\n{\n ret;\n}\n";

impl Device {
    /// `None` without a driver or device.
    pub fn open() -> Option<Device> {
        // SAFETY: the driver calls follow their contracts; the context stays until the process ends.
        unsafe {
            if !sys::is_culib_present() || sys::cuInit(0) != CUresult::CUDA_SUCCESS {
                return None;
            }
            let (mut device, mut context) = (0, std::ptr::null_mut());
            if sys::cuDeviceGet(&mut device, 0) != CUresult::CUDA_SUCCESS {
                return None;
            }
            check(sys::cuDevicePrimaryCtxRetain(&mut context, device));
            check(sys::cuCtxSetCurrent(context));
            let (mut stream, mut module, mut flush) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
            let mut empty = std::ptr::null_mut();
            check(sys::cuStreamCreate(&mut stream, sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32));
            check(sys::cuModuleLoadData(&mut module, EMPTY_PTX.as_ptr().cast()));
            check(sys::cuModuleGetFunction(&mut empty, module, c"empty".as_ptr()));
            check(sys::cuMemAlloc_v2(&mut flush, FLUSH_BYTES));
            let mut major = 0;
            let attribute = sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
            check(sys::cuDeviceGetAttribute(&mut major, attribute, device));
            Some(Device { stream, empty, is_hopper_or_later: major >= 9, flush })
        }
    }

    pub fn name(&self) -> String {
        let (mut text, mut driver) = ([0; 128], 0);
        // SAFETY: the buffer has the length that is passed; device 0 exists.
        unsafe {
            check(sys::cuDeviceGetName(text.as_mut_ptr(), text.len() as i32, 0));
            check(sys::cuDriverGetVersion(&mut driver));
            let name = CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned();
            format!("{name}, driver API {}.{}", driver / 1000, driver % 1000 / 10)
        }
    }

    pub fn alloc(&self, bytes: usize) -> Buffer {
        let mut address = 0;
        // SAFETY: the context is current.
        unsafe { check(sys::cuMemAlloc_v2(&mut address, bytes.max(256))) };
        Buffer { address }
    }

    pub fn upload<T: Copy>(&self, values: &[T]) -> Buffer {
        let buffer = self.alloc(size_of_val(values));
        // SAFETY: the buffer holds all the bytes.
        unsafe { check(sys::cuMemcpyHtoD_v2(buffer.address, values.as_ptr().cast(), size_of_val(values))) };
        buffer
    }

    /// A launch with nothing in it: the floor of every call.
    pub fn launch_empty(&self) {
        let params = [0u64; 32];
        let mut pointers = [params.as_ptr().cast_mut().cast::<c_void>()];
        let none = std::ptr::null_mut();
        // SAFETY: the kernel takes that many bytes of parameters.
        unsafe {
            check(sys::cuLaunchKernel(self.empty, 1, 1, 1, 32, 1, 1, 0, self.stream, pointers.as_mut_ptr(), none))
        };
    }

    /// A device-to-device copy by the driver.
    pub fn copy(&self, from: CUdeviceptr, to: CUdeviceptr, bytes: usize) {
        // SAFETY: the caller's buffers hold that many bytes.
        unsafe { check(sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.stream)) };
    }

    pub fn synchronize(&self) {
        // SAFETY: the stream lives.
        unsafe { check(sys::cuStreamSynchronize(self.stream)) };
    }

    fn evict_cache(&self) {
        // SAFETY: the flush buffer has this length.
        unsafe { check(sys::cuMemsetD8Async(self.flush, 1, FLUSH_BYTES, self.stream)) };
    }

    /// Microseconds of one call between two events, the host's own time in it, for several calls that take turns, in another
    /// order each time, so that each follows each and the machine's moods hit all alike: the median of nine rounds' medians.
    /// Every call has a data set of its own, which no cache holds: the cache is evicted before a round, and sets follow each
    /// other until all were used.
    pub fn event_times<const N: usize>(&self, sets: usize, calls: [&dyn Fn(usize); N]) -> [f64; N] {
        const WARM_UP: usize = 20;
        const ROUNDS: usize = 9;
        (0..WARM_UP).for_each(|i| calls.iter().for_each(|call| call(sets - 1 - i % sets)));
        let rounds = [(); ROUNDS].map(|()| self.event_round(sets, calls));
        std::array::from_fn(|c| median(rounds.iter().map(|round| round[c]).collect()))
    }

    fn event_round<const N: usize>(&self, sets: usize, calls: [&dyn Fn(usize); N]) -> [f64; N] {
        let turns = (sets / N).clamp(40, 300);
        let events: Vec<[[CUevent; 2]; N]> = (0..turns).map(|_| [(); N].map(|()| [new_event(), new_event()])).collect();
        let mut random = fastrand::Rng::with_seed(turns as u64);
        let mut order: [usize; N] = std::array::from_fn(|c| c);
        self.evict_cache();
        self.synchronize();
        for (i, turn) in events.iter().enumerate() {
            random.shuffle(&mut order);
            for (n, &c) in order.iter().enumerate() {
                let [begin, end] = turn[c];
                // SAFETY: events and stream live.
                unsafe { check(sys::cuEventRecord(begin, self.stream)) };
                calls[c]((i * N + n) % sets);
                // SAFETY: as above.
                unsafe { check(sys::cuEventRecord(end, self.stream)) };
            }
        }
        self.synchronize();
        let mut times = [(); N].map(|()| Vec::new());
        for turn in events {
            times.iter_mut().zip(turn).for_each(|(times, pair)| times.push(elapsed(pair)));
        }
        times.map(median)
    }

    /// Median microseconds of one call of several in a graph: GPU time. The cache is evicted before each replay.
    pub fn graph_time(&self, sets: usize, call: impl Fn(usize)) -> f64 {
        const REPLAYS: usize = 15;
        let calls = sets.clamp(1, 20);
        call(0);
        self.synchronize();
        let mut exec: CUgraphExec = std::ptr::null_mut();
        // SAFETY: the stream is idle and lives; the graph is used in this function.
        unsafe {
            let graph = self.capture(|| (0..calls).for_each(&call));
            check(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0));
            let mut times = Vec::new();
            for _ in 0..REPLAYS {
                let events = [new_event(), new_event()];
                self.evict_cache();
                check(sys::cuEventRecord(events[0], self.stream));
                check(sys::cuGraphLaunch(exec, self.stream));
                check(sys::cuEventRecord(events[1], self.stream));
                self.synchronize();
                times.push(elapsed(events) / calls as f64);
            }
            check(sys::cuGraphExecDestroy(exec));
            check(sys::cuGraphDestroy(graph));
            median(times)
        }
    }

    /// What a call launches, to be launched again without it. `begins_early`: its first kernel, too, may start while the one before it runs.
    pub fn launches(&self, call: &dyn Fn(), begins_early: bool) -> Launches<'_> {
        call();
        self.synchronize();
        // SAFETY: the stream is idle and lives; the graph lives as long as the launches, whose parameters it owns.
        unsafe {
            let graph = self.capture(call);
            let mut count = 0;
            check(sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &mut count));
            let mut nodes = vec![std::ptr::null_mut(); count];
            check(sys::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count));
            let kernels = nodes.into_iter().map(|node| {
                let (mut params, mut cluster) = (std::mem::zeroed(), std::mem::zeroed());
                check(sys::cuGraphKernelNodeGetParams_v2(node, &mut params));
                if self.is_hopper_or_later {
                    let attribute = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
                    check(sys::cuGraphKernelNodeGetAttribute(node, attribute, &mut cluster));
                }
                (params, cluster)
            });
            Launches { device: self, graph, kernels: kernels.collect(), begins_early }
        }
    }

    /// # Safety
    /// The stream is idle.
    unsafe fn capture(&self, calls: impl FnOnce()) -> CUgraph {
        let mut graph = std::ptr::null_mut();
        // SAFETY: forwarded to the caller.
        unsafe {
            let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            check(sys::cuStreamBeginCapture_v2(self.stream, mode));
            calls();
            check(sys::cuStreamEndCapture(self.stream, &mut graph));
        }
        graph
    }

    /// Median nanoseconds that the host spends in one call, from entry to return, for several calls that take turns. The
    /// queue never fills.
    pub fn host_times<const N: usize>(&self, calls: [&dyn Fn(); N]) -> [f64; N] {
        const ROUNDS: usize = 400;
        const CALLS: usize = 50;
        let mut times = [(); N].map(|()| Vec::new());
        for _ in 0..ROUNDS {
            for (call, times) in calls.iter().zip(&mut times) {
                self.synchronize();
                let begin = std::time::Instant::now();
                (0..CALLS).for_each(|_| call());
                times.push(begin.elapsed().as_nanos() as f64 / CALLS as f64);
            }
        }
        self.synchronize();
        times.map(median)
    }
}

/// The kernels of one call, with its parameters.
pub struct Launches<'d> {
    device: &'d Device,
    graph: CUgraph,
    kernels: Vec<(sys::CUDA_KERNEL_NODE_PARAMS, sys::CUlaunchAttributeValue)>,
    begins_early: bool,
}

impl Launches<'_> {
    pub fn count(&self) -> usize {
        self.kernels.len()
    }

    /// Launches them as the library does: through cuLaunchKernel, or with the attributes that the kernel needs.
    pub fn launch(&self) {
        use sys::CUlaunchAttributeID::{
            CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION as CLUSTER,
            CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION as EARLY,
        };
        for (n, (kernel, cluster)) in self.kernels.iter().enumerate() {
            let mut attributes = [sys::CUlaunchAttribute { id: CLUSTER, pad: [0; 4], value: *cluster }; 2];
            // SAFETY: the field is that of the attribute it was read for.
            let mut count = (unsafe { cluster.clusterDim.x } > 1) as usize;
            if self.device.is_hopper_or_later && (n > 0 || self.begins_early) {
                attributes[count].id = EARLY;
                attributes[count].value = sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 };
                count += 1;
            }
            // SAFETY: as the library launched it; the graph owns the parameters.
            check(unsafe { launch(kernel, &mut attributes[..count], self.device.stream) });
        }
    }
}

/// # Safety
/// The parameters are the kernel's.
unsafe fn launch(
    kernel: &sys::CUDA_KERNEL_NODE_PARAMS,
    attributes: &mut [sys::CUlaunchAttribute],
    stream: CUstream,
) -> CUresult {
    let (ctas, threads, shared, none) =
        (kernel.gridDimX, kernel.blockDimX, kernel.sharedMemBytes, std::ptr::null_mut());
    if attributes.is_empty() {
        // SAFETY: forwarded to the caller.
        return unsafe {
            sys::cuLaunchKernel(kernel.func, ctas, 1, 1, threads, 1, 1, shared, stream, kernel.kernelParams, none)
        };
    }
    let config = sys::CUlaunchConfig {
        gridDimX: ctas,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: shared,
        hStream: stream,
        attrs: attributes.as_mut_ptr(),
        numAttrs: attributes.len() as u32,
    };
    // SAFETY: forwarded to the caller.
    unsafe { sys::cuLaunchKernelEx(&config, kernel.func, kernel.kernelParams, none) }
}

impl Drop for Launches<'_> {
    fn drop(&mut self) {
        // SAFETY: captured once; the launches are over with.
        unsafe { check(sys::cuGraphDestroy(self.graph)) };
    }
}

fn new_event() -> CUevent {
    let mut event = std::ptr::null_mut();
    // SAFETY: the context is current.
    unsafe { check(sys::cuEventCreate(&mut event, 0)) };
    event
}

/// Microseconds between two events that have passed; destroys them.
fn elapsed([begin, end]: [CUevent; 2]) -> f64 {
    let mut milliseconds = 0.0;
    // SAFETY: both were recorded and have passed.
    unsafe {
        check(sys::cuEventElapsedTime(&mut milliseconds, begin, end));
        check(sys::cuEventDestroy_v2(begin));
        check(sys::cuEventDestroy_v2(end));
    }
    milliseconds as f64 * 1e3
}

pub fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Device memory, freed on drop.
pub struct Buffer {
    pub address: CUdeviceptr,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated by Device::alloc; the stream has passed its uses.
        unsafe { check(sys::cuMemFree_v2(self.address)) };
    }
}

/// A contiguous view of device memory. `code` is DLPack's.
pub fn tensor(address: CUdeviceptr, code: u8, bits: u8, shape: &[usize]) -> vwd_tensor {
    // SAFETY: plain data; all zero is valid.
    let mut t: vwd_tensor = unsafe { std::mem::zeroed() };
    t.data = address as *mut c_void;
    t.device_type = 2;
    (t.dtype_code, t.dtype_bits, t.lanes, t.ndim) = (code, bits, 1, shape.len() as i32);
    let mut stride = 1;
    for d in (0..shape.len()).rev() {
        (t.shape[d], t.strides[d]) = (shape[d] as i64, stride);
        stride *= shape[d] as i64;
    }
    t
}

/// Versioned arguments with only struct_size set.
pub fn args<T: vanward::abi::Versioned>() -> T {
    // SAFETY: a versioned struct accepts zeros and starts with its size.
    unsafe {
        let mut value: T = std::mem::zeroed();
        (&raw mut value).cast::<u32>().write(size_of::<T>() as u32);
        value
    }
}
