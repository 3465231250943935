package vanward

import (
	"os"
	"reflect"
	"regexp"
	"slices"
	"testing"
)

// A field that the header gains, and Go forgets, stays zero in C whatever the arguments are.
func TestEveryFieldOfTheHeadersStructsIsSet(t *testing.T) {
	var l lowering
	defer l.release()
	defer l.release()
	lowered := map[string][]any{
		"session_options":     each(filled[Options]().lower(&l)),
		"forecast_options":    each(filled[ForecastOptions]().lower(&l)),
		"verify":              each(filled[VerifyArgs]().lower(&l)),
		"pack":                each(filled[PackArgs]().lower(&l)),
		"verify_pack":         each(filled[VerifyPackArgs]().lower(&l)),
		"verify_sample":       each(filled[VerifySampleArgs]().lower(&l)),
		"tree_prepare":        each(filled[TreePrepareArgs]().lower(&l)),
		"verify_tree":         each(filled[VerifyTreeArgs]().lower(&l)),
		"compactor_options":   each(filled[CompactorOptions]().lower(&l)),
		"compact":             each(filled[CompactArgs]().lower(&l)),
		"index_update":        each(filled[IndexUpdateArgs]().lower(&l)),
		"index_update_layers": each(l.updates(filled[[]IndexUpdateArgs]())),
		"channel_importance":  each(filled[ChannelImportanceArgs]().lower(&l)),
		"select_blocks":       each(filled[SelectBlocksArgs]().lower(&l)),
		"select_tokens":       each(filled[SelectTokensArgs]().lower(&l)),
		"topk":                each(filled[TopKArgs]().lower(&l)),
		"attention":           each(filled[AttentionArgs]().lower(&l)),
		"kv_quantize":         each(filled[KVQuantizeArgs]().lower(&l)),
		"kv_weights":          each(filled[KVWeightsArgs]().lower(&l)),
		"remainder_update":    each(filled[RemainderUpdateArgs]().lower(&l)),
		"merge_states":        each(filled[MergeStatesArgs]().lower(&l)),
		"repair":              each(filled[RepairArgs]().lower(&l)),
		"gather_blocks":       each(filled[GatherBlocksArgs]().lower(&l)),
		"predictor_reset":     each(filled[PredictorResetArgs]().lower(&l)),
		"predictor_predict":   each(filled[PredictorPredictArgs]().lower(&l)),
		"predictor_update":    each(filled[PredictorUpdateArgs]().lower(&l)),
		"predictor_calibrate": each(filled[PredictorCalibrateArgs]().lower(&l)),
		"forecast_accumulate": each(filled[AccumulateArgs]().lower(&l)),
		"forecast_project":    each(filled[ProjectArgs]().lower(&l)),
		"kv_cache_options":    each(filled[KvCacheOptions]().lower(&l)),
		"kv_cache_share":      each(filled[KvCacheShareArgs]().lower(&l)),
		"kv_cache_append":     each(filled[KvCacheAppendArgs]().lower(&l)),
		"kv_cache_compact":    each(filled[KvCacheCompactArgs]().lower(&l)),
		"decoder_foresee":     each(filled[DecoderForeseeArgs]().lower(&l)),
		"decoder_attend":      each(filled[DecoderAttendArgs]().lower(&l)),
		"decoder_accept":      each(filled[DecoderAcceptArgs]().lower(&l)),
		"decoder_reset":       each(filled[DecoderResetArgs]().lower(&l)),
		"budget_options":      each(filled[BudgetOptions]().lower(&l)),
		"budget_question":     each(filled[BudgetQuestion]().lower(&l)),
		"kv_cache_resolve":    each(filled[KvCacheResolveArgs]().lower(&l)),
	}
	if l.err != nil {
		t.Fatal(l.err)
	}
	header, err := os.ReadFile("../../include/vanward.h")
	if err != nil {
		t.Fatal(err)
	}
	inHeader := regexp.MustCompile(`\} vwd_(\w+)_args;`).FindAllStringSubmatch(string(header), -1)
	for _, name := range inHeader {
		if lowered[name[1]] == nil {
			t.Errorf("vwd_%s_args is not bound", name[1])
		}
	}
	if len(inHeader) < 15 {
		t.Errorf("found only %d structs", len(inHeader))
	}
	for name, structs := range lowered {
		for _, c := range structs {
			value := reflect.ValueOf(c)
			for value.Kind() == reflect.Pointer {
				value = value.Elem()
			}
			wantSet(t, name, value)
		}
	}
}

func each(values ...any) []any { return values }

// filled has no field that is zero.
func filled[T any]() (args T) {
	fill(reflect.ValueOf(&args).Elem())
	return args
}

func fill(value reflect.Value) {
	switch {
	case value.Type() == reflect.TypeFor[Tensor]():
		value.Set(reflect.ValueOf(Of([]float32{1}).In(DeviceMemory(1))))
	case value.Type() == reflect.TypeFor[DType]():
		value.Set(reflect.ValueOf(F32))
	case value.Kind() == reflect.Func: // set by what makes a session or a cache
	case value.Kind() == reflect.String:
		value.SetString("x")
	case value.Kind() == reflect.Struct:
		for i := range value.NumField() {
			fill(value.Field(i))
		}
	case value.Kind() == reflect.Slice:
		value.Set(reflect.MakeSlice(value.Type(), 1, 1))
		fill(value.Index(0))
	case value.Kind() == reflect.Pointer:
		value.Set(reflect.New(value.Type().Elem()))
		fill(value.Elem())
	case value.Kind() == reflect.Bool:
		value.SetBool(true)
	case value.CanInt():
		value.SetInt(1)
	case value.CanUint():
		value.SetUint(1)
	default:
		value.SetFloat(1)
	}
}

func wantSet(t *testing.T, path string, c reflect.Value) {
	t.Helper()
	notHere := []string{
		"flags", "reserved", "_", // 0, and padding
		"kv", "index", "rope", "layers", // set in calls.h
		"parallel_for", "parallel_context", // left out
		"log", "log_context", // set by NewSession
		"progress", "progress_context", // set by NewKvCache
	}
	for i := range c.NumField() {
		name, field := c.Type().Field(i).Name, c.Field(i)
		switch at := path + "." + name; {
		case slices.Contains(notHere, name):
		case field.Kind() == reflect.Struct:
			wantSet(t, at, field)
		case field.IsZero():
			t.Errorf("%s is zero", at)
		case name == "int4", name == "remainder":
			wantSet(t, at, field.Elem())
		}
	}
}
