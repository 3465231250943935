package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
)

// A failure is an error in the API's form.
type failure struct {
	status  int
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    *string `json:"code"`
}

func (f *failure) Error() string { return f.Message }

// invalid blames a field of the request: what was found, and what is expected.
func invalid(field, format string, values ...any) *failure {
	f := &failure{status: http.StatusBadRequest, Type: "invalid_request_error", Message: field + ": " + fmt.Sprintf(format, values...)}
	f.Param = &field
	return f
}

func (f *failure) coded(code string) *failure {
	f.Code = &code
	return f
}

func refused(status int, kind, code, message string) *failure {
	return (&failure{status: status, Type: kind, Message: message}).coded(code)
}

// failureOf puts the end of a request that was not finished into the API's form.
func failureOf(err error) *failure {
	var f *failure
	var refusal Refusal
	switch {
	case errors.As(err, &f):
		return f
	case errors.As(err, &refusal):
		return refused(http.StatusBadRequest, "invalid_request_error", "refused", err.Error())
	case errors.Is(err, ErrQueueFull):
		return refused(http.StatusTooManyRequests, "rate_limit_error", "queue_full", err.Error()+"; try again later")
	case errors.Is(err, ErrStopping):
		return refused(http.StatusServiceUnavailable, "server_error", "stopping", err.Error())
	case errors.Is(err, ErrSlow):
		return refused(http.StatusServiceUnavailable, "server_error", "slow_client", err.Error())
	default:
		return refused(http.StatusInternalServerError, "server_error", "engine_failed", "the engine failed: "+err.Error())
	}
}

func (f *failure) body() any {
	return map[string]*failure{"error": f}
}

func (f *failure) write(w http.ResponseWriter) {
	if f.status == http.StatusTooManyRequests || f.status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "1")
	}
	writeJSON(w, f.status, f.body())
}

func writeJSON(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(body) // a client that is gone is noticed by its context
}
