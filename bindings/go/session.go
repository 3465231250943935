// Package vanward binds libvanward: verification and packing of speculated tokens, selection of KV blocks, sparse
// attention, exact repair and KV prefetch, for engines that keep their own memory and streams.
//
// What a call computes, and the shape and dtype of each of its arguments, stands with its Args in the words of vanward.h, under
// the C names. Absent tensors are zero Tensors, absent numbers zeros. Errors are *Error; errors.Is finds their Status.
//
// Goroutines may share a Session. Calls on one stream are ordered by the caller, as in C. On a CUDA session calls only
// enqueue: their memory stays valid until the stream has passed them, so it is device or pinned memory, never Go's.
package vanward

// #include "calls.h"
import "C"

import (
	"math"
	"sync"
	"unsafe"
)

// Version is the library's, such as "0.1.0".
func Version() string { return C.GoString(C.vwd_version()) }

// Stream is a CUstream or cudaStream_t; 0 is the default stream, and the only one of a CPU session.
type Stream uintptr

func (s Stream) c() C.uintptr_t { return C.uintptr_t(s) }

// Device is what a session computes on.
type Device uint32

const (
	DeviceAuto Device = C.VWD_DEVICE_AUTO // CUDA where a driver and a device are present, else CPU
	DeviceCPU  Device = C.VWD_DEVICE_CPU
	DeviceCUDA Device = C.VWD_DEVICE_CUDA
)

// StreamRole is what one of a session's own streams is for.
type StreamRole uint32

const (
	StreamSelect    StreamRole = C.VWD_STREAM_SELECT
	StreamSpeculate StreamRole = C.VWD_STREAM_SPECULATE
	StreamPrefetch  StreamRole = C.VWD_STREAM_PREFETCH
	StreamWriteBack StreamRole = C.VWD_STREAM_WRITE_BACK
)

// Options of NewSession; zero means the default. The library's parallel_for is left out: a session that would call back
// into Go for each share of its work has nothing to gain from it.
type Options struct {
	Device       Device
	DeviceID     int    // CUDA ordinal
	Threads      int    // CPU: threads that share one call's work; 0 means every core the calling thread may use
	ScratchBytes uint64 // CUDA: bytes of a scratch arena that a call makes for its stream
	PinnedLimit  uint64 // most bytes that PinnedAlloc may have handed out at once

	// Log takes lines of what the session does, until Close of it and of the handles that were made with it. It is called while they are
	// called, several times at once where that is, on other threads, and calls no method of this package.
	Log      func(level LogLevel, text string)
	LogLevel LogLevel // the most detailed that is logged; 0 means VANWARD_LOG of the environment, or LogInfo
	Variants string   // CUDA: variants of kernels to force, "family=variant"; "" means VANWARD_VARIANTS of the environment
	Check    Check    // what calls check beside shapes; 0 means VANWARD_CHECK of the environment, or CheckNothing

	// DelayMicroseconds is for tests. CUDA: most of the random delays of work that overlaps; 0 means VANWARD_DELAY of the environment,
	// or none.
	DelayMicroseconds uint64

	// InvariantBatch, where it is not 0, makes the session batch-invariant: on CUDA attention and repair choose kernels, and split lists, as for
	// so many sequences whatever a call has, and every sequence has the same bits in every batch. A CPU session is so always.
	InvariantBatch uint64
}

// Check is what calls check beside what the host sees of their arguments.
type Check uint32

const (
	CheckContents Check = C.VWD_CHECK_CONTENTS // lengths, pages, ids, counts and the like, before each call; on CUDA the call waits
	CheckNothing  Check = C.VWD_CHECK_NOTHING
)

// LogLevel is how detailed a line of the log is.
type LogLevel uint32

const (
	LogWarning LogLevel = C.VWD_LOG_WARNING // what an engine should know: a session falls back to the CPU, or a driver to PTX
	LogInfo    LogLevel = C.VWD_LOG_INFO    // what a session does once: its creation, scratch arenas, the first use of a variant
	LogDebug   LogLevel = C.VWD_LOG_DEBUG   // also each kernel module that is loaded
)

// Info is what a session runs on and what it holds.
type Info struct {
	Device            Device
	DeviceID          int
	DeviceName        string
	Threads           int
	DriverVersion     int // 12040 for 12.4; 0 on a CPU session
	ComputeCapability int // 90 for 9.0; 0 on a CPU session
	Multiprocessors   int
	Kernels           int
	LoadMicroseconds  uint64
	ScratchBytes      uint64
	ScratchPeak       uint64
	PinnedInUse       uint64
	PinnedPeak        uint64
	PinnedCached      uint64
}

// Session is what calls run on. It holds threads or device memory until Close.
//
// There is no finalizer: only its owner knows when the device has passed the session's last call.
type Session struct {
	handle handle[*C.vwd_session]
	log    *callback
}

// NewSession creates a session.
func NewSession(options Options) (*Session, error) {
	var l lowering
	defer l.release()
	c := options.lower(&l)
	if l.err != nil {
		return nil, l.err
	}
	s := &Session{}
	if options.Log != nil {
		s.log = newCallback(options.Log)
		s.log.setLog(&c)
	}
	if err := failure(C.session_create(&c, &s.handle.c)); err != nil {
		s.log.free()
		return nil, err
	}
	return s, nil
}

func (options Options) lower(l *lowering) C.vwd_session_options {
	return C.vwd_session_options{
		struct_size:   C.sizeof_vwd_session_options,
		device:        C.uint32_t(options.Device),
		device_id:     C.int32_t(l.count("options.device_id", options.DeviceID, math.MaxInt32)),
		threads:       l.uint32("options.threads", options.Threads),
		scratch_bytes: C.uint64_t(options.ScratchBytes),
		pinned_limit:  C.uint64_t(options.PinnedLimit),
		log_level:     C.uint32_t(options.LogLevel),
		variants:      l.text(options.Variants),
		check:         C.uint64_t(options.Check),

		delay_microseconds: C.uint64_t(options.DelayMicroseconds),
		invariant_batch:    C.uint64_t(options.InvariantBatch),
	}
}

// Close releases the session once calls in progress have returned; the device has passed them. Closing again does
// nothing; calls after it fail.
func (s *Session) Close() error {
	if s != nil {
		s.handle.close(func(c *C.vwd_session) {
			C.vwd_session_release(c)
			s.log.free()
		})
	}
	return nil
}

// run makes one call, or says why not.
func (s *Session) run(l *lowering, call func(*C.vwd_session) C.outcome) error {
	if l.err != nil {
		return l.err
	}
	if s == nil {
		return invalid("session", "nil")
	}
	return s.handle.use("session", call)
}

// create makes a call that creates a handle. The library logs in the handle's calls, too, also after Close of the session: the handle keeps
// the session's log, and frees it when it is closed.
func (s *Session) create(l *lowering, log **callback, call func(*C.vwd_session) C.outcome) error {
	return s.run(l, func(h *C.vwd_session) C.outcome {
		outcome := call(h)
		if outcome.status == C.VWD_OK {
			*log = s.log.keep()
		}
		return outcome
	})
}

// Info tells what the session runs on and what it holds.
func (s *Session) Info() (Info, error) {
	d := C.vwd_session_details{struct_size: C.sizeof_vwd_session_details}
	err := s.run(&lowering{}, func(c *C.vwd_session) C.outcome { return C.session_info(c, &d) })
	if err != nil {
		return Info{}, err
	}
	return Info{
		Device:            Device(d.device),
		DeviceID:          int(d.device_id),
		DeviceName:        C.GoString(&d.device_name[0]),
		Threads:           int(d.threads),
		DriverVersion:     int(d.driver_version),
		ComputeCapability: int(d.compute_capability),
		Multiprocessors:   int(d.multiprocessors),
		Kernels:           int(d.kernels),
		LoadMicroseconds:  uint64(d.load_microseconds),
		ScratchBytes:      uint64(d.scratch_bytes),
		ScratchPeak:       uint64(d.scratch_peak),
		PinnedInUse:       uint64(d.pinned_in_use),
		PinnedPeak:        uint64(d.pinned_peak),
		PinnedCached:      uint64(d.pinned_cached),
	}, nil
}

// Reserve gives a stream a scratch arena of at least so many bytes.
func (s *Session) Reserve(stream Stream, bytes uint64) error {
	return s.run(&lowering{}, func(c *C.vwd_session) C.outcome {
		return C.session_reserve(c, stream.c(), C.uint64_t(bytes))
	})
}

// ForgetStream lets a stream's scratch arena go; the stream has passed its calls.
func (s *Session) ForgetStream(stream Stream) error {
	return s.run(&lowering{}, func(c *C.vwd_session) C.outcome { return C.session_forget_stream(c, stream.c()) })
}

// Stream is one of the session's own streams; 0 on a CPU session.
func (s *Session) Stream(role StreamRole) (Stream, error) {
	var stream C.vwd_stream
	err := s.run(&lowering{}, func(c *C.vwd_session) C.outcome {
		return C.session_stream(c, C.uint32_t(role), &stream)
	})
	return Stream(uintptr(stream)), err
}

// PinnedAlloc takes n elements from the session's pool of host memory, pinned on a CUDA session. The contents are
// undefined. Go does not manage this memory: it is gone after PinnedFree or Close.
func PinnedAlloc[T Element](s *Session, n int) ([]T, error) {
	size := int(unsafe.Sizeof(*new(T)))
	if n < 0 || n > math.MaxInt/size {
		return nil, invalid("n", "more than memory can hold, or less than nothing")
	}
	memory, err := s.pinnedAlloc(n * size)
	if err != nil {
		return nil, err
	}
	return unsafe.Slice((*T)(memory), n), nil
}

// PinnedFree gives a slice from PinnedAlloc back; it is handed out again once the stream has passed this point.
func PinnedFree[T Element](s *Session, memory []T, stream Stream) error {
	return s.pinnedFree(unsafe.Pointer(unsafe.SliceData(memory)), stream)
}

func (s *Session) pinnedAlloc(bytes int) (memory unsafe.Pointer, err error) {
	err = s.run(&lowering{}, func(c *C.vwd_session) C.outcome {
		return C.pinned_alloc(c, C.uint64_t(bytes), &memory)
	})
	return memory, err
}

func (s *Session) pinnedFree(memory unsafe.Pointer, stream Stream) error {
	return s.run(&lowering{}, func(c *C.vwd_session) C.outcome { return C.pinned_free(c, memory, stream.c()) })
}

// A handle is a C object that calls share and Close takes away, after the last of them.
type handle[P comparable] struct {
	mu sync.RWMutex
	c  P
}

func (h *handle[P]) use(name string, call func(P) C.outcome) error {
	h.mu.RLock()
	defer h.mu.RUnlock()
	var none P
	if h.c == none {
		return invalid(name, "closed")
	}
	return failure(call(h.c))
}

func (h *handle[P]) close(release func(P)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var none P
	if h.c != none {
		release(h.c)
		h.c = none
	}
}
