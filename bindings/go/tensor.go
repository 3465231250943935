package vanward

import (
	"fmt"
	"math"
	"slices"
	"unsafe"
)

// DType is an element type: DLPack's code above its width in bits.
type DType uint16

const (
	I8   DType = 0<<8 | 8
	I16  DType = 0<<8 | 16
	I32  DType = 0<<8 | 32
	I64  DType = 0<<8 | 64
	U8   DType = 1<<8 | 8
	U16  DType = 1<<8 | 16
	U32  DType = 1<<8 | 32
	U64  DType = 1<<8 | 64
	F16  DType = 2<<8 | 16
	F32  DType = 2<<8 | 32
	F64  DType = 2<<8 | 64
	BF16 DType = 4<<8 | 16
	Bool DType = 6<<8 | 8

	F8E4M3 DType = 10<<8 | 8 // E4M3FN: no infinities
	F8E5M2 DType = 12<<8 | 8
)

// Floats that Go lacks, as bits.
type (
	Half       uint16
	BFloat16   uint16
	Float8E4M3 uint8
	Float8E5M2 uint8
)

// Element is what a slice behind a Tensor may hold.
type Element interface {
	int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64 | float32 | float64 | bool |
		Half | BFloat16 | Float8E4M3 | Float8E5M2
}

func dtypeOf[T Element]() DType {
	var zero T
	switch any(zero).(type) {
	case int8:
		return I8
	case int16:
		return I16
	case int32:
		return I32
	case int64:
		return I64
	case uint8:
		return U8
	case uint16:
		return U16
	case uint32:
		return U32
	case uint64:
		return U64
	case float32:
		return F32
	case float64:
		return F64
	case bool:
		return Bool
	case Half:
		return F16
	case BFloat16:
		return BF16
	case Float8E4M3:
		return F8E4M3
	default:
		return F8E5M2
	}
}

// Memory says where a tensor lies.
type Memory struct {
	deviceType int32
	deviceID   int32
}

var (
	HostMemory   = Memory{1, 0}
	PinnedMemory = Memory{3, 0} // from PinnedAlloc, or the CUDA runtime's own
)

// DeviceMemory is that of one CUDA device.
func DeviceMemory(ordinal int) Memory { return Memory{2, int32(ordinal)} }

const maxRank = 5

// Tensor is a strided view of memory. The zero Tensor is an absent one. A view that its slice cannot hold is made all
// the same; the call that gets it fails and names the argument.
type Tensor struct {
	slice   unsafe.Pointer // start of a slice, pinned during each call; nil for an address
	address uintptr        // memory that Go does not manage
	room    int            // elements from the start on
	dtype   DType
	memory  Memory
	rank    int
	shape   [maxRank]int64
	strides [maxRank]int64
	fault   string // why no call may have it; other strides may mend it, unless it was cut
	cut     bool   // Slice or Select found a fault
}

// Of views a slice as a contiguous tensor; without a shape, as one dimension.
//
// Calls on a CPU session have returned when they are done, so the memory of any slice will do. A CUDA session takes
// only memory that Go does not move or free: see At and PinnedAlloc.
func Of[T Element](data []T, shape ...int) Tensor {
	t := Tensor{slice: unsafe.Pointer(unsafe.SliceData(data)), room: len(data), dtype: dtypeOf[T](), memory: HostMemory}
	if len(shape) == 0 {
		return t.shaped([]int{len(data)})
	}
	return t.shaped(shape)
}

// At views memory that Go does not manage, such as the device's, as a contiguous tensor. It stays valid and unshared
// until the stream has passed the calls that take it.
func At(address uintptr, dtype DType, memory Memory, shape ...int) Tensor {
	t := Tensor{address: address, room: math.MaxInt, dtype: dtype, memory: memory}
	return t.shaped(shape)
}

// Address is where the first element lies, in Memory. What a view of the library's holds, such as one of DecoderInfo, is read there: once the stream
// has passed the call that writes it.
func (t Tensor) Address() uintptr {
	if t.slice != nil {
		return uintptr(t.slice)
	}
	return t.address
}

// Memory is where the elements lie.
func (t Tensor) Memory() Memory { return t.memory }

// DType is the type of the elements.
func (t Tensor) DType() DType { return t.dtype }

// Shape is the extents of the dimensions; without any, of an absent tensor.
func (t Tensor) Shape() []int { return t.extents(t.shape) }

// Strides are the elements from one index of a dimension to the next.
func (t Tensor) Strides() []int { return t.extents(t.strides) }

func (t Tensor) extents(of [maxRank]int64) []int {
	ints := make([]int, min(t.rank, maxRank))
	for d := range ints {
		ints[d] = int(of[d])
	}
	return ints
}

// WithStrides gives a tensor other strides, in elements.
func (t Tensor) WithStrides(strides ...int) Tensor {
	if len(strides) != t.rank {
		t.fault = fmt.Sprintf("%d strides for rank %d", len(strides), t.rank)
		return t
	}
	for d := range min(t.rank, maxRank) {
		t.strides[d] = int64(strides[d])
	}
	return t.checked()
}

// In says that the memory is not what its origin suggests: Of(slice).In(PinnedMemory) for a slice from PinnedAlloc.
func (t Tensor) In(memory Memory) Tensor {
	t.memory = memory
	return t
}

// Slice keeps the elements from … to − 1 of one dimension: rows of a batch, tokens of a cache. Where there are none, the call that
// gets the view fails.
func (t Tensor) Slice(dim, from, to int) Tensor {
	if !t.has(dim, from, to) {
		return t
	}
	t.move(int64(from) * t.strides[dim])
	t.shape[dim] = int64(to - from)
	return t.checked()
}

// Select takes one element of a dimension, which the view then lacks: kv.Select(1, 0) are the keys of kv [blocks, 2, P, Hk, D].
func (t Tensor) Select(dim, index int) Tensor {
	if !t.has(dim, index, index+1) {
		return t
	}
	t.move(int64(index) * t.strides[dim])
	copy(t.shape[dim:], t.shape[dim+1:])
	copy(t.strides[dim:], t.strides[dim+1:])
	t.rank--
	return t.checked()
}

// has finds cuts that the view cannot have: they take at least one element of a dimension, all of them inside.
func (t *Tensor) has(dim, from, to int) bool {
	switch {
	case t.fault != "": // the first fault is the one that is told
	case t.rank > maxRank:
		t.fault = fmt.Sprintf("cut from rank %d; expected at most %d", t.rank, maxRank)
	case dim < 0 || dim >= t.rank:
		t.fault = fmt.Sprintf("cut in dimension %d of %d", dim, t.rank)
	case from < 0 || to <= from || int64(to) > t.shape[dim]:
		t.fault = fmt.Sprintf("elements %d to %d cut from dimension %d, which has %d; expected at least one, all inside",
			from, to, dim, t.shape[dim])
	case t.dtype&7 != 0:
		t.fault = fmt.Sprintf("cut from elements of %d bits; expected whole bytes", t.dtype&0xff)
	}
	t.cut = t.fault != ""
	return !t.cut
}

// move lets the view begin so many elements later. A view without elements stays where it is.
func (t *Tensor) move(elements int64) {
	bytes := elements * int64(t.dtype&0xff) / 8
	switch {
	case t.slice == nil:
		t.address += uintptr(bytes)
	case elements < int64(t.room):
		t.slice = unsafe.Add(t.slice, bytes)
		t.room -= int(elements)
	}
}

func (t Tensor) shaped(shape []int) Tensor {
	t.rank = len(shape)
	stride := int64(1) // wraps for a hostile shape, which checked or the library refuses
	for d := min(t.rank, maxRank) - 1; d >= 0; d-- {
		t.shape[d], t.strides[d] = int64(shape[d]), stride
		stride *= int64(shape[d])
	}
	return t.checked()
}

// checked finds the views that reach beyond their slice. Ranks and extents out of range are left to the library.
func (t Tensor) checked() Tensor {
	if t.cut {
		return t
	}
	t.fault = ""
	if t.rank > maxRank || t.slice == nil && t.address != 0 {
		return t
	}
	shape, strides := t.shape[:t.rank], t.strides[:t.rank]
	if slices.ContainsFunc(shape, func(n int64) bool { return n <= 0 }) {
		return t
	}
	fits := t.room > 0
	reach := int64(t.room) - 1
	for d, steps := range shape {
		steps--
		if steps == 0 || strides[d] == 0 {
			continue
		}
		if strides[d] < 0 || steps > reach/strides[d] {
			fits = false
			break
		}
		reach -= steps * strides[d]
	}
	if !fits {
		t.fault = fmt.Sprintf("shape %v with strides %v of a slice of %d; expected all elements inside",
			slices.Clone(shape), slices.Clone(strides), t.room)
	}
	return t
}
