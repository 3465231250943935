package vanward

// #include "calls.h"
import "C"

import "unsafe"

// Status is the reason why a call did nothing. It is an error itself, so that errors.Is(err, vanward.ErrOutOfScratch)
// works.
type Status int32

const (
	ErrInvalidArgument Status = C.VWD_ERROR_INVALID_ARGUMENT // an argument breaks the contract; the message names it
	ErrUnavailable     Status = C.VWD_ERROR_UNAVAILABLE      // no driver, or no such device
	ErrUnsupported     Status = C.VWD_ERROR_UNSUPPORTED      // valid, but this build or backend cannot do it
	ErrOutOfMemory     Status = C.VWD_ERROR_OUT_OF_MEMORY    // host or device memory could not be had
	ErrOutOfScratch    Status = C.VWD_ERROR_OUT_OF_SCRATCH   // the stream's arena is too small; see Session.Reserve
	ErrDriver          Status = C.VWD_ERROR_DRIVER           // the CUDA driver refused
	ErrIO              Status = C.VWD_ERROR_IO               // a file could not be read or written, or holds something else
	ErrInternal        Status = C.VWD_ERROR_INTERNAL         // a defect of the library
)

var statusNames = map[Status]string{
	ErrInvalidArgument: "invalid argument",
	ErrUnavailable:     "unavailable",
	ErrUnsupported:     "unsupported",
	ErrOutOfMemory:     "out of memory",
	ErrOutOfScratch:    "out of scratch",
	ErrDriver:          "driver error",
	ErrIO:              "input/output error",
	ErrInternal:        "internal error",
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
	return &Error{Status: ErrInvalidArgument, Message: name + ": " + message}
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
