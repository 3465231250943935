package vanward

// #include <stdlib.h>
// #include "calls.h"
// void vanward_go_log(void *context, uint32_t level, char *text);
// void vanward_go_progress(void *context, uint64_t done, uint64_t total);
import "C"

import (
	"runtime/cgo"
	"unsafe"
)

// A callback is C memory that names a Go function: the library keeps a pointer to it until what was created is released, or
// until the call returns, which it may not to Go memory.
type callback struct {
	function cgo.Handle
	memory   unsafe.Pointer
}

func newCallback(function any) *callback {
	c := &callback{cgo.NewHandle(function), C.malloc(C.size_t(unsafe.Sizeof(cgo.Handle(0))))}
	*(*cgo.Handle)(c.memory) = c.function
	return c
}

// setLog gives a session's options this function as their log.
func (c *callback) setLog(options *C.vwd_session_options) {
	options.log, options.log_context = C.vwd_log(C.vanward_go_log), c.memory
}

// setProgress gives a cache's options this function as their progress.
func (c *callback) setProgress(options *C.vwd_kv_cache_options) {
	options.progress, options.progress_context = C.vwd_progress(C.vanward_go_progress), c.memory
}

func (c *callback) free() {
	if c != nil {
		C.free(c.memory)
		c.function.Delete()
	}
}

//export vanward_go_log
func vanward_go_log(context unsafe.Pointer, level C.uint32_t, text *C.char) {
	log := (*(*cgo.Handle)(context)).Value().(func(LogLevel, string))
	log(LogLevel(level), C.GoString(text))
}

//export vanward_go_progress
func vanward_go_progress(context unsafe.Pointer, done, total C.uint64_t) {
	progress := (*(*cgo.Handle)(context)).Value().(func(uint64, uint64))
	progress(uint64(done), uint64(total))
}
