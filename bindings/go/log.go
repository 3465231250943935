package vanward

// #include <stdlib.h>
// #include "calls.h"
// void vanward_go_log(void *context, uint32_t level, char *text);
import "C"

import (
	"runtime/cgo"
	"unsafe"
)

// A logContext is C memory that names a session's Go function: the library keeps a pointer to it until the session is
// released, which it may not to Go memory.
type logContext struct {
	function cgo.Handle
	memory   unsafe.Pointer
}

func newLogContext(log func(LogLevel, string)) *logContext {
	c := &logContext{cgo.NewHandle(log), C.malloc(C.size_t(unsafe.Sizeof(cgo.Handle(0))))}
	*(*cgo.Handle)(c.memory) = c.function
	return c
}

func (c *logContext) set(options *C.vwd_session_options) {
	options.log, options.log_context = C.vwd_log(C.vanward_go_log), c.memory
}

func (c *logContext) free() {
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
