package vanward

// #include "calls.h"
import "C"

import "unsafe"

// Status is the reason why a call did nothing. It is an error itself, so that errors.Is(err, vanward.OutOfScratch)
// works.
type Status int32

const (
	InvalidArgument Status = C.VWD_ERROR_INVALID_ARGUMENT // an argument breaks the contract; the message names it
	Unavailable     Status = C.VWD_ERROR_UNAVAILABLE      // no driver, or no such device
	Unsupported     Status = C.VWD_ERROR_UNSUPPORTED      // valid, but this build or backend cannot do it
	OutOfMemory     Status = C.VWD_ERROR_OUT_OF_MEMORY    // host or device memory could not be had
	OutOfScratch    Status = C.VWD_ERROR_OUT_OF_SCRATCH   // the stream's arena is too small; see Session.Reserve
	Driver          Status = C.VWD_ERROR_DRIVER           // the CUDA driver refused
	IO              Status = C.VWD_ERROR_IO               // a file could not be read or written, or holds something else
	Internal        Status = C.VWD_ERROR_INTERNAL         // a defect of the library
)

var statusNames = map[Status]string{
	InvalidArgument: "invalid argument",
	Unavailable:     "unavailable",
	Unsupported:     "unsupported",
	OutOfMemory:     "out of memory",
	OutOfScratch:    "out of scratch",
	Driver:          "driver error",
	IO:              "input/output error",
	Internal:        "internal error",
}

func (s Status) Error() string {
	if name, known := statusNames[s]; known {
		return name
	}
	return "unknown status"
}

// Error is what every failed call returns: why, and in the library's words what was found and what was expected.
type Error struct {
	Status  Status
	Message string
}

func (e *Error) Error() string { return "vanward: " + e.Message }

// Unwrap makes errors.Is find the Status.
func (e *Error) Unwrap() error { return e.Status }

func invalid(name, message string) *Error {
	return &Error{Status: InvalidArgument, Message: name + ": " + message}
}

func failure(o C.outcome) error {
	if o.status == C.VWD_OK {
		return nil
	}
	e := &Error{Status: Status(o.status), Message: Status(o.status).Error()}
	if o.message != nil {
		e.Message = C.GoString(o.message)
		C.free(unsafe.Pointer(o.message))
	}
	return e
}
