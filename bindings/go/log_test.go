package vanward

import (
	"errors"
	"os"
	"strings"
	"sync"
	"testing"
	"unsafe"
)

// onDevice is pinned memory of the session, which the device reaches, as a tensor on the device.
func onDevice[T Element](t *testing.T, s *Session, shape ...int) Tensor {
	t.Helper()
	n := 1
	for _, extent := range shape {
		n *= extent
	}
	memory, err := PinnedAlloc[T](s, n)
	must(t, err)
	clear(memory)
	return At(uintptr(unsafe.Pointer(unsafe.SliceData(memory))), dtypeOf[T](), DeviceMemory(0), shape...)
}

// On a device a call logs the first use of a kernel, in the midst of the call; and a handle's call may do so when its session is closed.
func TestCallsOfACudaSessionLogToGo(t *testing.T) {
	var mu sync.Mutex
	var lines []string
	options := Options{Device: DeviceCUDA, LogLevel: LogInfo, Log: func(_ LogLevel, text string) {
		mu.Lock()
		defer mu.Unlock()
		lines = append(lines, text)
	}}
	session, err := NewSession(options)
	if errors.Is(err, ErrUnavailable) && os.Getenv("VANWARD_REQUIRE_GPU") == "" {
		t.Skip(err)
	}
	must(t, err)
	options.Log = nil
	other, err := NewSession(options) // its memory outlives the first one
	must(t, err)
	defer other.Close()
	logged := func(start string) {
		t.Helper()
		mu.Lock()
		defer mu.Unlock()
		for _, line := range lines {
			if strings.HasPrefix(line, start) {
				return
			}
		}
		t.Errorf("%q is not logged: %q", start, lines)
	}
	must(t, session.Verify(VerifyArgs{
		Draft: onDevice[int32](t, other, 1, 3), Target: onDevice[int32](t, other, 1, 4),
		Accepted: onDevice[int32](t, other, 1), NextToken: onDevice[int32](t, other, 1),
	}, 0))
	logged("first use of variant verify=")

	forecast, err := session.NewForecast(ForecastOptions{Layers: 1, InputDim: 4, QHeads: 1, HeadDim: 16})
	must(t, err)
	must(t, forecast.Accumulate(AccumulateArgs{X: Of([]float32{1, 2, 3, 4}, 1, 4), Q: Of(make([]float32, 16), 1, 1, 16)}))
	must(t, forecast.Solve(0))
	must(t, session.Close())
	must(t, forecast.Project(ProjectArgs{
		X: onDevice[float32](t, other, 1, 4), Positions: onDevice[int32](t, other, 1), Q: onDevice[float32](t, other, 1, 1, 16),
	}, 0))
	logged("first use of variant forecast=")
	must(t, forecast.Close())
	must(t, forecast.Close())
}
