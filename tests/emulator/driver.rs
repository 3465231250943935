//! The driver's functions, as far as the library and its tests call them. Work is done when it is enqueued, so that streams are always
//! empty and events always over; a capture writes it down, and a graph does it in the order of writing.

use crate::captures;
use crate::cupti::tell;
use crate::device::{Function, Module, Node, Work, settings, with};
use crate::failures::fails;
use crate::launches::{SHARED_OF_CTA, cluster, depends, prepared};
use crate::memory::Fault;
use crate::streams::Works;
use crate::tensors::TensorMap;
use cudarc::driver::sys::*;
use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub type R = CUresult;
pub const OK: R = R::CUDA_SUCCESS;
/// The one context.
const CONTEXT: CUcontext = 0x1000 as CUcontext;

thread_local! {
    static CONTEXTS: std::cell::RefCell<Vec<CUcontext>> = const { std::cell::RefCell::new(vec![]) };
}

#[derive(Default)]
struct Stream {
    capture: Option<Capture>,
    is_non_blocking: bool,
}

struct Capture {
    id: u64,
    graph: *mut Graph,
    before: Vec<CUgraphNode>,
}

/// An event, and where a capture was when it recorded it.
#[derive(Default)]
struct Event {
    captured: Option<Capture>,
}

impl Capture {
    fn same(&self) -> Capture {
        Capture { id: self.id, graph: self.graph, before: self.before.clone() }
    }

    /// The graph's nodes up to where the capture is, by their numbers.
    unsafe fn passed(&self) -> BTreeSet<usize> {
        // SAFETY: the graph lives as long as the capture.
        let nodes = unsafe { &(*self.graph).nodes };
        let number = |node: &CUgraphNode| nodes.iter().position(|one| handle(one) == *node);
        let mut wanted: Vec<usize> = self.before.iter().filter_map(number).collect();
        let mut passed = BTreeSet::new();
        while let Some(node) = wanted.pop() {
            if passed.insert(node) {
                wanted.extend(&nodes[node].before);
            }
        }
        passed
    }
}

fn handle(node: &Node) -> CUgraphNode {
    (&raw const *node).cast_mut().cast()
}

#[derive(Default)]
struct Graph {
    /// Their addresses are handles.
    #[allow(clippy::vec_box)]
    nodes: Vec<Box<Node>>,
}

fn status(done: Result<(), Fault>) -> R {
    if done.is_ok() { OK } else { R::CUDA_ERROR_ILLEGAL_ADDRESS }
}

/// A stream that the caller created; the default streams never capture.
unsafe fn stream<'s>(handle: CUstream) -> Option<&'s mut Stream> {
    const DEFAULTS: usize = 2;
    // SAFETY: the caller's handle, of cuStreamCreate.
    (handle as usize > DEFAULTS).then(|| unsafe { &mut *handle.cast::<Stream>() })
}

/// Whether a handle is of the legacy default stream.
fn is_legacy(handle: CUstream) -> bool {
    const LEGACY: usize = 1;
    handle as usize <= LEGACY
}

/// Whether the stream is the legacy default stream, which waits for streams of which one is being captured; that capture is broken then.
fn meets_capture(handle: CUstream) -> bool {
    is_legacy(handle) && captures::break_blocking()
}

/// Does it, or writes it down.
unsafe fn enqueue(handle: CUstream, work: Work) -> R {
    if meets_capture(handle) {
        return R::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    // SAFETY: the caller's handle; the graph lives as long as the capture.
    unsafe {
        if let Some(capture) = stream(handle).and_then(|stream| stream.capture.as_mut()) {
            let node = add(capture.graph, work, &capture.before);
            capture.before = vec![node];
            return OK;
        }
    }
    status(with(|device| device.perform(&work, handle as usize)))
}

/// Does it on the default stream, and waits for it.
fn perform_and_wait(work: Work) -> R {
    with(|device| {
        let done = device.perform(&work, 0);
        device.works.host_waits(0);
        status(done)
    })
}

unsafe fn add(graph: *mut Graph, work: Work, before: &[CUgraphNode]) -> CUgraphNode {
    // SAFETY: the caller's graph.
    let nodes = unsafe { &mut (*graph).nodes };
    let places = before.iter().filter_map(|&one| nodes.iter().position(|node| handle(node) == one));
    let before = places.collect();
    nodes.push(Box::new(Node { work, before }));
    (&raw mut **nodes.last_mut().expect("pushed")).cast()
}

macro_rules! driver {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            /// # Safety
            /// As the driver's function of this name.
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, unused_variables, unused_unsafe)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> R {
                tell(const {
                    match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                        Ok(name) => name,
                        Err(_) => panic!(),
                    }
                });
                if fails(stringify!($name)) {
                    return R::CUDA_ERROR_OUT_OF_MEMORY;
                }
                if captures::forbid(stringify!($name)) {
                    return R::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
                }
                // SAFETY: the caller's.
                unsafe { $body }
            }
        )*
    };
}

driver! {
    fn cuInit(flags: c_uint) { OK }
    fn cuDriverGetVersion(version: *mut c_int) {
        *version = 12080;
        OK
    }
    fn cuDeviceGetCount(count: *mut c_int) {
        *count = 1;
        OK
    }
    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) {
        if ordinal != 0 {
            return R::CUDA_ERROR_INVALID_DEVICE;
        }
        *device = 0;
        OK
    }
    fn cuDeviceGetName(name: *mut c_char, length: c_int, device: CUdevice) {
        let text = c"emulated";
        name.copy_from_nonoverlapping(text.as_ptr(), text.count_bytes() + 1);
        OK
    }
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice) {
        use CUdevice_attribute_enum as Attribute;
        *value = match attribute {
            Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => (settings().capability / 10) as c_int,
            Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => (settings().capability % 10) as c_int,
            Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => settings().multiprocessors as c_int,
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => SHARED_OF_CTA as c_int,
            Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING => 1,
            Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE => 1_000_000,
            _ => 0,
        };
        OK
    }
    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) {
        *context = CONTEXT;
        OK
    }
    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) { OK }
    fn cuCtxGetCurrent(context: *mut CUcontext) {
        *context = CONTEXTS.with_borrow(|contexts| contexts.last().copied().unwrap_or(std::ptr::null_mut()));
        OK
    }
    fn cuCtxSetCurrent(context: CUcontext) {
        CONTEXTS.with_borrow_mut(|contexts| {
            contexts.pop();
            if !context.is_null() {
                contexts.push(context);
            }
        });
        OK
    }
    fn cuCtxPushCurrent_v2(context: CUcontext) {
        CONTEXTS.with_borrow_mut(|contexts| contexts.push(context));
        OK
    }
    fn cuCtxPopCurrent_v2(context: *mut CUcontext) {
        match CONTEXTS.with_borrow_mut(|contexts| contexts.pop()) {
            Some(top) => *context = top,
            None => return R::CUDA_ERROR_INVALID_CONTEXT,
        }
        OK
    }
    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
        (*least, *greatest) = (0, -5);
        OK
    }
    fn cuCtxSynchronize() { synchronize(Works::host_waits_for_all) }

    fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize) {
        match with(|device| device.alloc(bytes)) {
            Some(found) if bytes > 0 => *address = found,
            Some(_) => return R::CUDA_ERROR_INVALID_VALUE,
            None => return R::CUDA_ERROR_OUT_OF_MEMORY,
        }
        OK
    }
    fn cuMemFree_v2(address: CUdeviceptr) {
        if with(|device| device.free(address)) { OK } else { R::CUDA_ERROR_INVALID_VALUE }
    }
    fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint) {
        match with(|device| device.alloc_pinned(bytes)) {
            Some(found) => *address = found as *mut c_void,
            None => return R::CUDA_ERROR_OUT_OF_MEMORY,
        }
        OK
    }
    fn cuMemFreeHost(address: *mut c_void) {
        if with(|device| device.free_pinned(address as u64)) { OK } else { R::CUDA_ERROR_INVALID_VALUE }
    }
    fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: c_uint) {
        if bytes > 0 && with(|device| device.register(address as u64, bytes as u64)) {
            OK
        } else {
            R::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
        }
    }
    fn cuMemHostUnregister(address: *mut c_void) {
        if with(|device| device.unregister(address as u64)) { OK } else { R::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED }
    }
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        (*free, *total) = with(|device| (device.free_bytes(), crate::device::MEMORY));
        OK
    }
    fn cuMemcpyHtoD_v2(to: CUdeviceptr, from: *const c_void, bytes: usize) {
        perform_and_wait(Work::Copy { to, from: from as u64, bytes })
    }
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize) {
        perform_and_wait(Work::Copy { to: to as u64, from, bytes })
    }
    fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, on: CUstream) {
        enqueue(on, Work::Copy { to, from: from as u64, bytes })
    }
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, on: CUstream) {
        enqueue(on, Work::Copy { to: to as u64, from, bytes })
    }
    fn cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, on: CUstream) {
        enqueue(on, Work::Copy { to, from, bytes })
    }
    fn cuMemcpyAsync(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, on: CUstream) {
        enqueue(on, Work::Copy { to, from, bytes })
    }
    fn cuMemsetD8Async(to: CUdeviceptr, byte: u8, bytes: usize, on: CUstream) {
        enqueue(on, Work::Fill { to, byte, bytes })
    }
    fn cuMemsetD8_v2(to: CUdeviceptr, byte: u8, bytes: usize) {
        perform_and_wait(Work::Fill { to, byte, bytes })
    }

    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) { load(module, image) }
    fn cuModuleLoadDataEx(module: *mut CUmodule, image: *const c_void, count: c_uint, options: *mut CUjit_option, values: *mut *mut c_void) {
        load(module, image)
    }
    fn cuModuleUnload(module: CUmodule) {
        drop(Box::from_raw(module.cast::<Arc<Module>>()));
        OK
    }
    fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char) {
        let name = CStr::from_ptr(name).to_string_lossy();
        match (*module.cast::<Arc<Module>>()).function(&name) {
            // The module keeps the function, and the device keeps the module.
            Some(found) => *function = Arc::as_ptr(&found).cast_mut().cast(),
            None => return R::CUDA_ERROR_NOT_FOUND,
        }
        OK
    }
    fn cuFuncLoad(function: CUfunction) { OK }
    fn cuFuncSetAttribute(function: CUfunction, attribute: CUfunction_attribute, value: c_int) {
        let mut limits = (*function.cast::<Function>()).limits.lock();
        match attribute {
            CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES => limits.shared = value as u32,
            CUfunction_attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED => limits.cluster = 16,
            _ => (),
        }
        OK
    }
    fn cuLaunchKernel(
        function: CUfunction,
        ctas: c_uint,
        ctas_y: c_uint,
        ctas_z: c_uint,
        threads: c_uint,
        threads_y: c_uint,
        threads_z: c_uint,
        shared: c_uint,
        on: CUstream,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) {
        if ctas_y != 1 || ctas_z != 1 || threads_y != 1 || threads_z != 1 {
            return R::CUDA_ERROR_INVALID_VALUE;
        }
        launch(function, ctas, threads, 1, shared, false, on, parameters)
    }
    fn cuLaunchKernelEx(config: *const CUlaunchConfig, function: CUfunction, parameters: *mut *mut c_void, extra: *mut *mut c_void) {
        let config = &*config;
        let (cluster, depends) = (cluster(config), depends(config));
        launch(function, config.gridDimX, config.blockDimX, cluster, config.sharedMemBytes, depends, config.hStream, parameters)
    }
    fn cuOccupancyMaxActiveClusters(clusters: *mut c_int, function: CUfunction, config: *const CUlaunchConfig) {
        let size = cluster(&*config);
        let most = (*function.cast::<Function>()).limits.lock().cluster;
        *clusters = if size <= most { (settings().multiprocessors as u32 / size) as c_int } else { 0 };
        OK
    }

    fn cuTensorMapEncodeTiled(
        map: *mut CUtensorMap,
        kind: CUtensorMapDataType,
        rank: c_uint,
        address: *mut c_void,
        dims: *const cuuint64_t,
        strides: *const cuuint64_t,
        lengths: *const c_uint,
        element_strides: *const c_uint,
        interleave: CUtensorMapInterleave,
        swizzle: CUtensorMapSwizzle,
        promotion: CUtensorMapL2promotion,
        fill: CUtensorMapFloatOOBfill,
    ) {
        // This much of what may be asked for is emulated.
        let is_known = kind == CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16
            && interleave == CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE
            && fill == CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
        let is_swizzled = match swizzle {
            CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE if is_known => false,
            CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B if is_known => true,
            _ => return R::CUDA_ERROR_NOT_SUPPORTED,
        };
        let found = TensorMap::new(rank as usize, is_swizzled, address as u64, dims, strides, lengths, element_strides);
        let Some(found) = found.filter(|_| (map as usize).is_multiple_of(64)) else { return R::CUDA_ERROR_INVALID_VALUE };
        (*map).opaque = found.pack();
        OK
    }

    fn cuStreamCreate(made: *mut CUstream, flags: c_uint) {
        *made = create_stream(flags);
        OK
    }
    fn cuStreamCreateWithPriority(made: *mut CUstream, flags: c_uint, priority: c_int) {
        *made = create_stream(flags);
        OK
    }
    fn cuStreamDestroy_v2(handle: CUstream) {
        drop(Box::from_raw(handle.cast::<Stream>()));
        OK
    }
    fn cuStreamSynchronize(handle: CUstream) { synchronize(|works| works.host_waits(handle as usize)) }
    fn cuStreamQuery(handle: CUstream) { synchronize(|works| works.host_waits(handle as usize)) }
    fn cuStreamWaitEvent(handle: CUstream, event: CUevent, flags: c_uint) {
        if meets_capture(handle) {
            return R::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
        let captured = (*event.cast::<Event>()).captured.as_ref();
        let own = stream(handle).map(|stream| &mut stream.capture);
        match (captured, own) {
            (None, None | Some(None)) => with(|device| device.works.waits(handle as usize, event as usize)),
            (Some(event), Some(own)) => {
                if !captures::is_under_way(event.id) {
                    return R::CUDA_ERROR_CAPTURED_EVENT;
                }
                match own {
                    // The stream joins the capture.
                    None => {
                        captures::join(event.id, handle as usize);
                        *own = Some(event.same());
                    }
                    Some(own) if own.id == event.id => own.before.extend(&event.before),
                    Some(_) => return R::CUDA_ERROR_STREAM_CAPTURE_MERGE,
                }
            }
            (None, Some(Some(_))) => return R::CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
            (Some(_), None) => return R::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
        }
        OK
    }
    fn cuStreamIsCapturing(handle: CUstream, found: *mut CUstreamCaptureStatus) {
        if is_legacy(handle) && captures::has_blocking() {
            return R::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
        *found = capture_status(stream(handle).is_some_and(|stream| stream.capture.is_some()));
        OK
    }
    fn cuStreamBeginCapture_v2(handle: CUstream, mode: CUstreamCaptureMode) {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        match stream(handle) {
            Some(stream) if stream.capture.is_none() => {
                let graph = Box::into_raw(Box::<Graph>::default());
                let id = NEXT.fetch_add(1, Relaxed);
                captures::begin(id, handle as usize, mode, !stream.is_non_blocking);
                stream.capture = Some(Capture { id, graph, before: vec![] });
                OK
            }
            _ => R::CUDA_ERROR_INVALID_VALUE,
        }
    }
    fn cuStreamEndCapture(handle: CUstream, graph: *mut CUgraph) {
        let Some(capture) = stream(handle).and_then(|stream| stream.capture.as_ref()).map(Capture::same) else {
            return R::CUDA_ERROR_INVALID_VALUE;
        };
        let Some(ended) = captures::end(capture.id, handle as usize) else { return R::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED };
        // What other streams did has to come before what this one would do next.
        let (passed, mut is_joined) = (capture.passed(), true);
        for other in ended.streams {
            let other = stream(other as CUstream).and_then(|stream| stream.capture.take());
            is_joined &= other.is_none_or(|other| other.passed().is_subset(&passed));
        }
        if ended.is_broken || !is_joined {
            *graph = std::ptr::null_mut();
            return if ended.is_broken { R::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED } else { R::CUDA_ERROR_STREAM_CAPTURE_UNJOINED };
        }
        *graph = capture.graph.cast();
        OK
    }
    fn cuStreamGetCaptureInfo_v2(
        handle: CUstream,
        found: *mut CUstreamCaptureStatus,
        id: *mut cuuint64_t,
        graph: *mut CUgraph,
        before: *mut *const CUgraphNode,
        count: *mut usize,
    ) {
        if is_legacy(handle) && captures::has_blocking() {
            return R::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
        let capture = stream(handle).and_then(|stream| stream.capture.as_ref());
        *found = capture_status(capture.is_some());
        if let Some(capture) = capture {
            (*id, *graph, *before, *count) = (capture.id, capture.graph.cast(), capture.before.as_ptr(), capture.before.len());
        }
        OK
    }
    fn cuStreamUpdateCaptureDependencies(handle: CUstream, nodes: *mut CUgraphNode, count: usize, flags: c_uint) {
        match stream(handle).and_then(|stream| stream.capture.as_mut()) {
            Some(capture) => capture.before.extend((0..count).map(|n| *nodes.add(n))),
            None => return R::CUDA_ERROR_ILLEGAL_STATE,
        }
        OK
    }
    fn cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode) {
        *mode = captures::exchange_mode(*mode);
        OK
    }
    fn cuGraphAddKernelNode_v2(node: *mut CUgraphNode, graph: CUgraph, before: *const CUgraphNode, count: usize, parameters: *const CUDA_KERNEL_NODE_PARAMS) {
        let p = &*parameters;
        match prepared(p.func, p.gridDimX, p.blockDimX, 1, p.sharedMemBytes, false, p.kernelParams) {
            Ok(launch) => *node = add(graph.cast(), Work::Kernel(launch), std::slice::from_raw_parts(if count == 0 { std::ptr::dangling() } else { before }, count)),
            Err(error) => return error,
        }
        OK
    }
    fn cuGraphKernelNodeSetAttribute(node: CUgraphNode, attribute: CUkernelNodeAttrID, value: *const CUkernelNodeAttrValue) {
        if let (CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, Work::Kernel(launch)) = (attribute, &mut (*node.cast::<Node>()).work) {
            launch.cluster = (*value).clusterDim.x;
        }
        OK
    }
    fn cuGraphGetNodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize) {
        let own = &mut (*graph.cast::<Graph>()).nodes;
        if !nodes.is_null() {
            for (n, node) in own.iter_mut().take(*count).enumerate() {
                *nodes.add(n) = (&raw mut **node).cast();
            }
        }
        *count = own.len();
        OK
    }
    fn cuGraphNodeGetType(node: CUgraphNode, kind: *mut CUgraphNodeType) {
        *kind = match (*node.cast::<Node>()).work {
            Work::Kernel(_) => CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL,
            Work::Fill { .. } => CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET,
            Work::Copy { .. } => CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY,
        };
        OK
    }
    fn cuGraphKernelNodeGetParams_v2(node: CUgraphNode, parameters: *mut CUDA_KERNEL_NODE_PARAMS) {
        let Work::Kernel(launch) = &(*node.cast::<Node>()).work else { return R::CUDA_ERROR_INVALID_VALUE };
        (*parameters).func = Arc::as_ptr(&launch.function).cast_mut().cast();
        OK
    }
    fn cuGraphKernelNodeGetAttribute(node: CUgraphNode, attribute: CUkernelNodeAttrID, value: *mut CUkernelNodeAttrValue) {
        let Work::Kernel(launch) = &(*node.cast::<Node>()).work else { return R::CUDA_ERROR_INVALID_VALUE };
        if attribute == CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION {
            ((*value).clusterDim.x, (*value).clusterDim.y, (*value).clusterDim.z) = (launch.cluster, 1, 1);
        }
        OK
    }
    fn cuGraphInstantiateWithFlags(made: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong) {
        let nodes: Vec<Node> = (*graph.cast::<Graph>()).nodes.iter().map(|node| (**node).clone()).collect();
        *made = Box::into_raw(Box::new(nodes)).cast();
        OK
    }
    fn cuGraphExecUpdate_v2(made: CUgraphExec, graph: CUgraph, result: *mut CUgraphExecUpdateResultInfo) {
        let (own, nodes) = (&mut *made.cast::<Vec<Node>>(), &(*graph.cast::<Graph>()).nodes);
        let kind = |node: &Node| (std::mem::discriminant(&node.work), node.before.clone());
        if !own.iter().map(kind).eq(nodes.iter().map(|node| kind(node))) {
            (*result).result = CUgraphExecUpdateResult::CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
            return R::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
        }
        for (own, node) in own.iter_mut().zip(nodes) {
            let before = std::mem::replace(own, (**node).clone());
            // The worst that a driver might do: the size of clusters stays, without an error.
            if let (Work::Kernel(before), Work::Kernel(launch)) = (before.work, &mut own.work) {
                launch.cluster = before.cluster;
            }
        }
        OK
    }
    fn cuGraphLaunch(graph: CUgraphExec, on: CUstream) {
        let nodes = &*graph.cast::<Vec<Node>>();
        if stream(on).is_some_and(|stream| stream.capture.is_some()) {
            return R::CUDA_ERROR_NOT_SUPPORTED;
        }
        status(with(|device| device.perform_graph(nodes, on as usize)))
    }
    fn cuGraphDestroy(graph: CUgraph) {
        drop(Box::from_raw(graph.cast::<Graph>()));
        OK
    }
    fn cuGraphExecDestroy(graph: CUgraphExec) {
        drop(Box::from_raw(graph.cast::<Vec<Node>>()));
        OK
    }

    fn cuEventCreate(event: *mut CUevent, flags: c_uint) {
        *event = Box::into_raw(Box::<Event>::default()).cast();
        OK
    }
    fn cuEventDestroy_v2(event: CUevent) {
        drop(Box::from_raw(event.cast::<Event>()));
        OK
    }
    fn cuEventRecord(event: CUevent, on: CUstream) {
        if meets_capture(on) {
            return R::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
        let captured = stream(on).and_then(|stream| stream.capture.as_ref()).map(Capture::same);
        if captured.is_none() {
            with(|device| device.works.records(event as usize, on as usize));
        }
        (*event.cast::<Event>()).captured = captured;
        OK
    }
    fn cuEventQuery(event: CUevent) { synchronize(|works| works.host_waits_for_event(event as usize)) }
    fn cuEventSynchronize(event: CUevent) { synchronize(|works| works.host_waits_for_event(event as usize)) }
    fn cuEventElapsedTime(milliseconds: *mut f32, begin: CUevent, end: CUevent) {
        *milliseconds = 0.0;
        OK
    }

    fn cuGetProcAddress_v2(symbol: *const c_char, address: *mut *mut c_void, version: c_int, flags: cuuint64_t, found: *mut CUdriverProcAddressQueryResult) {
        *address = std::ptr::null_mut();
        R::CUDA_ERROR_NOT_FOUND
    }
    fn cuGetErrorString(error: CUresult, text: *mut *const c_char) {
        *text = match error {
            R::CUDA_SUCCESS => c"no error",
            R::CUDA_ERROR_INVALID_VALUE => c"invalid argument",
            R::CUDA_ERROR_OUT_OF_MEMORY => c"out of memory",
            R::CUDA_ERROR_NOT_FOUND => c"named symbol not found",
            R::CUDA_ERROR_NO_BINARY_FOR_GPU => c"no kernel image is available for execution on the device",
            R::CUDA_ERROR_ILLEGAL_ADDRESS => c"the emulated device found a fault, which stands on stderr",
            _ => c"unspecified",
        }
        .as_ptr();
        OK
    }
    fn cuGetErrorName(error: CUresult, text: *mut *const c_char) {
        *text = c"CUDA_ERROR".as_ptr();
        OK
    }
}

fn capture_status(is_capturing: bool) -> CUstreamCaptureStatus {
    if is_capturing {
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE
    } else {
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
    }
}

fn synchronize(waits: impl FnOnce(&mut Works)) -> R {
    with(|device| {
        waits(&mut device.works);
        status(device.fault.clone().map_or(Ok(()), Err))
    })
}

fn create_stream(flags: c_uint) -> CUstream {
    let is_non_blocking = flags & CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32 != 0;
    let handle: CUstream = Box::into_raw(Box::new(Stream { capture: None, is_non_blocking })).cast();
    with(|device| device.works.creates(handle as usize, is_non_blocking));
    handle
}

/// PTX alone: machine code is not emulated.
unsafe fn load(module: *mut CUmodule, image: *const c_void) -> R {
    // SAFETY: the caller's image, which is machine code that says so, or text with its NUL.
    unsafe {
        if std::slice::from_raw_parts(image.cast::<u8>(), 4) == b"\x7fELF" {
            return R::CUDA_ERROR_NO_BINARY_FOR_GPU;
        }
        let text = CStr::from_ptr(image.cast()).to_string_lossy();
        *module = Box::into_raw(Box::new(with(|device| device.module(&text)))).cast();
    }
    OK
}

#[allow(clippy::too_many_arguments)]
unsafe fn launch(
    function: CUfunction,
    ctas: u32,
    threads: u32,
    cluster: u32,
    shared: u32,
    depends: bool,
    on: CUstream,
    parameters: *mut *mut c_void,
) -> R {
    // SAFETY: the caller's.
    unsafe {
        match prepared(function, ctas, threads, cluster, shared, depends, parameters) {
            Ok(launch) => enqueue(on, Work::Kernel(launch)),
            Err(error) => error,
        }
    }
}
