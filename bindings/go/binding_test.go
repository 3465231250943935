package vanward

import (
	"errors"
	"fmt"
	"math"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
)

func cpuSession(t testing.TB) *Session {
	t.Helper()
	s, err := NewSession(Options{Device: DeviceCPU, Threads: 2})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func wantInvalid(t *testing.T, err error, message string) {
	t.Helper()
	var e *Error
	if !errors.Is(err, ErrInvalidArgument) || !errors.As(err, &e) || !strings.Contains(e.Message, message) {
		t.Errorf("found %v; expected an invalid argument with %q", err, message)
	}
}

func TestSessionSaysWhatItRunsOn(t *testing.T) {
	info, err := cpuSession(t).Info()
	if err != nil || info.Device != DeviceCPU || info.Threads != 2 || info.DriverVersion != 0 || info.DeviceName == "" {
		t.Error(info, err)
	}
	if stream, err := cpuSession(t).Stream(StreamPrefetch); stream != 0 || err != nil {
		t.Error(stream, err)
	}
	if Version() == "" {
		t.Error("no version")
	}
}

func TestCloseIsIdempotentAndLaterCallsFail(t *testing.T) {
	s := cpuSession(t)
	f, err := s.NewForecast(ForecastOptions{Layers: 1, InputDim: 8, QHeads: 1, HeadDim: 16})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if s.Close() != nil || f.Close() != nil {
			t.Error("Close failed")
		}
	}
	wantInvalid(t, s.Verify(VerifyArgs{}, 0), "session: closed")
	wantInvalid(t, f.Solve(0), "forecast: closed")
	_, err = s.Info()
	wantInvalid(t, err, "session: closed")
}

func TestNilAndZeroHandlesFailAndDoNotPanic(t *testing.T) {
	for _, s := range []*Session{nil, {}} {
		wantInvalid(t, s.Verify(VerifyArgs{}, 0), "session: ")
		_, err := s.LoadForecast("x")
		wantInvalid(t, err, "session: ")
		if _, err := PinnedAlloc[int32](s, 1); err == nil {
			t.Error("pinned memory from nowhere")
		}
		s.Close()
	}
	for _, f := range []*Forecast{nil, {}} {
		wantInvalid(t, f.Project(ProjectArgs{}, 0), "forecast: ")
		f.Close()
	}
}

func TestErrorsCarryStatusAndMessage(t *testing.T) {
	_, err := NewSession(Options{Device: 99})
	wantInvalid(t, err, "options.device")
	_, err = NewSession(Options{Threads: -1})
	wantInvalid(t, err, "options.threads: -1")
	err = cpuSession(t).Verify(VerifyArgs{}, 0)
	wantInvalid(t, err, "draft: ")
	if !strings.HasPrefix(err.Error(), "vanward: vwd_verify: draft: ") || errors.Is(err, ErrOutOfScratch) {
		t.Error(err)
	}
	for status := ErrInvalidArgument; status <= ErrInternal; status++ {
		if status.Error() == "unknown status" {
			t.Errorf("status %d has no name", status)
		}
	}
}

func TestViewsThatTheirSliceCannotHoldFailByName(t *testing.T) {
	s := cpuSession(t)
	data := make([]int32, 7)
	good := VerifyArgs{
		Target: Of(make([]int32, 10), 2, 5), Accepted: Of(make([]int32, 2)), NextToken: Of(make([]int32, 2)),
	}
	for _, draft := range []Tensor{
		Of(data, 2, 4),                                  // eight elements of seven
		Of(data, 2, 3).WithStrides(6, 1),                // ends at element 8
		Of(data, 2, 2).WithStrides(-2, 1),               // begins before the slice
		Of(data, 2, 2).WithStrides(math.MaxInt, 1),      // ends beyond 64 bits
		Of(data, 2, 3).WithStrides(1),                   // one stride for two extents
		Of(data, 1, 1, 1, 1, 1, 7),                      // six dimensions
		Of(data, 1, 1, 1, 1, 1, 7).WithStrides(1, 2, 3), // twice wrong
		Of(data, 1, 1, 1, 1, 1, 7).WithStrides(1, 1, 1, 1, 1, 1),
		Of(data, math.MaxInt, math.MaxInt), // more than the address space
		Of([]int32{}, 1),
		Of[int32](nil, 2, 4),
		Of(data, 2, -4), // the library's to refuse
		At(8, I32, HostMemory, 2, 4),
		At(1<<40, I32, DeviceMemory(0), 2, 4),
		At(1<<40, DType(7<<8|3), HostMemory, 2, 4),
		{},
	} {
		args := good
		args.Draft = draft
		wantInvalid(t, s.Verify(args, 0), "draft: ")
	}
	// Strides may mend what the shape alone breaks: one row for two sequences.
	args := good
	args.Draft = Of(data[:4], 2, 4).WithStrides(0, 1)
	if err := s.Verify(args, 0); err != nil {
		t.Error(err)
	}
	wantInvalid(t, s.Verify(good, 12345), "")
}

func TestMembersOfArraysFailByTheirIndex(t *testing.T) {
	s, data := cpuSession(t), make([]int32, 7)
	args := PackArgs{Rows: []Tensor{Of(data, 1, 7), Of(data, 2, 7)}, Packed: []Tensor{{}, {}}}
	wantInvalid(t, s.Pack(args, 0), "rows[1]: shape [2 7]")
	args = PackArgs{Rows: []Tensor{Of(data, 1, 7)}}
	wantInvalid(t, s.Pack(args, 0), "packed: 0 tensors; expected 1")
	wantInvalid(t, s.Pack(PackArgs{Accepted: Of(data), Offsets: Of(make([]int32, 8))}, 0), "tensor_count")
	wantInvalid(t, s.MergeStates(MergeStatesArgs{Inputs: []AttentionState{{M: Of(data, 8)}}}, 0), "inputs[0].m: ")
	updates := []IndexUpdateArgs{{K: Of(data, 1, 7, 1, 1)}, {K: Of(data, 8)}}
	wantInvalid(t, s.IndexUpdateLayers(updates, 0), "updates[1].k: shape [8]")
	updates = []IndexUpdateArgs{{}, {Index: Index{Table: Of(data, 8)}}}
	wantInvalid(t, s.IndexUpdateLayers(updates, 0), "updates[1].index.table: shape [8]")
	wantInvalid(t, s.Attention(AttentionArgs{BlockSize: -1}, 0), "block_size: -1")
	_, err := s.LoadForecast("a\x00b")
	wantInvalid(t, err, "path: ")
}

func TestEveryElementTypeHasItsDType(t *testing.T) {
	for _, c := range []struct{ found, expected DType }{
		{Of([]int8{}).dtype, I8}, {Of([]int16{}).dtype, I16}, {Of([]int32{}).dtype, I32}, {Of([]int64{}).dtype, I64},
		{Of([]uint8{}).dtype, U8}, {Of([]uint16{}).dtype, U16}, {Of([]uint32{}).dtype, U32}, {Of([]uint64{}).dtype, U64},
		{Of([]float32{}).dtype, F32}, {Of([]float64{}).dtype, F64}, {Of([]bool{}).dtype, Bool},
		{Of([]Half{}).dtype, F16}, {Of([]BFloat16{}).dtype, BF16},
		{Of([]Float8E4M3{}).dtype, F8E4M3}, {Of([]Float8E5M2{}).dtype, F8E5M2},
	} {
		if c.found != c.expected {
			t.Errorf("found %#x, expected %#x", c.found, c.expected)
		}
	}
}

func TestScratchIsAskedForWithoutACall(t *testing.T) {
	s, seq, out := cpuSession(t), newSequence(), make([]float32, heads*channels)
	args := AttentionArgs{KV: seq.kv(), Q: seq.queries(), Out: Of(out, 1, heads, channels)}
	if bytes, err := s.AttentionScratch(args); bytes != 0 || err != nil {
		t.Error(bytes, err)
	}
	args.KV.K = Tensor{}
	_, err := s.AttentionScratch(args)
	wantInvalid(t, err, "kv.k: ")
	_, err = s.RepairScratch(RepairArgs{})
	wantInvalid(t, err, "")
	_, err = s.SelectBlocksScratch(SelectBlocksArgs{})
	wantInvalid(t, err, "")
	_, err = s.SelectTokensScratch(SelectTokensArgs{})
	wantInvalid(t, err, "")
	must(t, s.ForgetStream(0))
}

func TestCutsReadWhatTheyName(t *testing.T) {
	s := cpuSession(t)
	tokens := make([]int32, 3*2*4) // [3, 2, 4]
	for i := range tokens {
		tokens[i] = int32(i)
	}
	drafts := Of(tokens, 3, 2, 4).Select(1, 1).Slice(0, 1, 3).Slice(1, 1, 3) // [2, 2]: 13, 14; 21, 22
	accepted, next := make([]int32, 2), make([]int32, 2)
	err := s.Verify(VerifyArgs{
		Draft: drafts, Target: Of([]int32{13, 14, 50, 21, 60, 61}, 2, 3), Accepted: Of(accepted), NextToken: Of(next),
	}, 0)
	if err != nil || !slices.Equal(accepted, []int32{2, 1}) || !slices.Equal(next, []int32{50, 60}) {
		t.Errorf("%v, accepted %v, next %v; expected 2 and 1, 50 and 60", err, accepted, next)
	}
}

func TestCutsOutsideFailByName(t *testing.T) {
	s := cpuSession(t)
	whole := Of(make([]int32, 2*5), 2, 5)
	Of([]int32{}, 0, 5).Slice(1, 2, 4) // without elements, and so without an element to begin at
	for _, draft := range []Tensor{
		whole.Slice(1, 0, 6),
		whole.Slice(1, -1, 4),
		whole.Slice(1, 3, 3),
		whole.Slice(2, 0, 1),
		whole.Select(0, 2),
		whole.Slice(1, 0, 6).WithStrides(4, 1), // strides do not mend a cut
		Of(make([]int32, 9), 2, 5).Slice(1, 0, 4),
		At(1<<40, DType(7<<8|3), HostMemory, 2, 5).Slice(1, 0, 4),
		Tensor{}.Slice(0, 0, 1),
	} {
		args := VerifyArgs{Draft: draft, Target: Of(make([]int32, 10), 2, 5), Accepted: Of(make([]int32, 2)), NextToken: Of(make([]int32, 2))}
		wantInvalid(t, s.Verify(args, 0), "draft: ")
	}
}

func TestProgressOfACacheEndsAtItsTotal(t *testing.T) {
	s := cpuSession(t)
	var seen [][2]uint64
	cache, err := s.NewKvCache(KvCacheOptions{
		Layers: 1, KVHeads: 1, BlockSize: 16, KeyDim: 16, ValueDim: 16, DType: F16, MaxSequences: 1, MaxBlocks: 4, HostBlocks: 4, Slots: 8,
		Progress: func(done, total uint64) { seen = append(seen, [2]uint64{done, total}) },
	})
	if err != nil {
		t.Fatal(err)
	}
	defer cache.Close()
	if len(seen) == 0 || seen[len(seen)-1][0] != seen[len(seen)-1][1] {
		t.Errorf("progress %v; expected the last call to have done = total", seen)
	}
}

func TestPinnedMemoryIsASlice(t *testing.T) {
	s := cpuSession(t)
	source, err := PinnedAlloc[float64](s, 100)
	if err != nil || len(source) != 100 {
		t.Fatal(err)
	}
	for i := range source {
		source[i] = float64(i)
	}
	target := make([]float64, 10)
	err = s.GatherBlocks(GatherBlocksArgs{
		Source: Of(source, 10, 10).In(PinnedMemory), Target: Of(target, 1, 10), SourceIDs: Of([]int32{4}),
	}, 0)
	if err != nil || target[9] != 49 {
		t.Error(target, err)
	}
	if info, _ := s.Info(); info.PinnedInUse < 800 {
		t.Error(info)
	}
	if err := PinnedFree(s, source, 0); err != nil {
		t.Error(err)
	}
	wantInvalid(t, PinnedFree(s, target, 0), "pointer")
	for _, n := range []int{-1, 0, math.MaxInt} {
		if _, err := PinnedAlloc[int64](s, n); err == nil {
			t.Errorf("%d elements", n)
		}
	}
}

// Goroutines that change threads, make garbage and grow their stacks between calls, and whose arguments live on those
// stacks, each get their own results and their own messages.
func TestManyGoroutinesShareASession(t *testing.T) {
	s := cpuSession(t)
	var group sync.WaitGroup
	for n := range 64 {
		group.Add(1)
		go func() {
			defer group.Done()
			for round := range 50 {
				draft, target := [4]int32{1, 2, 3, 4}, [5]int32{1, 2, 3, 4, int32(n)}
				draft[n%4] = -1
				accepted, next := make([]int32, 1), make([]int32, 1)
				args := VerifyArgs{
					Draft: Of(draft[:], 1, 4), Target: Of(target[:], 1, 5), Accepted: Of(accepted), NextToken: Of(next),
				}
				grow(round % 10)
				if err := s.Verify(args, 0); err != nil || accepted[0] != int32(n%4) || next[0] != target[n%4] {
					t.Errorf("goroutine %d: %v, accepted %d, next %d", n, err, accepted, next)
				}
				runtime.Gosched()
				args.Target = Of(target[:], 1, 1+n%4)
				err := s.Verify(args, 0)
				if want := fmt.Sprintf("[1, %d]", 1+n%4); err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("goroutine %d: %v; expected %s", n, err, want)
				}
			}
		}()
	}
	group.Wait()
}

func grow(depth int) int {
	var frame [512]int
	if depth == 0 {
		return frame[0]
	}
	return grow(depth-1) + frame[depth]
}

func TestCloseWaitsForCallsInProgress(t *testing.T) {
	for range 20 {
		s := cpuSession(t)
		var group sync.WaitGroup
		for range 8 {
			group.Add(1)
			go func() {
				defer group.Done()
				rows, packed := make([]float32, 1<<12), make([]float32, 1<<12)
				args := PackArgs{
					Rows: []Tensor{Of(rows, 4, 4, 256)}, Packed: []Tensor{Of(packed, 16, 256)},
					Accepted: Of([]int32{4, 4, 4, 4}), Offsets: Of(make([]int64, 5)),
				}
				for {
					if err := s.Pack(args, 0); err != nil {
						wantInvalid(t, err, "session: closed")
						return
					}
				}
			}()
		}
		runtime.Gosched()
		s.Close()
		group.Wait()
	}
}

func TestOneCallDoesNotAllocate(t *testing.T) {
	s := cpuSession(t)
	args := VerifyArgs{
		Draft: Of([]int32{1, 2}, 1, 2), Target: Of([]int32{1, 2, 3}, 1, 3),
		Accepted: Of(make([]int32, 1)), NextToken: Of(make([]int32, 1)),
	}
	seq, out := newSequence(), make([]float32, heads*channels)
	attention := AttentionArgs{KV: seq.kv(), Q: seq.queries(), Out: Of(out, 1, heads, channels)}
	for name, call := range map[string]func() error{
		"verify":    func() error { return s.Verify(args, 0) },
		"attention": func() error { return s.Attention(attention, 0) },
	} {
		allocations := testing.AllocsPerRun(100, func() { must(t, call()) })
		if allocations != 0 {
			t.Errorf("%s: %v allocations", name, allocations)
		}
	}
}

func BenchmarkVerify(b *testing.B) {
	s := cpuSession(b)
	args := VerifyArgs{
		Draft: Of([]int32{1, 2}, 1, 2), Target: Of([]int32{1, 2, 3}, 1, 3),
		Accepted: Of(make([]int32, 1)), NextToken: Of(make([]int32, 1)),
	}
	b.ReportAllocs()
	for b.Loop() {
		if err := s.Verify(args, 0); err != nil {
			b.Fatal(err)
		}
	}
}

func TestEveryCallOfTheHeaderIsBound(t *testing.T) {
	read := func(path string) string {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	bound := read("calls.h") + read("session.go") + read("forecast.go") + read("kvcache.go") + read("decoder.go") +
		read("budget.go") + read("tree.go")
	calls := regexp.MustCompile(`\bvwd_\w+\(`).FindAllString(read("../../include/vanward.h"), -1)
	if len(calls) < 30 {
		t.Errorf("found only %d calls", len(calls))
	}
	for _, call := range calls {
		if call != "vwd_abi_version(" && !strings.Contains(bound, call) { // the linker compares the soname
			t.Errorf("%s) is not bound", call)
		}
	}
}

func equal[T comparable](t *testing.T, what string, found []T, expected ...T) {
	t.Helper()
	if !slices.Equal(found, expected) {
		t.Errorf("%s: found %v, expected %v", what, found, expected)
	}
}

func TestSessionLogsToGo(t *testing.T) {
	var lines []string
	options := Options{Device: DeviceCPU, Log: func(level LogLevel, text string) {
		lines = append(lines, fmt.Sprint(level, " ", text))
	}, LogLevel: LogInfo, Check: CheckNothing}
	session, err := NewSession(options)
	if err != nil {
		t.Fatal(err)
	}
	session.Close()
	if len(lines) != 1 || !strings.HasPrefix(lines[0], "2 session on the CPU") {
		t.Errorf("logged %q", lines)
	}
	options.Variants = "predictor=unknown"
	if _, err := NewSession(options); err == nil || !strings.Contains(err.Error(), "options.variants: ") {
		t.Errorf("an unknown variant: %v", err)
	}
}

func TestSessionThatChecksContentsNamesTheElement(t *testing.T) {
	session, err := NewSession(Options{Device: DeviceCPU, Check: CheckContents})
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	lens, counts := []int32{3, 4}, make([]int32, 2)
	args := TopKArgs{
		K: 2, Scores: Of(make([]float32, 6), 2, 3), Lens: Of(lens), IDs: Of(make([]int32, 4), 2, 2), Counts: Of(counts),
	}
	wantInvalid(t, session.TopK(args, 0), "lens[1]: 4; expected 0 to 3")
	lens[1] = 1
	must(t, session.TopK(args, 0))
	equal(t, "counts", counts, 2, 1)
}
