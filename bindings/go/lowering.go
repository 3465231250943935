package vanward

// #include "calls.h"
import "C"

import (
	"fmt"
	"math"
	"runtime"
	"strings"
	"unsafe"
)

// A lowering turns the arguments of one call into C's. It pins the Go memory that they point to until release, and
// keeps the first thing that C's types cannot express as the call's error.
type lowering struct {
	pins   runtime.Pinner
	err    error
	member int    // 1 + index in the array being lowered; 0 outside of one
	array  string // its name, where names in it do not begin with it
}

func (l *lowering) release() { l.pins.Unpin() }

func (l *lowering) fail(name, message string) {
	if l.err != nil {
		return
	}
	if l.array != "" {
		name = fmt.Sprintf("%s[%d].%s", l.array, l.member-1, name)
	} else if l.member > 0 {
		array, field, _ := strings.Cut(name, ".")
		if array == "kv" {
			array = "layers"
		}
		name = fmt.Sprintf("%s[%d]", array, l.member-1)
		if field != "" {
			name += "." + field
		}
	}
	l.err = invalid(name, message)
}

func (l *lowering) count(name string, n, most int) int {
	switch {
	case n < 0:
		l.fail(name, fmt.Sprintf("%d; expected at least 0", n))
	case n > most:
		l.fail(name, fmt.Sprintf("%d; expected at most %d", n, most))
	default:
		return n
	}
	return 0
}

// text is a NUL-terminated copy, NULL for "".
func (l *lowering) text(s string) *C.char {
	if s == "" {
		return nil
	}
	bytes := append([]byte(s), 0)
	l.pins.Pin(&bytes[0])
	return (*C.char)(unsafe.Pointer(&bytes[0]))
}

func (l *lowering) uint32(name string, n int) C.uint32_t {
	return C.uint32_t(l.count(name, n, math.MaxUint32))
}

// arrays is the length of two arrays that go together.
// list is an array of such numbers, pinned; nil without any.
func (l *lowering) list(name string, values []int) *C.uint32_t {
	if len(values) == 0 {
		return nil
	}
	c := make([]C.uint32_t, len(values))
	for n, value := range values {
		c[n] = l.uint32(fmt.Sprintf("%s[%d]", name, n), value)
	}
	l.pins.Pin(&c[0])
	return &c[0]
}

func (l *lowering) arrays(name string, n, other int) C.uint32_t {
	if n != other {
		l.fail(name, fmt.Sprintf("%d tensors; expected %d, as many as rows", other, n))
	}
	return l.uint32("tensor_count", n)
}

func (l *lowering) tensor(name string, t Tensor) C.vwd_tensor {
	if t.fault != "" {
		l.fail(name, t.fault)
		return C.vwd_tensor{}
	}
	c := C.vwd_tensor{
		device_type: C.int32_t(t.memory.deviceType),
		device_id:   C.int32_t(t.memory.deviceID),
		dtype_code:  C.uint8_t(t.dtype >> 8),
		dtype_bits:  C.uint8_t(t.dtype & 0xff),
		lanes:       1,
		ndim:        C.int32_t(t.rank),
	}
	for d := range min(t.rank, maxRank) {
		c.shape[d], c.strides[d] = C.int64_t(t.shape[d]), C.int64_t(t.strides[d])
	}
	switch {
	case t.slice != nil:
		l.pins.Pin(t.slice)
		c.data = t.slice
	case t.address != 0 && t.address < firstPage:
		l.fail(name, fmt.Sprintf("address %#x; expected mapped memory", t.address))
	default:
		// An address that Go does not manage: it becomes a pointer only here, where C takes it.
		*(*uintptr)(unsafe.Pointer(&c.data)) = t.address
	}
	return c
}

// The runtime takes a pointer below this for corruption and ends the process.
const firstPage = 4096

func (l *lowering) tensors(name string, list []Tensor) *C.vwd_tensor {
	if len(list) == 0 {
		return nil
	}
	array := make([]C.vwd_tensor, len(list))
	for i, t := range list {
		l.member = i + 1
		array[i] = l.tensor(name, t)
	}
	l.member = 0
	l.pins.Pin(&array[0])
	return &array[0]
}

// The names of a group's tensors come as literals: joining them here would allocate in every call.
func (l *lowering) blockList(ids, counts, slots string, list BlockList) C.vwd_block_list {
	return C.vwd_block_list{
		ids: l.tensor(ids, list.IDs), counts: l.tensor(counts, list.Counts), slots: l.tensor(slots, list.Slots),
	}
}

func (l *lowering) pagedKV(kv PagedKV) C.vwd_paged_kv {
	return C.vwd_paged_kv{
		struct_size: C.sizeof_vwd_paged_kv,
		k:           l.tensor("kv.k", kv.K),
		v:           l.tensor("kv.v", kv.V),
		page_table:  l.tensor("kv.page_table", kv.PageTable),
		seq_lens:    l.tensor("kv.seq_lens", kv.SeqLens),
		k_scale:     l.tensor("kv.k_scale", kv.KScale),
		v_scale:     l.tensor("kv.v_scale", kv.VScale),
		int4:        l.int4KV(kv.Int4),
	}
}

func (l *lowering) int4KV(kv *Int4KV) *C.vwd_int4_kv {
	if kv == nil {
		return nil
	}
	c := &C.vwd_int4_kv{
		struct_size:  C.sizeof_vwd_int4_kv,
		block_size:   l.uint32("kv.int4.block_size", kv.BlockSize),
		exact_tokens: l.uint32("kv.int4.exact_tokens", kv.ExactTokens),
		k:            l.tensor("kv.int4.k", kv.K),
		v:            l.tensor("kv.int4.v", kv.V),
		k_scale:      l.tensor("kv.int4.k_scale", kv.KScale),
		v_scale:      l.tensor("kv.int4.v_scale", kv.VScale),
		page_table:   l.tensor("kv.int4.page_table", kv.PageTable),
		coded_lens:   l.tensor("kv.int4.coded_lens", kv.CodedLens),
		means:        l.tensor("kv.int4.means", kv.Means),
		mean_table:   l.tensor("kv.int4.mean_table", kv.MeanTable),
		weights:      l.tensor("kv.int4.weights", kv.Weights),
	}
	l.pins.Pin(c)
	return c
}

func (l *lowering) remainder(remainder *Remainder) *C.vwd_remainder {
	if remainder == nil {
		return nil
	}
	c := &C.vwd_remainder{
		struct_size: C.sizeof_vwd_remainder,
		rows:        l.tensor("remainder.rows", remainder.Rows),
		tokens:      l.tensor("remainder.tokens", remainder.Tokens),
		mean_k:      l.tensor("remainder.mean_k", remainder.MeanK),
		mean_v:      l.tensor("remainder.mean_v", remainder.MeanV),
		covariance:  l.tensor("remainder.covariance", remainder.Covariance),
	}
	l.pins.Pin(c)
	return c
}

func (l *lowering) layers(list []PagedKV) **C.vwd_paged_kv {
	if len(list) == 0 {
		return nil
	}
	array := make([]*C.vwd_paged_kv, len(list))
	for i, kv := range list {
		l.member = i + 1
		layer := l.pagedKV(kv)
		l.pins.Pin(&layer)
		array[i] = &layer
	}
	l.member = 0
	l.pins.Pin(&array[0])
	return &array[0]
}

func (l *lowering) index(index Index) C.vwd_index {
	return C.vwd_index{
		struct_size:  C.sizeof_vwd_index,
		kind:         C.uint32_t(index.Kind),
		block_size:   l.uint32("index.block_size", index.BlockSize),
		window:       l.uint32("index.window", index.Window),
		stride:       l.uint32("index.stride", index.Stride),
		table:        l.tensor("index.table", index.Table),
		key_max:      l.tensor("index.key_max", index.KeyMax),
		key_min:      l.tensor("index.key_min", index.KeyMin),
		means:        l.tensor("index.means", index.Means),
		labels:       l.tensor("index.labels", index.Labels),
		label_scale:  l.tensor("index.label_scale", index.LabelScale),
		label_min:    l.tensor("index.label_min", index.LabelMin),
		channels:     l.tensor("index.channels", index.Channels),
		axes:         l.tensor("index.axes", index.Axes),
		axis_range:   l.tensor("index.axis_range", index.AxisRange),
		axis_weights: l.tensor("index.axis_weights", index.AxisWeights),
		axis_centre:  l.tensor("index.axis_centre", index.AxisCentre),
	}
}

func (l *lowering) updates(list []IndexUpdateArgs) **C.vwd_index_update_args {
	if len(list) == 0 {
		return nil
	}
	array := make([]*C.vwd_index_update_args, len(list))
	l.array = "updates"
	for i, args := range list {
		l.member = i + 1
		update, index := args.lower(l)
		update.index = &index
		l.pins.Pin(&index)
		l.pins.Pin(&update)
		array[i] = &update
	}
	l.array, l.member = "", 0
	l.pins.Pin(&array[0])
	return &array[0]
}

func (l *lowering) state(acc, m, sum string, s AttentionState) C.vwd_attention_state {
	return C.vwd_attention_state{acc: l.tensor(acc, s.Acc), m: l.tensor(m, s.M), l: l.tensor(sum, s.L)}
}

func (l *lowering) states(list []AttentionState) *C.vwd_attention_state {
	if len(list) == 0 {
		return nil
	}
	array := make([]C.vwd_attention_state, len(list))
	for i, s := range list {
		l.member = i + 1
		array[i] = l.state("inputs.acc", "inputs.m", "inputs.l", s)
	}
	l.member = 0
	l.pins.Pin(&array[0])
	return &array[0]
}

func (l *lowering) partials(acc, m, sum string, p AttentionPartials) C.vwd_attention_partials {
	return C.vwd_attention_partials{acc: l.tensor(acc, p.Acc), m: l.tensor(m, p.M), l: l.tensor(sum, p.L)}
}

func (l *lowering) predictorState(s PredictorState) C.vwd_predictor_state {
	return C.vwd_predictor_state{level: l.tensor("state.level", s.Level), trend: l.tensor("state.trend", s.Trend)}
}

func (l *lowering) rope(rope Rope) C.vwd_rope {
	return C.vwd_rope{
		struct_size:      C.sizeof_vwd_rope,
		style:            C.uint32_t(rope.Style),
		rotary_dim:       l.uint32("rope.rotary_dim", rope.RotaryDim),
		theta:            C.float(rope.Theta),
		attention_factor: C.float(rope.AttentionFactor),
		inv_freq:         l.tensor("rope.inv_freq", rope.InvFreq),
	}
}

func (l *lowering) grid(points []Holt) *C.vwd_holt {
	if len(points) == 0 {
		return nil
	}
	array := make([]C.vwd_holt, len(points))
	for i, point := range points {
		array[i] = point.c()
	}
	l.pins.Pin(&array[0])
	return &array[0]
}

func (h Holt) c() C.vwd_holt {
	return C.vwd_holt{alpha: C.float(h.Alpha), beta: C.float(h.Beta), gamma: C.float(h.Gamma)}
}
