package vanward

// #include "calls.h"
// #cgo noescape kv_cache_append
// #cgo nocallback kv_cache_append
// #cgo noescape kv_cache_compact
// #cgo nocallback kv_cache_compact
// #cgo noescape kv_cache_resolve
// #cgo nocallback kv_cache_resolve
import "C"

import (
	"fmt"
	"unsafe"
)

// KvCacheOptions are those of NewKvCache; vwd_kv_cache_options documents them.
//
//	Options of `vwd_kv_cache_create`. A size without a default must be at least 1.
type KvCacheOptions struct {
	Layers       int
	KVHeads      int
	BlockSize    int
	KeyDim       int
	ValueDim     int
	DType        DType
	TokenScales  bool // FP8: each token has scales of its own
	MaxSequences int
	MaxBlocks    int
	HostBlocks   int
	Slots        int
	Hold         int
	LayerSlots   []int // the slots of each layer, with Slots 0; empty: every layer has Slots
	Coding       KvCacheCoding
	Weights      []float32 // with KvCacheInt4: of key channels, [layers, Hk, D]; empty: 1
	SlotCoding   KvCacheSlotCoding

	// Progress is told, by the goroutine that makes the cache, how many of how many bytes have been allocated; may be nil.
	Progress func(done, total uint64)
}

// KvCacheCoding says how whole blocks lie on the host.
type KvCacheCoding uint32

const (
	KvCacheExact KvCacheCoding = C.VWD_CODING_EXACT
	KvCacheInt4  KvCacheCoding = C.VWD_CODING_INT4
)

// KvCacheSlotCoding says how blocks lie in the slots that they are fetched into.
type KvCacheSlotCoding uint32

const (
	KvCacheSlotsAsStored KvCacheSlotCoding = C.VWD_SLOTS_AS_STORED
	KvCacheSlotsDecoded  KvCacheSlotCoding = C.VWD_SLOTS_DECODED // with KvCacheInt4: codes are decoded as they arrive
)

// KvCache keeps all keys and values in host memory, and what is being read in slots. It outlives its session.
type KvCache struct {
	handle handle[*C.vwd_kv_cache]
	log    *callback
}

// NewKvCache creates a cache without sequences.
func (s *Session) NewKvCache(options KvCacheOptions) (*KvCache, error) {
	var l lowering
	defer l.release()
	c := options.lower(&l)
	if options.Progress != nil {
		progress := newCallback(options.Progress)
		defer progress.free()
		progress.setProgress(&c)
	}
	k := &KvCache{}
	err := s.create(&l, &k.log, func(h *C.vwd_session) C.outcome { return C.kv_cache_create(h, &c, &k.handle.c) })
	if err != nil {
		return nil, err
	}
	return k, nil
}

func (options KvCacheOptions) lower(l *lowering) C.vwd_kv_cache_options {
	c := C.vwd_kv_cache_options{
		struct_size:   C.sizeof_vwd_kv_cache_options,
		layers:        l.uint32("options.layers", options.Layers),
		kv_heads:      l.uint32("options.kv_heads", options.KVHeads),
		block_size:    l.uint32("options.block_size", options.BlockSize),
		key_dim:       l.uint32("options.key_dim", options.KeyDim),
		value_dim:     l.uint32("options.value_dim", options.ValueDim),
		dtype_code:    C.uint32_t(options.DType >> 8),
		dtype_bits:    C.uint32_t(options.DType & 0xff),
		max_sequences: l.uint32("options.max_sequences", options.MaxSequences),
		max_blocks:    l.uint32("options.max_blocks", options.MaxBlocks),
		host_blocks:   l.uint32("options.host_blocks", options.HostBlocks),
		slots:         l.uint32("options.slots", options.Slots),
		hold:          l.uint32("options.hold", options.Hold),
		coding:        C.uint32_t(options.Coding),
		slot_coding:   C.uint32_t(options.SlotCoding),
	}
	if options.TokenScales {
		c.token_scales = 1
	}
	if n := len(options.LayerSlots); n > 0 && n != options.Layers {
		l.fail("options.layer_slots", fmt.Sprintf("%d numbers; expected %d, one a layer", n, options.Layers))
	}
	c.layer_slots = l.list("options.layer_slots", options.LayerSlots)
	if n, all := len(options.Weights), options.Layers*options.KVHeads*options.KeyDim; n > 0 {
		if n != all {
			l.fail("options.weights", fmt.Sprintf("%d numbers; expected %d, [layers, Hk, D]", n, all))
		}
		l.pins.Pin(&options.Weights[0])
		c.weights = (*C.float)(&options.Weights[0])
	}
	return c
}

// KvCacheSizes is vwd_kv_cache_sizes: what a cache takes.
//
//	The memory that a cache takes, filled by `vwd_kv_cache_capacity` before the cache is created.
type KvCacheSizes struct {
	RunBytes         uint64
	HostBytes        uint64
	DeviceBytes      uint64
	TotalSlots       uint64
	LargestSelection uint64
	SlotBytes        uint64
}

// Capacity tells what a cache of these options takes, and allocates nothing.
func (options KvCacheOptions) Capacity() (KvCacheSizes, error) {
	var l lowering
	defer l.release()
	c := options.lower(&l)
	if l.err != nil {
		return KvCacheSizes{}, l.err
	}
	d := C.vwd_kv_cache_sizes{struct_size: C.sizeof_vwd_kv_cache_sizes}
	err := failure(C.kv_cache_capacity(&c, &d))
	return KvCacheSizes{
		RunBytes: uint64(d.run_bytes), HostBytes: uint64(d.host_bytes), DeviceBytes: uint64(d.device_bytes),
		TotalSlots: uint64(d.total_slots), LargestSelection: uint64(d.largest_selection),
		SlotBytes: uint64(d.slot_bytes),
	}, err
}

// Close releases the cache once calls in progress have returned. Closing again does nothing; calls after it fail.
func (k *KvCache) Close() error {
	if k != nil {
		k.handle.close(func(c *C.vwd_kv_cache) {
			C.vwd_kv_cache_release(c)
			k.log.free()
		})
	}
	return nil
}

func (k *KvCache) run(l *lowering, call func(*C.vwd_kv_cache) C.outcome) error {
	if l.err != nil {
		return l.err
	}
	if k == nil {
		return invalid("cache", "nil")
	}
	return k.handle.use("cache", call)
}

// Add begins a sequence without tokens and tells its number.
func (k *KvCache) Add(stream Stream) (int, error) {
	var sequence C.uint32_t
	err := k.run(&lowering{}, func(h *C.vwd_kv_cache) C.outcome { return C.kv_cache_add(h, &sequence, stream.c()) })
	return int(sequence), err
}

// Extend makes room for so many tokens in all.
func (k *KvCache) Extend(sequence int, tokens uint64, stream Stream) error {
	var l lowering
	n := l.uint32("sequence", sequence)
	return k.run(&l, func(h *C.vwd_kv_cache) C.outcome {
		return C.kv_cache_extend(h, n, C.uint64_t(tokens), stream.c())
	})
}

// Fork begins a sequence with the first tokens of another and tells its number.
func (k *KvCache) Fork(sequence int, tokens uint64, stream Stream) (int, error) {
	var l lowering
	var made C.uint32_t
	n := l.uint32("sequence", sequence)
	err := k.run(&l, func(h *C.vwd_kv_cache) C.outcome {
		return C.kv_cache_fork(h, n, C.uint64_t(tokens), &made, stream.c())
	})
	return int(made), err
}

// Truncate cuts a sequence to its first tokens.
func (k *KvCache) Truncate(sequence int, tokens uint64, stream Stream) error {
	var l lowering
	n := l.uint32("sequence", sequence)
	return k.run(&l, func(h *C.vwd_kv_cache) C.outcome {
		return C.kv_cache_truncate(h, n, C.uint64_t(tokens), stream.c())
	})
}

// Free ends a sequence.
func (k *KvCache) Free(sequence int, stream Stream) error {
	var l lowering
	n := l.uint32("sequence", sequence)
	return k.run(&l, func(h *C.vwd_kv_cache) C.outcome { return C.kv_cache_free(h, n, stream.c()) })
}

// KvCacheAppendArgs are the arguments of KvCache.Append; vwd_kv_cache_append documents them.
//
//	Writes the keys and values of new tokens of one layer: token t of row i becomes token begin[i] + t of its sequence. A block
//	that gets its last token is written back to host memory.
//
//	layer                     0 … layers−1.
//	sequences  [B]            int32. At most max_sequences, distinct but for −1, an idle row.
//	begin      [B]            int32. The number of tokens that the sequence has, or fewer after drafts were rejected; not
//	                          below the beginning of its last two blocks, nor below the token where it was last forked
//	                          or truncated.
//	lens       [B]            int32, optional (absent: T). Clamped to 0 … T.
//	k          [B, T, Hk, D]  The cache's dtype.
//	v          [B, T, Hk, Dv] The cache's dtype.
//	k_scale    [B, T, Hk]     float32. Given with token_scales and only then.
//	v_scale    [B, T, Hk]     float32. Given with token_scales and only then.
//
//	Afterwards the layer has begin[i] + lens[i] tokens of the sequence; a row of 0 tokens changes nothing, wherever it begins. A token
//	has no place, and is dropped and counted, if no sequence has that number, as of an idle row, if `vwd_kv_cache_extend` has reserved no
//	block for it, or if tokens before it are missing: if the layer has fewer than begin[i] tokens. Lists that were resolved before stay
//	valid for up to S more tokens of a sequence. T may be any number; a prefill appends chunks of many blocks.
//
//	The block that leaves the tail is copied, on the device, to a slot for each KV head, where later resolves find it resident. It takes a
//	slot that none of the last `hold` resolves of the layer named and that waits for no copy. If it finds none, the block is
//	missed when it is next named. The next resolve may give the slot away, as if the block had been named `hold` resolves ago. Of an
//	append of several blocks, only the last one that leaves the tail gets slots. Blocks that leave the tail because of a fork or a truncation
//	get none.
//
//	Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may be
//	captured. Calls of one layer are ordered by the caller. Tensors are borrowed until the stream passes this point.
//	Errors: INVALID_ARGUMENT (the message names the argument), DRIVER, INTERNAL.
type KvCacheAppendArgs struct {
	Layer     int
	Sequences Tensor
	Begin     Tensor
	Lens      Tensor
	K         Tensor
	V         Tensor
	KScale    Tensor
	VScale    Tensor
}

// Append writes the keys and values of new tokens of one layer.
func (k *KvCache) Append(args KvCacheAppendArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	return k.run(&l, func(h *C.vwd_kv_cache) C.outcome { return C.kv_cache_append(h, &c, stream.c()) })
}

func (args KvCacheAppendArgs) lower(l *lowering) C.vwd_kv_cache_append_args {
	return C.vwd_kv_cache_append_args{
		struct_size: C.sizeof_vwd_kv_cache_append_args,
		layer:       l.uint32("layer", args.Layer),
		sequences:   l.tensor("sequences", args.Sequences),
		begin:       l.tensor("begin", args.Begin),
		lens:        l.tensor("lens", args.Lens),
		k:           l.tensor("k", args.K),
		v:           l.tensor("v", args.V),
		k_scale:     l.tensor("k_scale", args.KScale),
		v_scale:     l.tensor("v_scale", args.VScale),
	}
}

// KvCacheCompactArgs are the arguments of KvCache.Compact; vwd_kv_cache_compact documents them.
//
//	Moves the tokens of accepted tree nodes to where a sequence's tokens follow each other, in all layers at once, and ends the sequence there.
//
//	Node n of a tree was appended as token bases[i] + n of its sequence. The token of path[i, j] moves to bases[i] + j, for j from 0 on as long
//	as path ascends and, where accepted is given, up to accepted[i]; what it finds is as `vwd_verify_tree` gives it. With m nodes on the path each
//	layer has bases[i] + m tokens of the sequence afterwards. With none, because path[i, 0] or accepted[i] is negative, nothing changes.
//
//	sequences  [B]     int32. At most max_sequences, distinct but for −1, an idle row.
//	bases      [B]     int32 or int64: the position of each root. It lies where the next append might begin: in one of the last two
//	                   blocks, and not below the token where the sequence was last forked or truncated. A row with another one changes
//	                   nothing. A path ends before a node that the layer does not have.
//	path       [B, M]  int32: nodes, ascending from 0 or above. A negative number, or one that does not ascend, ends it.
//	accepted   [B]     int32, optional (absent: path says itself where it ends).
//
//	A block that has all its tokens then, and had others when it was full, is written back to host memory again, with VWD_CODING_INT4 coded anew. That
//	is done on the stream. Summaries of moved tokens are made anew by `vwd_index_update` from bases[i] on. Where nothing was accepted but the root,
//	or the nodes of the path follow each other from the root on, no byte is moved.
//
//	Enqueues on stream and returns; on a CPU session the tokens are there on return. Does not allocate or synchronise; may be captured. Calls of
//	all layers are ordered with it by the caller. Tensors are borrowed until the stream passes this point; the arguments are not written.
//	Errors: INVALID_ARGUMENT (the message names the argument), UNSUPPORTED (CUDA: 2^31 rows of layers and KV heads or more), DRIVER, INTERNAL.
type KvCacheCompactArgs struct {
	Sequences Tensor
	Bases     Tensor
	Path      Tensor
	Accepted  Tensor
}

// Compact moves the tokens of accepted tree nodes to where a sequence's tokens follow each other, in all layers.
func (k *KvCache) Compact(args KvCacheCompactArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	return k.run(&l, func(h *C.vwd_kv_cache) C.outcome { return C.kv_cache_compact(h, &c, stream.c()) })
}

func (args KvCacheCompactArgs) lower(l *lowering) C.vwd_kv_cache_compact_args {
	return C.vwd_kv_cache_compact_args{
		struct_size: C.sizeof_vwd_kv_cache_compact_args,
		sequences:   l.tensor("sequences", args.Sequences),
		bases:       l.tensor("bases", args.Bases),
		path:        l.tensor("path", args.Path),
		accepted:    l.tensor("accepted", args.Accepted),
	}
}

// KvCacheResolveArgs are the arguments of KvCache.Resolve; vwd_kv_cache_resolve documents them.
//
//	Gives each wanted block a slot. Blocks that are resident can be read at once; for the missed blocks the call asks for copies,
//	which `vwd_kv_cache_fetch` makes. A block that several sequences share has one slot and one copy.
//
//	layer                         0 … layers−1.
//	sequences        [B]          int32. At most max_sequences of them.
//	wanted.ids       [B, Hk, cap] or [B, Q, Hk, cap]  int32. Blocks of the sequence, as selected. All entries together are
//	                              at most slots / hold, of the layer's slots: all elements of ids, whatever the counts and
//	                              wherever the blocks lie. Less beside a decoder: `vwd_decoder_create_on_cache`.
//	wanted.counts    [B, Hk] or [B, Q, Hk]  int32. Clamped to 0 … cap.
//	wanted.slots     Shape of ids; out. The slot in which each block lies once its copy has arrived, −1 for a block that
//	                 the sequence does not have. Columns past the count are not written.
//	resident         Out, optional (all three or none): the entries of wanted whose blocks are resident, in the same order.
//	                 Shapes of wanted.
//	missed_counts    Shape of counts; out, optional: number of entries whose blocks are not resident yet.
//
//	A block that one of the last `hold` resolves of a layer named keeps its slot; the slot of a block that has not been named for
//	long is given away first. Attention and repair take these lists with the layer's views: attention reads `resident` at once,
//	repair adds the missed blocks after `vwd_kv_cache_wait`. A prefetch is a resolve of a predicted list and a fetch; a wrong
//	prediction costs bandwidth.
//
//	Enqueues on stream and returns; on a CPU session the result is there on return. Does not allocate or synchronise; may be
//	captured. Calls of one layer are ordered by the caller. Tensors are borrowed until the stream passes this point.
//	Errors: INVALID_ARGUMENT (the message names the argument), DRIVER, INTERNAL.
type KvCacheResolveArgs struct {
	Layer        int
	Sequences    Tensor
	Wanted       BlockList
	Resident     BlockList
	MissedCounts Tensor
}

// Resolve gives each wanted block a slot.
func (k *KvCache) Resolve(args KvCacheResolveArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	return k.run(&l, func(h *C.vwd_kv_cache) C.outcome { return C.kv_cache_resolve(h, &c, stream.c()) })
}

func (args KvCacheResolveArgs) lower(l *lowering) C.vwd_kv_cache_resolve_args {
	return C.vwd_kv_cache_resolve_args{
		struct_size:   C.sizeof_vwd_kv_cache_resolve_args,
		layer:         l.uint32("layer", args.Layer),
		sequences:     l.tensor("sequences", args.Sequences),
		wanted:        l.blockList("wanted.ids", "wanted.counts", "wanted.slots", args.Wanted),
		resident:      l.blockList("resident.ids", "resident.counts", "resident.slots", args.Resident),
		missed_counts: l.tensor("missed_counts", args.MissedCounts),
	}
}

// Fetch makes the copies that resolves of the layer have asked for.
func (k *KvCache) Fetch(layer int, stream Stream) error {
	var l lowering
	n := l.uint32("layer", layer)
	return k.run(&l, func(h *C.vwd_kv_cache) C.outcome { return C.kv_cache_fetch(h, n, stream.c()) })
}

// Wait makes the stream wait for the layer's copies.
func (k *KvCache) Wait(layer int, stream Stream) error {
	var l lowering
	n := l.uint32("layer", layer)
	return k.run(&l, func(h *C.vwd_kv_cache) C.outcome { return C.kv_cache_wait(h, n, stream.c()) })
}

// KvCacheLayer is vwd_kv_cache_layer: where a layer's slots lie.
//
//	Views of a layer's slots, filled by `vwd_kv_cache_view`. They are valid as long as the cache.
//
//	k, v         [total_slots, S, 1, D] and [total_slots, S, 1, Dv]  The pool that the slots of lists name. With VWD_CODING_INT4 and
//	                       VWD_SLOTS_AS_STORED those of the tails alone, n slots; slots from n on name the pages of the codes.
//	k_scale, v_scale       [total_slots, S, 1]  float32; absent without token_scales.
//	tail_k, tail_v  [3·max_sequences, S, Hk, D] and [3·max_sequences, S, Hk, Dv]  The slots of the tails as pages of all KV heads,
//	                       for vwd_index_update. With VWD_CODING_INT4 4·max_sequences: one more for a sequence's first block.
//	tail_k_scale, tail_v_scale  [3·max_sequences, S, Hk]
//	tail_table   [max_sequences, max_blocks]  int32; row n is sequence n, whatever row of a call it has. The page of tail_k that block n of
//	                       a sequence is in while it is one of the two newest; of the first block with VWD_CODING_INT4 always.
//	int4_k, int4_v, int4_k_scale, int4_v_scale, int4_means  With VWD_CODING_INT4 and VWD_SLOTS_AS_STORED, else absent: what `vwd_int4_kv`
//	                       takes beside the slots of lists, [slots, S, 1, …] and [slots, 1, 1, D]; means have the dtype of k.
//	weights  [Hk, D]       Those of `vwd_int4_kv`, with VWD_CODING_INT4; absent if the options had none.
type KvCacheLayer struct {
	K, V, KScale, VScale                 Tensor
	TailK, TailV, TailKScale, TailVScale Tensor
	TailTable                            Tensor
	Int4                                 *Int4KV // with KvCacheInt4 and slots as stored: what PagedKV takes beside the slots of lists
}

// View tells where a layer's slots lie: memory that is the cache's until it is closed.
func (k *KvCache) View(layer int) (KvCacheLayer, error) {
	var l lowering
	n := l.uint32("layer", layer)
	v := C.vwd_kv_cache_layer{struct_size: C.sizeof_vwd_kv_cache_layer}
	err := k.run(&l, func(h *C.vwd_kv_cache) C.outcome { return C.kv_cache_view(h, n, &v) })
	var int4 *Int4KV
	if v.int4_k.data != nil {
		int4 = &Int4KV{
			BlockSize: int(v.int4_k.shape[1]), K: tensorOf(v.int4_k), V: tensorOf(v.int4_v),
			KScale: tensorOf(v.int4_k_scale), VScale: tensorOf(v.int4_v_scale), Means: tensorOf(v.int4_means), Weights: tensorOf(v.weights),
		}
	}
	return KvCacheLayer{
		K: tensorOf(v.k), V: tensorOf(v.v), KScale: tensorOf(v.k_scale), VScale: tensorOf(v.v_scale),
		TailK: tensorOf(v.tail_k), TailV: tensorOf(v.tail_v),
		TailKScale: tensorOf(v.tail_k_scale), TailVScale: tensorOf(v.tail_v_scale),
		TailTable: tensorOf(v.tail_table), Int4: int4,
	}, err
}

// tensorOf views memory of the library's own.
func tensorOf(c C.vwd_tensor) Tensor {
	if c.data == nil {
		return Tensor{}
	}
	shape, strides := make([]int, c.ndim), make([]int, c.ndim)
	for d := range shape {
		shape[d], strides[d] = int(c.shape[d]), int(c.strides[d])
	}
	dtype := DType(c.dtype_code)<<8 | DType(c.dtype_bits)
	memory := Memory{int32(c.device_type), int32(c.device_id)}
	return At(uintptr(unsafe.Pointer(c.data)), dtype, memory, shape...).WithStrides(strides...)
}

// KvCacheStats is vwd_kv_cache_stats: what was counted since the cache was created.
//
//	Counters since the cache was created, filled by `vwd_kv_cache_info`; of one layer by `vwd_kv_cache_layer_info`. An entry is an entry of a list, a block a block of
//	one KV head of one layer.
type KvCacheStats struct {
	Sequences        int
	BlocksInUse      int
	BlocksFree       int
	HostBytes        uint64
	DeviceBytes      uint64
	Hits             uint64
	Misses           uint64
	BytesFetched     uint64
	BytesWrittenBack uint64
	Evictions        uint64
	Unused           uint64
	Waits            uint64
	DroppedTokens    uint64
}

// Info tells what the cache has counted.
func (k *KvCache) Info() (KvCacheStats, error) {
	d := C.vwd_kv_cache_stats{struct_size: C.sizeof_vwd_kv_cache_stats}
	err := k.run(&lowering{}, func(h *C.vwd_kv_cache) C.outcome { return C.kv_cache_info(h, &d) })
	return statsOf(d), err
}

// LayerInfo tells what one layer has counted, and its bytes.
func (k *KvCache) LayerInfo(layer int) (KvCacheStats, error) {
	var l lowering
	n := l.uint32("layer", layer)
	d := C.vwd_kv_cache_stats{struct_size: C.sizeof_vwd_kv_cache_stats}
	err := k.run(&l, func(h *C.vwd_kv_cache) C.outcome { return C.kv_cache_layer_info(h, n, &d) })
	return statsOf(d), err
}

func statsOf(d C.vwd_kv_cache_stats) KvCacheStats {
	return KvCacheStats{
		Sequences: int(d.sequences), BlocksInUse: int(d.blocks_in_use), BlocksFree: int(d.blocks_free),
		HostBytes: uint64(d.host_bytes), DeviceBytes: uint64(d.device_bytes), Hits: uint64(d.hits), Misses: uint64(d.misses),
		BytesFetched: uint64(d.bytes_fetched), BytesWrittenBack: uint64(d.bytes_written_back),
		Evictions: uint64(d.evictions), Unused: uint64(d.unused), Waits: uint64(d.waits),
		DroppedTokens: uint64(d.dropped_tokens),
	}
}

// KvCacheShareArgs are the arguments of ShareSlots; vwd_kv_cache_share_slots documents them.
//
//	Shares slots out to layers by the misses that each has had: the layers in which a slot saves more misses get more of them.
//
//	layers           Layers, at least 1.
//	least            Fewest slots of a layer, at least 1: hold times the largest selection that a resolve will name.
//	total            Slots to share out to all layers together: least · layers … 2^32 − 1.
//	slots   [layers] Host memory. Slots that each layer had while its misses were counted, at least 1 each.
//	misses  [layers] Host memory. Misses of each layer, as `vwd_kv_cache_layer_info` counts them, over the same steps.
//	shares  [layers] Host memory, out: slots of each layer, `total` together; layer_slots of `vwd_kv_cache_options`. It may be
//	                 `slots`.
//
//	The method is water-filling by marginal misses. Misses of a layer are taken to fall as 1 / slots: m(s) = (m + 1) · slots / s, so one
//	more of s slots saves (m + 1) · slots / s². The sum of misses is least where one more slot saves equally many in each layer that has
//	more than `least`: s ∝ √((m + 1) · slots). Numbers are rounded down, and what is left goes where one more slot saves most, to the lower
//	layer if equal. As the curve is known at one point only, a layer counts at half of its part of `slots` at least. A cache with
//	the new shares has new counters: sharing by them again may come closer, and changes nothing once all layers have equal misses per slot.
//
//	Reads and writes host memory during the call. Thread-safe.
//	Errors: INVALID_ARGUMENT (the message names the argument), OUT_OF_MEMORY.
type KvCacheShareArgs struct {
	Least  int
	Total  uint64
	Slots  []int
	Misses []uint64
}

// ShareSlots shares slots out to layers by the misses that each has had: LayerSlots of a cache's options.
func ShareSlots(args KvCacheShareArgs) ([]int, error) {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	if l.err != nil {
		return nil, l.err
	}
	if err := failure(C.kv_cache_share_slots(&c)); err != nil {
		return nil, err
	}
	shares := make([]int, len(args.Slots))
	for n, share := range unsafe.Slice(c.shares, len(shares)) {
		shares[n] = int(share)
	}
	return shares, nil
}

func (args KvCacheShareArgs) lower(l *lowering) C.vwd_kv_cache_share_args {
	c := C.vwd_kv_cache_share_args{
		struct_size: C.sizeof_vwd_kv_cache_share_args,
		layers:      C.uint32_t(len(args.Slots)),
		least:       l.uint32("least", args.Least),
		total:       C.uint64_t(args.Total),
		slots:       l.list("slots", args.Slots),
		shares:      l.list("slots", args.Slots),
	}
	if len(args.Misses) != len(args.Slots) {
		l.fail("misses", fmt.Sprintf("%d numbers; expected %d, as slots", len(args.Misses), len(args.Slots)))
	} else if len(args.Misses) > 0 {
		l.pins.Pin(&args.Misses[0])
		c.misses = (*C.uint64_t)(unsafe.Pointer(&args.Misses[0]))
	}
	return c
}
