#include "model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "linear.h"

typedef struct {
  const float *attention_norm, *ffn_norm;
  const gguf_tensor *q, *k, *v, *o, *gate, *up, *down;
} layer_weights;

struct model {
  model_shape shape;
  pool *threads;
  const gguf_tensor *embedding, *output; /* the same one where the file ties them */
  const float *output_norm;
  layer_weights *layers;
  float *rope; /* [context, head_dim / 2, (cos, sin)] */
  /* activations, [MAX_ROWS, ...] */
  float *residual, *normed, *q_plain, *q, *k, *v, *attended, *projected, *gate, *up, *logits;
};

static const gguf_tensor *weight(const gguf *file, const char *name, int64_t rows, int64_t cols) {
  const gguf_tensor *t = gguf_find(file, name);
  if (t && t->rows == rows && t->cols == cols) return t;
  fprintf(stderr, "model: %s is %s, expected [%lld, %lld]\n", name, t ? "of another shape" : "missing", (long long)rows,
          (long long)cols);
  return NULL;
}

static const float *norm_weight(const gguf *file, const char *name, int64_t cols) {
  const gguf_tensor *t = weight(file, name, 1, cols);
  return t && t->type == GGUF_F32 ? t->data : NULL;
}

static bool load_layer(const gguf *file, int index, const model_shape *s, layer_weights *l) {
  char name[64];
  int64_t q_rows = (int64_t)s->heads * s->head_dim, kv_rows = (int64_t)s->kv_heads * s->head_dim;
#define NAME(part) (snprintf(name, sizeof name, "blk.%d." part ".weight", index), name)
  return (l->attention_norm = norm_weight(file, NAME("attn_norm"), s->hidden)) &&
         (l->ffn_norm = norm_weight(file, NAME("ffn_norm"), s->hidden)) &&
         (l->q = weight(file, NAME("attn_q"), q_rows, s->hidden)) &&
         (l->k = weight(file, NAME("attn_k"), kv_rows, s->hidden)) &&
         (l->v = weight(file, NAME("attn_v"), kv_rows, s->hidden)) &&
         (l->o = weight(file, NAME("attn_output"), s->hidden, q_rows)) &&
         (l->gate = weight(file, NAME("ffn_gate"), s->ffn, s->hidden)) &&
         (l->up = weight(file, NAME("ffn_up"), s->ffn, s->hidden)) &&
         (l->down = weight(file, NAME("ffn_down"), s->hidden, s->ffn));
#undef NAME
}

static bool read_shape(const gguf *file, model_shape *s) {
  gguf_string arch = gguf_text(file, "general.architecture");
  if (arch.length != 5 || memcmp(arch.data, "llama", 5) != 0) {
    fprintf(stderr, "model: architecture %.*s; this engine runs llama\n", (int)arch.length, arch.data);
    return false;
  }
  s->layers = (int)gguf_int(file, "llama.block_count", 0);
  s->hidden = (int)gguf_int(file, "llama.embedding_length", 0);
  s->heads = (int)gguf_int(file, "llama.attention.head_count", 0);
  s->kv_heads = (int)gguf_int(file, "llama.attention.head_count_kv", s->heads);
  s->ffn = (int)gguf_int(file, "llama.feed_forward_length", 0);
  s->context = (int)gguf_int(file, "llama.context_length", 0);
  s->rope_base = (float)gguf_float(file, "llama.rope.freq_base", 10000.0);
  s->norm_epsilon = (float)gguf_float(file, "llama.attention.layer_norm_rms_epsilon", 1e-5);
  const gguf_tensor *embedding = gguf_find(file, "token_embd.weight");
  s->vocab = embedding ? (int)embedding->rows : 0;
  bool ok = s->layers > 0 && s->hidden > 0 && s->hidden <= 8192 && s->heads > 0 && s->kv_heads > 0 && s->ffn > 0 &&
            s->ffn <= 8192 && s->context > 0 && s->vocab > 0 && s->hidden % s->heads == 0 &&
            s->heads % s->kv_heads == 0 && s->hidden % 8 == 0 && s->ffn % 8 == 0;
  s->head_dim = ok ? s->hidden / s->heads : 0;
  ok = ok && s->head_dim % 8 == 0 && gguf_int(file, "llama.rope.dimension_count", s->head_dim) == s->head_dim;
  if (!ok) fprintf(stderr, "model: the file's sizes do not describe a Llama decoder this engine can run\n");
  return ok;
}

static float *floats(int64_t count) { return calloc((size_t)count, sizeof(float)); }

static bool allocate(model *m) {
  const model_shape *s = &m->shape;
  int64_t q = (int64_t)s->heads * s->head_dim, kv = (int64_t)s->kv_heads * s->head_dim;
  return (m->rope = floats((int64_t)s->context * s->head_dim)) && (m->residual = floats(MAX_ROWS * s->hidden)) &&
         (m->normed = floats(MAX_ROWS * s->hidden)) && (m->projected = floats(MAX_ROWS * s->hidden)) &&
         (m->q_plain = floats(MAX_ROWS * q)) && (m->q = floats(MAX_ROWS * q)) && (m->attended = floats(MAX_ROWS * q)) &&
         (m->k = floats(MAX_ROWS * kv)) && (m->v = floats(MAX_ROWS * kv)) && (m->gate = floats(MAX_ROWS * s->ffn)) &&
         (m->up = floats(MAX_ROWS * s->ffn)) && (m->logits = floats((int64_t)MAX_ROWS * s->vocab));
}

static void fill_rope(model *m) {
  int half = m->shape.head_dim / 2;
  for (int i = 0; i < half; i++) {
    double frequency = pow(m->shape.rope_base, -(double)i / half);
    for (int p = 0; p < m->shape.context; p++) {
      float *turn = m->rope + ((int64_t)p * half + i) * 2;
      turn[0] = (float)cos(p * frequency);
      turn[1] = (float)sin(p * frequency);
    }
  }
}

model *model_new(const gguf *file, pool *threads) {
  model *m = calloc(1, sizeof *m);
  if (!m) return NULL;
  model_shape *s = &m->shape;
  m->threads = threads;
  bool ok = read_shape(file, s) && (m->layers = calloc((size_t)s->layers, sizeof *m->layers)) && allocate(m);
  for (int l = 0; ok && l < s->layers; l++) ok = load_layer(file, l, s, &m->layers[l]);
  ok = ok && (m->embedding = weight(file, "token_embd.weight", s->vocab, s->hidden)) &&
       (m->output_norm = norm_weight(file, "output_norm.weight", s->hidden));
  if (!ok) {
    fprintf(stderr, "model: cannot be loaded\n");
    model_free(m);
    return NULL;
  }
  m->output = gguf_find(file, "output.weight") ? weight(file, "output.weight", s->vocab, s->hidden)
                                               : m->embedding; /* tied */
  fill_rope(m);
  return m;
}

void model_free(model *m) {
  if (!m) return;
  float *buffers[] = {m->rope, m->residual, m->normed,    m->q_plain, m->q,  m->k,
                      m->v,    m->attended, m->projected, m->gate,    m->up, m->logits};
  for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) free(buffers[i]);
  free(m->layers);
  free(m);
}

model_shape model_get_shape(const model *m) { return m->shape; }

static void rms_norm(const model *m, const float *x, const float *scale, int n, float *out) {
  int hidden = m->shape.hidden;
  for (int row = 0; row < n; row++, x += hidden, out += hidden) {
    double sum = 0;
    for (int i = 0; i < hidden; i++) sum += (double)x[i] * x[i];
    float inverse = (float)(1.0 / sqrt(sum / hidden + m->shape.norm_epsilon));
    for (int i = 0; i < hidden; i++) out[i] = x[i] * inverse * scale[i];
  }
}

static void rotate(const model *m, const float *x, int heads, int n, const int32_t *positions, float *out) {
  int half = m->shape.head_dim / 2;
  for (int row = 0; row < n; row++) {
    const float *turn = m->rope + (int64_t)positions[row] * half * 2;
    for (int h = 0; h < heads; h++, x += 2 * half, out += 2 * half) {
      for (int i = 0; i < half; i++) {
        float even = x[2 * i], odd = x[2 * i + 1];
        out[2 * i] = even * turn[2 * i] - odd * turn[2 * i + 1];
        out[2 * i + 1] = even * turn[2 * i + 1] + odd * turn[2 * i];
      }
    }
  }
}

static void add(float *x, const float *y, int64_t count) {
  for (int64_t i = 0; i < count; i++) x[i] += y[i];
}

static void gate_rows(void *context, int begin, int end) {
  model *m = context;
  for (int64_t i = (int64_t)begin * m->shape.ffn; i < (int64_t)end * m->shape.ffn; i++)
    m->gate[i] = m->gate[i] / (1.0f + expf(-m->gate[i])) * m->up[i];
}

static bool run_layer(model *m, int index, const model_pass *pass, attention_fn attend, void *context) {
  const model_shape *s = &m->shape;
  const layer_weights *l = &m->layers[index];
  const int n = pass->n;

  rms_norm(m, m->residual, l->attention_norm, n, m->normed);
  linear(m->threads, (linear_target[]){{l->q, m->q_plain}, {l->k, m->k}, {l->v, m->v}}, 3, m->normed, n);
  rotate(m, m->q_plain, s->heads, n, pass->positions, m->q);
  rotate(m, m->k, s->kv_heads, n, pass->positions, m->k);
  attention_call call = {index, n, pass->positions, m->residual, m->q_plain, m->q, m->k, m->v, m->attended};
  if (!attend(context, &call)) return false;
  linear(m->threads, (linear_target[]){{l->o, m->projected}}, 1, m->attended, n);
  add(m->residual, m->projected, (int64_t)n * s->hidden);

  rms_norm(m, m->residual, l->ffn_norm, n, m->normed);
  linear(m->threads, (linear_target[]){{l->gate, m->gate}, {l->up, m->up}}, 2, m->normed, n);
  pool_run(m->threads, n, gate_rows, m);
  linear(m->threads, (linear_target[]){{l->down, m->projected}}, 1, m->gate, n);
  add(m->residual, m->projected, (int64_t)n * s->hidden);
  return true;
}

const float *model_forward(model *m, const model_pass *pass, attention_fn attend, void *context) {
  const model_shape *s = &m->shape;
  for (int row = 0; row < pass->n; row++)
    dequantize_row(m->embedding, pass->tokens[row], m->residual + (int64_t)row * s->hidden);
  for (int l = 0; l < s->layers; l++)
    if (!run_layer(m, l, pass, attend, context)) return NULL;
  for (int i = 0; i < pass->wanted_count; i++)
    rms_norm(m, m->residual + (int64_t)pass->wanted[i] * s->hidden, m->output_norm, 1, m->normed + (int64_t)i * s->hidden);
  if (pass->wanted_count > 0)
    linear(m->threads, (linear_target[]){{m->output, m->logits}}, 1, m->normed, pass->wanted_count);
  return m->logits;
}

const float *model_forward_run(model *m, const int32_t *tokens, int n, int64_t position, bool last_only,
                               attention_fn attend, void *context) {
  int32_t positions[MAX_ROWS], wanted[MAX_ROWS];
  for (int row = 0; row < n; row++) positions[row] = (int32_t)position + row;
  for (int row = 0; row < n; row++) wanted[row] = last_only ? n - 1 : row;
  const model_pass pass = {tokens, positions, n, wanted, last_only ? 1 : n};
  return model_forward(m, &pass, attend, context);
}

int32_t model_best(const model *m, const float *logits) {
  int32_t best = 0;
  for (int32_t i = 1; i < m->shape.vocab; i++)
    if (logits[i] > logits[best]) best = i;
  return best;
}
