// What Go calls: each function makes one call and, where it failed, fetches the message before Go can move the
// goroutine to another thread, where the message is not. What arguments point to comes beside them and is joined to a
// copy here, for Go would have to allocate and pin it.
#ifndef VANWARD_GO_CALLS_H
#define VANWARD_GO_CALLS_H

#include <stdlib.h>

#include "vanward.h"

typedef struct {
  vwd_status status;
  char *message;  // of a failure; freed by the receiver, NULL where memory ran out
} outcome;

static inline outcome outcome_of(vwd_status status) {
  outcome result = {status, NULL};
  if (status != VWD_OK) {
    size_t size = vwd_last_error(NULL, 0) + 1;
    result.message = (char *)malloc(size);
    if (result.message != NULL) {
      vwd_last_error(result.message, size);
    }
  }
  return result;
}

static inline outcome session_create(const vwd_session_options *options, vwd_session **session) {
  return outcome_of(vwd_session_create(options, session));
}
static inline outcome session_info(const vwd_session *session, vwd_session_details *details) {
  return outcome_of(vwd_session_info(session, details));
}
static inline outcome session_reserve(const vwd_session *session, uintptr_t stream, uint64_t bytes) {
  return outcome_of(vwd_session_reserve(session, (vwd_stream)stream, bytes));
}
static inline outcome session_forget_stream(const vwd_session *session, uintptr_t stream) {
  return outcome_of(vwd_session_forget_stream(session, (vwd_stream)stream));
}
static inline outcome session_stream(const vwd_session *session, uint32_t role, vwd_stream *stream) {
  return outcome_of(vwd_session_stream(session, role, stream));
}
static inline outcome pinned_alloc(const vwd_session *session, uint64_t bytes, void **pointer) {
  return outcome_of(vwd_pinned_alloc(session, bytes, pointer));
}
static inline outcome pinned_free(const vwd_session *session, void *pointer, uintptr_t stream) {
  return outcome_of(vwd_pinned_free(session, pointer, (vwd_stream)stream));
}

static inline outcome verify(const vwd_session *session, const vwd_verify_args *args, uintptr_t stream) {
  return outcome_of(vwd_verify(session, args, (vwd_stream)stream));
}
static inline outcome pack(const vwd_session *session, const vwd_pack_args *args, uintptr_t stream) {
  return outcome_of(vwd_pack(session, args, (vwd_stream)stream));
}
static inline outcome verify_pack(const vwd_session *session, const vwd_verify_pack_args *args, uintptr_t stream) {
  return outcome_of(vwd_verify_pack(session, args, (vwd_stream)stream));
}
static inline outcome verify_sample(const vwd_session *session, const vwd_verify_sample_args *args, uintptr_t stream) {
  return outcome_of(vwd_verify_sample(session, args, (vwd_stream)stream));
}
static inline outcome verify_sample_scratch(const vwd_session *session, const vwd_verify_sample_args *args,
                                            uint64_t *bytes) {
  return outcome_of(vwd_verify_sample_scratch(session, args, bytes));
}

static inline outcome tree_prepare(const vwd_session *session, const vwd_tree_prepare_args *args, uintptr_t stream) {
  return outcome_of(vwd_tree_prepare(session, args, (vwd_stream)stream));
}
static inline outcome verify_tree(const vwd_session *session, const vwd_verify_tree_args *args, uintptr_t stream) {
  return outcome_of(vwd_verify_tree(session, args, (vwd_stream)stream));
}
static inline outcome verify_tree_scratch(const vwd_session *session, const vwd_verify_tree_args *args, uint64_t *bytes) {
  return outcome_of(vwd_verify_tree_scratch(session, args, bytes));
}
static inline outcome compactor_create(const vwd_session *session, const vwd_compactor_options *options,
                                       vwd_compactor **compactor) {
  return outcome_of(vwd_compactor_create(session, options, compactor));
}
static inline outcome compact(const vwd_compactor *compactor, const vwd_compact_args *args, uintptr_t stream) {
  return outcome_of(vwd_compact(compactor, args, (vwd_stream)stream));
}
static inline outcome index_update(const vwd_session *session, const vwd_index_update_args *args,
                                   const vwd_index *index, uintptr_t stream) {
  vwd_index_update_args joined = *args;
  joined.index = index;
  return outcome_of(vwd_index_update(session, &joined, (vwd_stream)stream));
}
static inline outcome index_update_layers(const vwd_session *session, vwd_index_update_args *const *updates, uint32_t count,
                                          uintptr_t stream) {
  return outcome_of(
      vwd_index_update_layers(session, (const vwd_index_update_args *const *)updates, count, (vwd_stream)stream));
}
static inline outcome channel_importance(const vwd_session *session, const vwd_channel_importance_args *args,
                                         uintptr_t stream) {
  return outcome_of(vwd_channel_importance(session, args, (vwd_stream)stream));
}
static inline outcome select_blocks(const vwd_session *session, const vwd_select_blocks_args *args,
                                    const vwd_index *index, uintptr_t stream) {
  vwd_select_blocks_args joined = *args;
  joined.index = index;
  return outcome_of(vwd_select_blocks(session, &joined, (vwd_stream)stream));
}
static inline outcome select_blocks_scratch(const vwd_session *session, const vwd_select_blocks_args *args,
                                            const vwd_index *index, uint64_t *bytes) {
  vwd_select_blocks_args joined = *args;
  joined.index = index;
  return outcome_of(vwd_select_blocks_scratch(session, &joined, bytes));
}
static inline outcome select_tokens(const vwd_session *session, const vwd_select_tokens_args *args,
                                    const vwd_index *index, uintptr_t stream) {
  vwd_select_tokens_args joined = *args;
  joined.index = index;
  return outcome_of(vwd_select_tokens(session, &joined, (vwd_stream)stream));
}
static inline outcome select_tokens_scratch(const vwd_session *session, const vwd_select_tokens_args *args,
                                            const vwd_index *index, uint64_t *bytes) {
  vwd_select_tokens_args joined = *args;
  joined.index = index;
  return outcome_of(vwd_select_tokens_scratch(session, &joined, bytes));
}
static inline outcome topk(const vwd_session *session, const vwd_topk_args *args, uintptr_t stream) {
  return outcome_of(vwd_topk(session, args, (vwd_stream)stream));
}
static inline outcome attention(const vwd_session *session, const vwd_attention_args *args, const vwd_paged_kv *kv,
                                uintptr_t stream) {
  vwd_attention_args joined = *args;
  joined.kv = kv;
  return outcome_of(vwd_attention(session, &joined, (vwd_stream)stream));
}
static inline outcome attention_scratch(const vwd_session *session, const vwd_attention_args *args,
                                        const vwd_paged_kv *kv, uint64_t *bytes) {
  vwd_attention_args joined = *args;
  joined.kv = kv;
  return outcome_of(vwd_attention_scratch(session, &joined, bytes));
}
static inline outcome kv_quantize(const vwd_session *session, const vwd_kv_quantize_args *args,
                                  vwd_paged_kv *const *layers, uintptr_t stream) {
  vwd_kv_quantize_args joined = *args;
  joined.layers = (const vwd_paged_kv *const *)layers;
  return outcome_of(vwd_kv_quantize(session, &joined, (vwd_stream)stream));
}
static inline outcome kv_weights(const vwd_session *session, const vwd_kv_weights_args *args, uintptr_t stream) {
  return outcome_of(vwd_kv_weights(session, args, (vwd_stream)stream));
}
static inline outcome remainder_update(const vwd_session *session, const vwd_remainder_update_args *args,
                                       const vwd_paged_kv *kv, uintptr_t stream) {
  vwd_remainder_update_args joined = *args;
  joined.kv = kv;
  return outcome_of(vwd_remainder_update(session, &joined, (vwd_stream)stream));
}
static inline outcome merge_states(const vwd_session *session, const vwd_merge_states_args *args, uintptr_t stream) {
  return outcome_of(vwd_merge_states(session, args, (vwd_stream)stream));
}
static inline outcome repair(const vwd_session *session, const vwd_repair_args *args, const vwd_paged_kv *kv,
                             uintptr_t stream) {
  vwd_repair_args joined = *args;
  joined.kv = kv;
  return outcome_of(vwd_repair(session, &joined, (vwd_stream)stream));
}
static inline outcome repair_scratch(const vwd_session *session, const vwd_repair_args *args,
                                     const vwd_paged_kv *kv, uint64_t *bytes) {
  vwd_repair_args joined = *args;
  joined.kv = kv;
  return outcome_of(vwd_repair_scratch(session, &joined, bytes));
}
static inline outcome gather_blocks(const vwd_session *session, const vwd_gather_blocks_args *args, uintptr_t stream) {
  return outcome_of(vwd_gather_blocks(session, args, (vwd_stream)stream));
}
static inline outcome predictor_reset(const vwd_session *session, const vwd_predictor_reset_args *args,
                                      uintptr_t stream) {
  return outcome_of(vwd_predictor_reset(session, args, (vwd_stream)stream));
}
static inline outcome predictor_predict(const vwd_session *session, const vwd_predictor_predict_args *args,
                                        uintptr_t stream) {
  return outcome_of(vwd_predictor_predict(session, args, (vwd_stream)stream));
}
static inline outcome predictor_update(const vwd_session *session, const vwd_predictor_update_args *args,
                                       uintptr_t stream) {
  return outcome_of(vwd_predictor_update(session, args, (vwd_stream)stream));
}
static inline outcome predictor_calibrate(const vwd_session *session, const vwd_predictor_calibrate_args *args,
                                          vwd_holt *holt, double *hit_rate) {
  return outcome_of(vwd_predictor_calibrate(session, args, holt, hit_rate));
}

static inline outcome forecast_create(const vwd_session *session, const vwd_forecast_options *options,
                                      vwd_forecast **forecast) {
  return outcome_of(vwd_forecast_create(session, options, forecast));
}
static inline outcome forecast_load(const vwd_session *session, const char *path, vwd_forecast **forecast) {
  return outcome_of(vwd_forecast_load(session, path, forecast));
}
static inline outcome forecast_info(const vwd_forecast *forecast, vwd_forecast_details *details) {
  return outcome_of(vwd_forecast_info(forecast, details));
}
static inline outcome forecast_accumulate(const vwd_forecast *forecast, const vwd_forecast_accumulate_args *args) {
  return outcome_of(vwd_forecast_accumulate(forecast, args));
}
static inline outcome forecast_solve(const vwd_forecast *forecast, uint32_t rank) {
  return outcome_of(vwd_forecast_solve(forecast, rank));
}
static inline outcome forecast_save(const vwd_forecast *forecast, const char *path) {
  return outcome_of(vwd_forecast_save(forecast, path));
}
static inline outcome forecast_project(const vwd_forecast *forecast, const vwd_forecast_project_args *args,
                                       const vwd_rope *rope, uintptr_t stream) {
  vwd_forecast_project_args joined = *args;
  joined.rope = rope;
  return outcome_of(vwd_forecast_project(forecast, &joined, (vwd_stream)stream));
}

static inline outcome budget_profile(const vwd_session *session, const vwd_budget_options *options, uintptr_t stream,
                                     vwd_budget **budget) {
  return outcome_of(vwd_budget_profile(session, options, (vwd_stream)stream, budget));
}
static inline outcome budget_load(const vwd_session *session, const vwd_budget_options *options, const char *path,
                                  vwd_budget **budget) {
  return outcome_of(vwd_budget_load(session, options, path, budget));
}
static inline outcome budget_save(const vwd_budget *budget, const char *path) {
  return outcome_of(vwd_budget_save(budget, path));
}
static inline outcome budget_ask(const vwd_budget *budget, const vwd_budget_question *question,
                                 vwd_budget_answer *answer) {
  return outcome_of(vwd_budget_ask(budget, question, answer));
}

static inline outcome kv_cache_capacity(const vwd_kv_cache_options *options, vwd_kv_cache_sizes *sizes) {
  return outcome_of(vwd_kv_cache_capacity(options, sizes));
}
static inline outcome kv_cache_create(const vwd_session *session, const vwd_kv_cache_options *options,
                                      vwd_kv_cache **cache) {
  return outcome_of(vwd_kv_cache_create(session, options, cache));
}
static inline outcome kv_cache_add(const vwd_kv_cache *cache, uint32_t *sequence, uintptr_t stream) {
  return outcome_of(vwd_kv_cache_add(cache, sequence, (vwd_stream)stream));
}
static inline outcome kv_cache_extend(const vwd_kv_cache *cache, uint32_t sequence, uint64_t tokens,
                                      uintptr_t stream) {
  return outcome_of(vwd_kv_cache_extend(cache, sequence, tokens, (vwd_stream)stream));
}
static inline outcome kv_cache_fork(const vwd_kv_cache *cache, uint32_t sequence, uint64_t tokens, uint32_t *made,
                                    uintptr_t stream) {
  return outcome_of(vwd_kv_cache_fork(cache, sequence, tokens, made, (vwd_stream)stream));
}
static inline outcome kv_cache_truncate(const vwd_kv_cache *cache, uint32_t sequence, uint64_t tokens,
                                        uintptr_t stream) {
  return outcome_of(vwd_kv_cache_truncate(cache, sequence, tokens, (vwd_stream)stream));
}
static inline outcome kv_cache_free(const vwd_kv_cache *cache, uint32_t sequence, uintptr_t stream) {
  return outcome_of(vwd_kv_cache_free(cache, sequence, (vwd_stream)stream));
}
static inline outcome kv_cache_append(const vwd_kv_cache *cache, const vwd_kv_cache_append_args *args,
                                      uintptr_t stream) {
  return outcome_of(vwd_kv_cache_append(cache, args, (vwd_stream)stream));
}
static inline outcome kv_cache_compact(const vwd_kv_cache *cache, const vwd_kv_cache_compact_args *args,
                                       uintptr_t stream) {
  return outcome_of(vwd_kv_cache_compact(cache, args, (vwd_stream)stream));
}
static inline outcome kv_cache_resolve(const vwd_kv_cache *cache, const vwd_kv_cache_resolve_args *args,
                                       uintptr_t stream) {
  return outcome_of(vwd_kv_cache_resolve(cache, args, (vwd_stream)stream));
}
static inline outcome kv_cache_fetch(const vwd_kv_cache *cache, uint32_t layer, uintptr_t stream) {
  return outcome_of(vwd_kv_cache_fetch(cache, layer, (vwd_stream)stream));
}
static inline outcome kv_cache_wait(const vwd_kv_cache *cache, uint32_t layer, uintptr_t stream) {
  return outcome_of(vwd_kv_cache_wait(cache, layer, (vwd_stream)stream));
}
static inline outcome kv_cache_view(const vwd_kv_cache *cache, uint32_t layer, vwd_kv_cache_layer *view) {
  return outcome_of(vwd_kv_cache_view(cache, layer, view));
}
static inline outcome kv_cache_info(const vwd_kv_cache *cache, vwd_kv_cache_stats *stats) {
  return outcome_of(vwd_kv_cache_info(cache, stats));
}
static inline outcome kv_cache_layer_info(const vwd_kv_cache *cache, uint32_t layer, vwd_kv_cache_stats *stats) {
  return outcome_of(vwd_kv_cache_layer_info(cache, layer, stats));
}
static inline outcome kv_cache_share_slots(const vwd_kv_cache_share_args *args) {
  return outcome_of(vwd_kv_cache_share_slots(args));
}

static inline outcome decoder_create(const vwd_session *session, const vwd_decoder_options *options,
                                     vwd_decoder **decoder) {
  return outcome_of(vwd_decoder_create(session, options, decoder));
}
static inline outcome decoder_create_on_cache(const vwd_session *session, const vwd_decoder_options *options,
                                              const vwd_kv_cache *cache, vwd_decoder **decoder) {
  return outcome_of(vwd_decoder_create_on_cache(session, options, cache, decoder));
}
static inline outcome decoder_begin(const vwd_decoder *decoder, const vwd_decoder_step *step, uintptr_t stream) {
  return outcome_of(vwd_decoder_begin(decoder, step, (vwd_stream)stream));
}
static inline outcome decoder_foresee(const vwd_decoder *decoder, const vwd_forecast *forecast,
                                      const vwd_decoder_foresee_args *args, const vwd_rope *rope, uintptr_t stream) {
  vwd_decoder_foresee_args joined = *args;
  joined.rope = rope;
  return outcome_of(vwd_decoder_foresee(decoder, forecast, &joined, (vwd_stream)stream));
}
static inline outcome decoder_attend(const vwd_decoder *decoder, const vwd_decoder_attend_args *args,
                                     uintptr_t stream) {
  return outcome_of(vwd_decoder_attend(decoder, args, (vwd_stream)stream));
}
static inline outcome decoder_attend_scratch(const vwd_decoder *decoder, const vwd_decoder_attend_args *args,
                                             uint64_t *bytes) {
  return outcome_of(vwd_decoder_attend_scratch(decoder, args, bytes));
}
static inline outcome decoder_accept(const vwd_decoder *decoder, const vwd_decoder_accept_args *args,
                                     uintptr_t stream) {
  return outcome_of(vwd_decoder_accept(decoder, args, (vwd_stream)stream));
}
static inline outcome decoder_reset(const vwd_decoder *decoder, const vwd_decoder_reset_args *args, uintptr_t stream) {
  return outcome_of(vwd_decoder_reset(decoder, args, (vwd_stream)stream));
}
static inline outcome decoder_info(const vwd_decoder *decoder, vwd_decoder_details *details) {
  return outcome_of(vwd_decoder_info(decoder, details));
}

#endif
