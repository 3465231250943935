package vanward

// #include <stdlib.h>
// #include "calls.h"
// void vanward_go_log_line(void *context, uint32_t level, const char *text);
// void vanward_go_progress(void *context, uint64_t done, uint64_t total);
import "C"

import (
	"runtime/cgo"
	"sync/atomic"
	"unsafe"
)

// A callback is C memory that names a Go function: the library keeps a pointer to it beyond the call that gets it, which it may
// not to Go memory.
type callback struct {
	function cgo.Handle
	memory   unsafe.Pointer
	users    atomic.Int32 // handles whose calls may make it; the last one frees it
}

func newCallback(function any) *callback {
	c := &callback{function: cgo.NewHandle(function), memory: C.malloc(C.size_t(unsafe.Sizeof(cgo.Handle(0))))}
	*(*cgo.Handle)(c.memory) = c.function
	c.users.Store(1)
	return c
}

// keep has one more user, which frees it, too.
func (c *callback) keep() *callback {
	if c != nil {
		c.users.Add(1)
	}
	return c
}

func (c *callback) setLog(options *C.vwd_session_options) {
	options.log, options.log_context = C.vwd_log(C.vanward_go_log_line), c.memory
}

func (c *callback) setProgress(options *C.vwd_kv_cache_options) {
	options.progress, options.progress_context = C.vwd_progress(C.vanward_go_progress), c.memory
}

func (c *callback) free() {
	if c != nil && c.users.Add(-1) == 0 {
		C.free(c.memory)
		c.function.Delete()
	}
}

// functionOf is the Go function that a callback's memory names.
func functionOf[F any](context unsafe.Pointer) F { return (*(*cgo.Handle)(context)).Value().(F) }

//export vanward_go_log
func vanward_go_log(context unsafe.Pointer, level C.uint32_t, text *C.char) {
	functionOf[func(LogLevel, string)](context)(LogLevel(level), C.GoString(text))
}

//export vanward_go_progress
func vanward_go_progress(context unsafe.Pointer, done, total C.uint64_t) {
	functionOf[func(done, total uint64)](context)(uint64(done), uint64(total))
}
