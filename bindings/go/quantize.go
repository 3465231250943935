package vanward

// #include "calls.h"
// #cgo noescape kv_quantize
// #cgo nocallback kv_quantize
// #cgo noescape kv_weights
// #cgo nocallback kv_weights
import "C"

// KVQuantizeArgs are the arguments of Session.KVQuantize; vwd_kv_quantize documents them.
type KVQuantizeArgs struct {
	Layers []PagedKV
	Begin  Tensor
}

// KVQuantize codes whole blocks of keys and values in INT4, from each layer's K and V to its Int4.
func (s *Session) KVQuantize(args KVQuantizeArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c, layers := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.kv_quantize(h, &c, layers, stream.c()) })
}

func (args KVQuantizeArgs) lower(l *lowering) (C.vwd_kv_quantize_args, **C.vwd_paged_kv) {
	return C.vwd_kv_quantize_args{
		struct_size: C.sizeof_vwd_kv_quantize_args,
		layer_count: l.uint32("layer_count", len(args.Layers)),
		begin:       l.tensor("begin", args.Begin),
	}, l.layers(args.Layers)
}

// KVWeightsArgs are the arguments of Session.KVWeights; vwd_kv_weights documents them.
type KVWeightsArgs struct {
	BlockSize int
	Q         Tensor
	K         Tensor
	Weights   Tensor
}

// KVWeights finds the weights of key channels from a sample of queries and keys.
func (s *Session) KVWeights(args KVWeightsArgs, stream Stream) error {
	var l lowering
	defer l.release()
	c := args.lower(&l)
	return s.run(&l, func(h *C.vwd_session) C.outcome { return C.kv_weights(h, &c, stream.c()) })
}

func (args KVWeightsArgs) lower(l *lowering) C.vwd_kv_weights_args {
	return C.vwd_kv_weights_args{
		struct_size: C.sizeof_vwd_kv_weights_args,
		block_size:  l.uint32("block_size", args.BlockSize),
		q:           l.tensor("q", args.Q),
		k:           l.tensor("k", args.K),
		weights:     l.tensor("weights", args.Weights),
	}
}
