package vanward

import (
	"errors"
	"math"
	"math/rand"
	"reflect"
	"testing"
	"time"
)

// Every call takes arguments that nobody means: it fails with an *Error or it works, and Go goes on.
func TestRandomArgumentsNeverPanic(t *testing.T) {
	seed := time.Now().UnixNano()
	t.Log("seed", seed)
	random := rand.New(rand.NewSource(seed))
	session := reflect.ValueOf(cpuSession(t))
	calls := 0
	for i := range session.NumMethod() {
		method := session.Method(i)
		if method.Type().NumIn() != 2 || method.Type().In(1) != reflect.TypeFor[Stream]() || method.Type().NumOut() != 1 {
			continue
		}
		calls++
		for range 300 {
			args := reflect.New(method.Type().In(0)).Elem()
			scramble(random, args)
			if err, _ := method.Call([]reflect.Value{args, reflect.ValueOf(Stream(0))})[0].Interface().(error); err != nil {
				var e *Error
				if !errors.As(err, &e) || errors.Is(err, ErrInternal) || e.Message == "" {
					t.Errorf("%s: %v", session.Type().Method(i).Name, err)
				}
			}
		}
	}
	if calls != 22 {
		t.Errorf("%d calls; expected every one that takes arguments and a stream", calls)
	}
}

func pick[T any](random *rand.Rand, from ...T) T { return from[random.Intn(len(from))] }

func scramble(random *rand.Rand, value reflect.Value) {
	switch {
	case value.Type() == reflect.TypeFor[Tensor]():
		value.Set(reflect.ValueOf(randomTensor(random)))
	case value.Kind() == reflect.Struct:
		for i := range value.NumField() {
			scramble(random, value.Field(i))
		}
	case value.Kind() == reflect.Pointer:
		if random.Intn(2) == 0 {
			value.Set(reflect.New(value.Type().Elem()))
			scramble(random, value.Elem())
		}
	case value.Kind() == reflect.Slice:
		value.Set(reflect.MakeSlice(value.Type(), random.Intn(3), 3))
		for i := range value.Len() {
			scramble(random, value.Index(i))
		}
	case value.Kind() == reflect.Int:
		value.SetInt(pick[int64](random, -1, 0, 1, 2, 4, 16, 1<<31, 1<<32, math.MaxInt64))
	case value.Kind() == reflect.Float32:
		value.SetFloat(pick(random, 0, 1, -1, 1.5, math.NaN(), math.Inf(1)))
	case value.Kind() == reflect.Uint32:
		value.SetUint(pick[uint64](random, 0, 1, 2, 3, 4, 5, math.MaxUint32))
	case value.Kind() == reflect.Bool:
		value.SetBool(pick(random, false, true))
	default:
		panic("a kind of field that this test does not know: " + value.Type().String())
	}
}

func randomTensor(random *rand.Rand) Tensor {
	shape := make([]int, random.Intn(7))
	for d := range shape {
		shape[d] = pick(random, 1, 1, 1, 2, 2, 4, 16, 16, 0, -1, math.MaxInt)
	}
	var t Tensor
	switch random.Intn(8) {
	case 0:
	case 1:
		t = Of(make([]int64, 256), shape...)
	case 2:
		t = Of(make([]uint8, 256), shape...)
	case 3:
		t = Of(make([]Half, 256), shape...)
	case 4, 5:
		t = Of(make([]int32, 256), shape...)
	default:
		t = Of(make([]float32, 1024), shape...)
	}
	if random.Intn(4) == 0 {
		strides := make([]int, len(shape))
		for d := range strides {
			strides[d] = pick(random, 0, 1, 2, 16, -1, math.MinInt)
		}
		t = t.WithStrides(strides...)
	}
	if random.Intn(8) == 0 {
		t = t.In(pick(random, DeviceMemory(0), PinnedMemory, Memory{}))
	}
	return t
}
