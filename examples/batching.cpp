// An engine's loop: requests come and go, and share a paged cache.
//
// Shown: continuous batching over a page table, prompts taken in chunks while others decode, prefixes that share pages,
// preemption where pages run out, drafts verified in place and beside the cache, and a sequence of more tokens than a tiered
// cache has slots for. The model is a toy of one layer, whose queries look for one earlier block of tokens. Every token that
// the engine writes is checked against attention over all tokens in plain loops, and so is every output.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <vector>

#include <vanward.hpp>

namespace vw = vanward;
using std::int32_t;
using std::size_t;

static void check(bool holds, const char *what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::exit(1);
}

// --- the toy model -----------------------------------------------------------------------------------------------------

constexpr int Hk = 2, G = 2, Hq = Hk * G, D = 32, VOCABULARY = 64;
constexpr int S = 16;  // tokens of a block, and of a page
using Text = std::vector<int32_t>;

// Uniform in −1 … 1.
static float noise(std::uint64_t a, std::uint64_t b, std::uint64_t c) {
  std::uint64_t x = a * 0x9E3779B97F4A7C15u ^ b * 0xBF58476D1CE4E5B9u ^ c * 0x94D049BB133111EBu;
  x ^= x >> 29, x *= 0xBF58476D1CE4E5B9u, x ^= x >> 32, x *= 0x94D049BB133111EBu, x ^= x >> 29;
  return static_cast<float>(static_cast<int32_t>(x >> 32)) / 2147483648.0f;
}

// The topic of a block: a direction that follows from its first token.
static float topic(const Text &text, int block, int g, int c) {
  const auto first = static_cast<std::uint64_t>(text[static_cast<size_t>(block * S)]);
  return noise(first + 1, static_cast<std::uint64_t>(block + 1), static_cast<std::uint64_t>(g * D + c)) > 0 ? 1.f : -1.f;
}

// Rows of the token at `position`: key and value [Hk, D], query [Hq, D].
static void project(const Text &text, int position, float *k, float *v, float *q) {
  const auto token = static_cast<std::uint64_t>(text[static_cast<size_t>(position)]);
  const auto at = static_cast<std::uint64_t>(position);
  for (int n = 0; n < Hk * D; n++) {
    k[n] = topic(text, position / S, n / D, n % D) + 0.25f * noise(token, at, static_cast<std::uint64_t>(1000 + n));
    v[n] = noise(token, at, static_cast<std::uint64_t>(2000 + n));
  }
  for (int h = 0; h < Hq; h++) {
    const int block = static_cast<int>((token * 7 + at * 3 + static_cast<std::uint64_t>(h / G) * 5) % (at / S + 1));
    for (int c = 0; c < D; c++) q[h * D + c] = 8 * topic(text, block, h / G, c);
  }
}

// The token that follows an output of attention, [Hq, D].
static int32_t next_token(const float *out) {
  int32_t best = 0;
  float most = -INFINITY;
  for (int32_t token = 0; token < VOCABULARY; token++) {
    float logit = 0;
    for (int n = 0; n < Hq * D; n++) logit += out[n] * noise(static_cast<std::uint64_t>(token), 77, static_cast<std::uint64_t>(n));
    if (logit > most) most = logit, best = token;
  }
  return best;
}

// The oracle: attention of the text's last token over all of it, in loops.
static std::vector<float> attend_densely(const Text &text) {
  const int tokens = static_cast<int>(text.size());
  std::vector<float> k(Hk * D), v(Hk * D), q(Hq * D), ignored(Hq * D), out(Hq * D);
  project(text, tokens - 1, k.data(), v.data(), q.data());
  std::vector<double> acc(Hq * D), sum(Hq), most(Hq, -INFINITY);
  for (int t = 0; t < tokens; t++) {
    project(text, t, k.data(), v.data(), ignored.data());
    for (int h = 0; h < Hq; h++) {
      double score = 0;
      for (int c = 0; c < D; c++) score += static_cast<double>(q[h * D + c]) * k[h / G * D + c];
      score /= std::sqrt(static_cast<double>(D));
      const double larger = std::max(most[h], score), old = std::exp(most[h] - larger), weight = std::exp(score - larger);
      most[h] = larger;
      sum[h] = sum[h] * old + weight;
      for (int c = 0; c < D; c++) acc[h * D + c] = acc[h * D + c] * old + weight * v[h / G * D + c];
    }
  }
  for (int n = 0; n < Hq * D; n++) out[n] = static_cast<float>(acc[n] / sum[n / D]);
  return out;
}

static int answers = 0;

// An output of the library for the text's last token: what dense attention gives, but for the weight of what was left out.
static void check_answer(const Text &text, const float *out) {
  const std::vector<float> dense = attend_densely(text);
  for (int n = 0; n < Hq * D; n++) check(std::fabs(out[n] - dense[n]) < 2e-3f, "the output is that of dense attention");
  check(next_token(out) == next_token(dense.data()), "the token is that of dense attention");
  answers++;
}

// --- the paged cache -----------------------------------------------------------------------------------------------------

constexpr int ROWS = 3;             // sequences of a step
constexpr int PAGES = 38, MAX = 24; // pages in all, and of one sequence
constexpr int K = 9;                // blocks that a KV head reads for all positions of a step
constexpr int CHUNK = 40;           // prompt tokens of a step: no multiple of S
constexpr int DRAFTS = 4, Q = 1 + DRAFTS;

// [paged cache]
struct Cache {
  std::vector<float> k = std::vector<float>(PAGES * S * Hk * D), v = k;         // [pages, P, Hk, D]
  std::vector<float> key_max = std::vector<float>(PAGES * Hk * D), key_min = key_max;  // a summary for each page
  std::vector<int32_t> table = std::vector<int32_t>(ROWS * MAX, -1), lens = std::vector<int32_t>(ROWS);
  vwd_index index = vw::make<vwd_index>();
  vwd_paged_kv kv = vw::make<vwd_paged_kv>();

  Cache() {
    kv.k = vw::tensor(k, {PAGES, S, Hk, D});
    kv.v = vw::tensor(v, {PAGES, S, Hk, D});
    kv.page_table = vw::tensor(table, {ROWS, MAX});
    kv.seq_lens = vw::tensor(lens);
    index.kind = VWD_INDEX_MINMAX;
    index.block_size = S;
    index.table = kv.page_table;  // blocks are pages: summaries go where their page goes
    index.key_max = vw::tensor(key_max, {PAGES, 1, Hk, D});
    index.key_min = vw::tensor(key_min, {PAGES, 1, Hk, D});
  }
};
// [end]

struct Request {
  Text text;           // the prompt, then what was generated
  int prompt, wanted;  // tokens of the prompt; tokens to generate
  int cached = 0;      // tokens whose keys are in the cache
  std::vector<int32_t> pages;
};

struct Engine {
  const vw::Session &session;
  Cache cache;
  std::vector<int> users = std::vector<int>(PAGES);  // sequences that hold a page
  std::deque<Request *> waiting;
  std::vector<Request *> running = std::vector<Request *>(ROWS);
  int shared_pages = 0, preemptions = 0, mixed_steps = 0, accepted_drafts = 0, steps = 0;

  // [prefix sharing]
  // Whole blocks that begin another running request are shared: pages, and with them their summaries.
  void share_prefix(Request &request) {
    for (const Request *other : running) {
      if (!other || other == &request) continue;
      const int limit = std::min({other->cached, static_cast<int>(request.text.size()) - 1, static_cast<int>(other->text.size())});
      int same = 0;
      while (same < limit && request.text[same] == other->text[same]) same++;
      const int blocks = same / S;
      if (blocks * S <= request.cached) continue;
      release(request);
      request.pages.assign(other->pages.begin(), other->pages.begin() + blocks);
      for (int32_t page : request.pages) users[page]++;
      request.cached = blocks * S;
      shared_pages += blocks;
    }
  }
  // [end]

  void release(Request &request) {
    for (int32_t page : request.pages) users[page]--;
    request.pages.clear();
    request.cached = 0;
  }

  // [preemption]
  // Pages for so many tokens. Where none is free, the request that came last gives its own back and waits: its text stays, and
  // is taken in again later.
  bool make_room(Request &request, int tokens) {
    while (static_cast<int>(request.pages.size()) * S < tokens) {
      const auto free = std::find(users.begin(), users.end(), 0);
      if (free != users.end()) {
        *free = 1;
        request.pages.push_back(static_cast<int32_t>(free - users.begin()));
        continue;
      }
      const auto last = std::find_if(running.rbegin(), running.rend(), [](Request *r) { return r != nullptr; });
      Request *victim = *last;
      *last = nullptr;
      release(*victim);
      waiting.push_front(victim);
      preemptions++;
      if (victim == &request) return false;
    }
    return true;
  }
  // [end]

  // Writes the rows of tokens begin … end − 1, of a text, to the cache, and their queries to q [rows, Hq, D].
  void append(const Request &request, const Text &text, int begin, int end, float *q) {
    std::vector<float> ignored(Hq * D);
    for (int t = begin; t < end; t++) {
      const size_t row = (static_cast<size_t>(request.pages[t / S]) * S + t % S) * Hk * D;
      project(text, t, &cache.k[row], &cache.v[row], q ? q + (t - begin) * Hq * D : ignored.data());
    }
  }

  // One step of all running requests: a chunk of the prompt for some, a token and drafts for the others.
  void step() {
    for (Request *&place : running) {
      if (place || waiting.empty()) continue;
      place = waiting.front();
      waiting.pop_front();
      share_prefix(*place);
    }
    std::vector<int32_t> begin(ROWS), q_lens(ROWS), draft_lens(ROWS), draft(ROWS * DRAFTS, -1);
    std::vector<float> q(ROWS * Q * Hq * D);
    std::vector<Text> texts(ROWS);
    bool prefill = false, decode = false;
    for (int i = 0; i < ROWS; i++) {
      Request *r = running[i];
      if (!r) continue;
      const int size = static_cast<int>(r->text.size()), missing = size - r->cached;
      const int rows = missing > 1 ? std::min(CHUNK, missing - 1) : Q;
      if (!make_room(*r, r->cached + rows)) continue;
    }
    for (int i = 0; i < ROWS; i++) {
      Request *r = running[i];
      std::fill_n(&cache.table[i * MAX], MAX, -1);
      cache.lens[i] = begin[i] = 0;
      if (!r) continue;
      std::copy(r->pages.begin(), r->pages.end(), &cache.table[i * MAX]);
      const int size = static_cast<int>(r->text.size()), missing = size - r->cached;
      begin[i] = r->cached;
      texts[i] = r->text;
      if (missing > 1) {  // a chunk of the prompt; its last token is left for a decode step
        cache.lens[i] = r->cached + std::min(CHUNK, missing - 1);
        append(*r, texts[i], begin[i], cache.lens[i], nullptr);
        prefill = true;
        continue;
      }
      // [drafts in place]
      // The last token and its drafts are appended, and the lengths count them.
      draft_lens[i] = DRAFTS;
      for (int d = 0; d < DRAFTS; d++) {
        int32_t guess = next_token(attend_densely(texts[i]).data());  // stands in for a drafter
        if (d == 2) guess = (guess + 1) % VOCABULARY;                 // which is wrong at times
        draft[i * DRAFTS + d] = guess;
        texts[i].push_back(guess);
      }
      q_lens[i] = Q;
      cache.lens[i] = begin[i] + Q;
      append(*r, texts[i], begin[i], cache.lens[i], &q[i * Q * Hq * D]);
      // [end]
      decode = true;
    }
    mixed_steps += prefill && decode;

    // [chunked prefill]
    // One update for all: a chunk of a prompt here, a token and its drafts there. It reads the block that `begin` lies in from
    // its first token on, so that chunks may have any length.
    auto update = vw::make<vwd_index_update_args>();
    update.index = &cache.index;
    update.k = cache.kv.k;
    update.page_table = cache.kv.page_table;
    update.seq_lens = cache.kv.seq_lens;
    update.begin = vw::tensor(begin);
    session.index_update(update);
    // [end]

    // [mixed prefill and decode]
    // Rows of sequences that take in a prompt have q_lens 0: selection leaves their lists empty, attention their output zero.
    std::vector<int32_t> ids(ROWS * Hk * K), counts(ROWS * Hk);
    const vwd_block_list list = {vw::tensor(ids, {ROWS, Hk, K}), vw::tensor(counts, {ROWS, Hk}), {}};
    auto select = vw::make<vwd_select_blocks_args>();
    select.method = VWD_SELECT_MINMAX;
    select.block_size = S;
    select.k = K;
    select.init_blocks = 1;
    select.local_blocks = 2;  // the block of the drafts, and the one before
    select.index = &cache.index;
    select.q = vw::tensor(q, {ROWS, Q, Hq, D});
    select.q_lens = vw::tensor(q_lens);
    select.seq_lens = cache.kv.seq_lens;
    select.selected = list;
    session.select_blocks(select);
    // [end]

    // [attention]
    std::vector<float> out(ROWS * Q * Hq * D);
    auto attention = vw::make<vwd_attention_args>();
    attention.block_size = S;
    attention.kv = &cache.kv;
    attention.q = select.q;
    attention.q_lens = select.q_lens;
    attention.list = list;
    attention.out = vw::tensor(out, {ROWS, Q, Hq, D});
    session.attention(attention);
    // [end]

    // [verification]
    std::vector<int32_t> target(ROWS * Q), accepted(ROWS), next(ROWS);
    for (int row = 0; row < ROWS * Q; row++) target[row] = next_token(&out[row * Hq * D]);
    auto verify = vw::make<vwd_verify_args>();
    verify.draft = vw::tensor(draft, {ROWS, DRAFTS});
    verify.target = vw::tensor(target, {ROWS, Q});
    verify.draft_lens = vw::tensor(draft_lens);
    verify.accepted = vw::tensor(accepted);
    verify.next_token = vw::tensor(next);
    session.verify(verify);
    // [end]

    for (int i = 0; i < ROWS; i++) {
      Request *r = running[i];
      if (!r) continue;
      if (q_lens[i] == 0) {
        r->cached = cache.lens[i];
        continue;
      }
      for (int a = 0; a <= accepted[i]; a++) {  // what holds, each against the dense loop
        check_answer(r->text, &out[(i * Q + a) * Hq * D]);
        r->text.push_back(a < accepted[i] ? draft[i * DRAFTS + a] : next[i]);
      }
      // [refused drafts]
      // The cache counts what holds. The next append writes over what was refused, and the next update mends its summaries.
      r->cached = begin[i] + 1 + accepted[i];
      accepted_drafts += accepted[i];
      // [end]
      if (static_cast<int>(r->text.size()) >= r->prompt + r->wanted) {
        release(*r);
        running[i] = nullptr;
      }
    }
    steps++;
  }

  bool done() const {
    return waiting.empty() && std::all_of(running.begin(), running.end(), [](const Request *r) { return !r; });
  }
};

static Text random_text(int tokens, std::uint64_t seed) {
  Text text(tokens);
  for (int t = 0; t < tokens; t++) {
    text[t] = static_cast<int32_t>((noise(seed, static_cast<std::uint64_t>(t), 5) + 1) / 2 * (VOCABULARY - 1));
  }
  return text;
}

static void run_batches(const vw::Session &session) {
  Text first = random_text(150, 1), second = random_text(250, 2), third = random_text(90, 3), fourth = first;
  fourth.resize(120);  // begins as the first request
  const Text more = random_text(30, 4);
  fourth.insert(fourth.end(), more.begin(), more.end());
  Request requests[] = {{first, 150, 40, 0, {}}, {second, 250, 60, 0, {}}, {third, 90, 30, 0, {}}, {fourth, 150, 80, 0, {}},
                        {second, 250, 70, 0, {}}};
  Engine engine{session, {}, std::vector<int>(PAGES), {}, std::vector<Request *>(ROWS)};
  size_t came = 0;
  while (came < 5 || !engine.done()) {
    if (came < 5 && engine.steps >= static_cast<int>(came) * 3) engine.waiting.push_back(&requests[came++]);
    engine.step();
  }
  for (const Request &r : requests) check(static_cast<int>(r.text.size()) >= r.prompt + r.wanted, "every request is answered");
  std::printf("%d steps, %d of them with prompts and tokens; %d pages shared, %d preemptions, %d drafts accepted\n", engine.steps,
              engine.mixed_steps, engine.shared_pages, engine.preemptions, engine.accepted_drafts);
  check(engine.mixed_steps > 0 && engine.shared_pages > 0 && engine.preemptions > 0 && engine.accepted_drafts > 0,
        "each thing that this program shows took place");
}

// --- drafts beside the cache ---------------------------------------------------------------------------------------------

// Drafts that never touch the cache: their rows lie in two pages of their own, and those that hold are appended afterwards.
static void run_beside(const vw::Session &session) {
  Cache cache;
  Text text = random_text(200, 6);
  const int prompt = static_cast<int>(text.size());
  constexpr int SPARE = PAGES - 2;
  int cached = 0;
  std::vector<float> ignored(Hq * D);
  // The sequence is the first row, and its page n is page n.
  const auto append = [&](int32_t begin, int32_t end) {
    for (int t = begin; t < end; t++) project(text, t, &cache.k[t * Hk * D], &cache.v[t * Hk * D], ignored.data());
    for (int n = 0; n < MAX; n++) cache.table[n] = n;
    cache.lens[0] = end;
    std::vector<int32_t> from(ROWS);
    from[0] = begin;
    auto update = vw::make<vwd_index_update_args>();
    update.index = &cache.index;
    update.k = cache.kv.k;
    update.page_table = cache.kv.page_table;
    update.seq_lens = cache.kv.seq_lens;
    update.begin = vw::tensor(from);
    session.index_update(update);
    cached = end;
  };
  append(0, prompt - 1);

  while (static_cast<int>(text.size()) < prompt + 60) {
    Text drafted = text;
    std::vector<int32_t> draft(DRAFTS);
    for (int d = 0; d < DRAFTS; d++) {
      draft[d] = next_token(attend_densely(drafted).data());
      if (d == 3) draft[d] = (draft[d] + 1) % VOCABULARY;
      drafted.push_back(draft[d]);
    }
    // [drafts beside]
    // The newest block is copied to a page of the drafts' own; behind it go the last token and its drafts. A second page table
    // reads these pages in place of the cache's. The blocks of the drafts need no summaries, since local_blocks forces them.
    std::vector<float> rows_k(Q * Hk * D), rows_v(Q * Hk * D), q(Q * Hq * D), out(Q * Hq * D);
    const int tail = cached / S;
    std::copy_n(&cache.k[tail * S * Hk * D], S * Hk * D, &cache.k[SPARE * S * Hk * D]);
    std::copy_n(&cache.v[tail * S * Hk * D], S * Hk * D, &cache.v[SPARE * S * Hk * D]);
    for (int r = 0; r < Q; r++) {
      project(drafted, cached + r, &rows_k[r * Hk * D], &rows_v[r * Hk * D], &q[r * Hq * D]);
      const int row = (SPARE * S + cached % S + r) * Hk * D;
      std::copy_n(&rows_k[r * Hk * D], Hk * D, &cache.k[row]);
      std::copy_n(&rows_v[r * Hk * D], Hk * D, &cache.v[row]);
    }
    std::vector<int32_t> table(cache.table.begin(), cache.table.begin() + MAX), lens{cached + Q};
    table[tail] = SPARE;
    table[tail + 1] = SPARE + 1;
    auto kv = cache.kv;
    kv.page_table = vw::tensor(table, {1, MAX});
    kv.seq_lens = vw::tensor(lens);
    auto index = cache.index;
    index.table = vw::tensor(cache.table, {1, MAX});  // summaries are the cache's own
    // [end]
    std::vector<int32_t> ids(Hk * K), counts(Hk), target(Q), accepted(1), next(1), offsets(2);
    auto select = vw::make<vwd_select_blocks_args>();
    select.method = VWD_SELECT_MINMAX;
    select.block_size = S;
    select.k = K;
    select.init_blocks = 1;
    select.local_blocks = 2;
    select.index = &index;
    select.q = vw::tensor(q, {1, Q, Hq, D});
    select.seq_lens = kv.seq_lens;
    select.selected = {vw::tensor(ids, {1, Hk, K}), vw::tensor(counts, {1, Hk}), {}};
    session.select_blocks(select);
    auto attention = vw::make<vwd_attention_args>();
    attention.block_size = S;
    attention.kv = &kv;
    attention.q = select.q;
    attention.list = select.selected;
    attention.out = vw::tensor(out, {1, Q, Hq, D});
    session.attention(attention);
    for (int r = 0; r < Q; r++) target[r] = next_token(&out[r * Hq * D]);

    // [packing]
    // What holds is packed, keys and values in one call (an engine packs those of all layers), and appended.
    std::vector<float> packed_k(DRAFTS * Hk * D), packed_v(DRAFTS * Hk * D);
    const vwd_tensor rows[] = {vw::tensor(rows_k.data() + Hk * D, {1, DRAFTS, Hk, D}),  // behind the last token's own row
                               vw::tensor(rows_v.data() + Hk * D, {1, DRAFTS, Hk, D})};
    const vwd_tensor packed[] = {vw::tensor(packed_k, {DRAFTS, Hk, D}), vw::tensor(packed_v, {DRAFTS, Hk, D})};
    auto verify = vw::make<vwd_verify_pack_args>();
    verify.tensor_count = 2;
    verify.rows = rows;
    verify.packed = packed;
    verify.draft = vw::tensor(draft, {1, DRAFTS});
    verify.target = vw::tensor(target, {1, Q});
    verify.accepted = vw::tensor(accepted);
    verify.next_token = vw::tensor(next);
    verify.offsets = vw::tensor(offsets);
    session.verify_pack(verify);
    // [end]
    for (int a = 0; a <= accepted[0]; a++) {
      check_answer(text, &out[a * Hq * D]);
      text.push_back(a < accepted[0] ? draft[a] : next[0]);
    }
    const int32_t begin = cached;
    append(begin, begin + 1 + accepted[0]);
    check(std::equal(&packed_k[0], &packed_k[0] + accepted[0] * Hk * D, &cache.k[(begin + 1) * Hk * D]) &&
              std::equal(&packed_v[0], &packed_v[0] + accepted[0] * Hk * D, &cache.v[(begin + 1) * Hk * D]),
          "packed rows are those that the text says");
  }
}

// --- more tokens than slots ----------------------------------------------------------------------------------------------

static void run_tiered(const vw::Session &session) {
  Text text = random_text(500, 8);
  const int prompt = static_cast<int>(text.size()), wanted = 60;
  constexpr int BLOCKS = 40, BUDGET = 5;
  // [tiered cache]
  auto options = vw::make<vwd_kv_cache_options>();
  options.layers = 1;
  options.kv_heads = Hk;
  options.block_size = S;
  options.key_dim = options.value_dim = D;
  options.dtype_code = 2;  // DLPack's float
  options.dtype_bits = 32;
  options.max_sequences = 1;
  options.max_blocks = options.host_blocks = BLOCKS;
  options.slots = 2 * Hk * BUDGET;  // what two steps name: a quarter of the blocks
  const auto cache = vw::KvCache::create(session, options);
  const auto slots = cache.view(0);
  const auto sequence = static_cast<int32_t>(cache.add());
  // [end]
  std::vector<float> key_max(BLOCKS * Hk * D), key_min(BLOCKS * Hk * D);
  auto index = vw::make<vwd_index>();
  index.kind = VWD_INDEX_MINMAX;
  index.block_size = S;
  index.key_max = vw::tensor(key_max, {1, BLOCKS, Hk, D});
  index.key_min = vw::tensor(key_min, {1, BLOCKS, Hk, D});

  constexpr int PART = 3 * S;
  std::vector<float> k(PART * Hk * D), v(PART * Hk * D), q(Hq * D), out(Hq * D);
  std::vector<int32_t> sequences{sequence}, begin(1), lens(1), table(BLOCKS);
  const auto append = [&](int from, int count) {
    for (int t = 0; t < count; t++) project(text, from + t, &k[t * Hk * D], &v[t * Hk * D], q.data());
    begin[0] = from;
    lens[0] = from + count;
    cache.extend(static_cast<std::uint32_t>(sequence), static_cast<std::uint64_t>(lens[0]));
    auto args = vw::make<vwd_kv_cache_append_args>();
    args.sequences = vw::tensor(sequences);
    args.begin = vw::tensor(begin);
    args.k = vw::tensor(k, {1, count, Hk, D});
    args.v = vw::tensor(v, {1, count, Hk, D});
    cache.append(args);
  };
  const auto summarise = [&](const vwd_tensor &keys, const vwd_tensor &pages) {
    auto update = vw::make<vwd_index_update_args>();
    update.index = &index;
    update.k = keys;
    update.page_table = pages;
    update.seq_lens = vw::tensor(lens);
    update.begin = vw::tensor(begin);
    session.index_update(update);
  };
  // [tiered prompt]
  // A prompt comes in chunks of whole blocks, whose keys are the pages of their summaries.
  for (int from = 0; from < prompt - 1; from += PART) {
    append(from, std::min(PART, prompt - 1 - from));
    std::fill(table.begin(), table.end(), -1);
    for (int block = 0; block < 3 && from / S + block < BLOCKS; block++) table[from / S + block] = block;
    summarise(vw::tensor(k, {3, S, Hk, D}), vw::tensor(table, {1, BLOCKS}));
  }
  // [end]
  int travelled = 0;
  for (int step = 0; step < wanted; step++) {
    // [tiered step]
    append(static_cast<int>(text.size()) - 1, 1);
    summarise(slots.tail_k, slots.tail_table);  // the newest blocks are always in slots of their own

    std::vector<int32_t> ids(Hk * BUDGET), counts(Hk), places(Hk * BUDGET), there_ids(Hk * BUDGET), there_counts(Hk),
        there_places(Hk * BUDGET), missed(Hk);
    auto select = vw::make<vwd_select_blocks_args>();
    select.method = VWD_SELECT_MINMAX;
    select.block_size = S;
    select.k = BUDGET;
    select.init_blocks = select.local_blocks = 1;
    select.index = &index;
    select.q = vw::tensor(q, {1, Hq, D});
    select.seq_lens = vw::tensor(lens);
    select.selected = {vw::tensor(ids, {1, Hk, BUDGET}), vw::tensor(counts, {1, Hk}), {}};
    session.select_blocks(select);

    auto resolve = vw::make<vwd_kv_cache_resolve_args>();
    resolve.sequences = vw::tensor(sequences);
    resolve.wanted = select.selected;
    resolve.wanted.slots = vw::tensor(places, {1, Hk, BUDGET});
    resolve.resident = {vw::tensor(there_ids, {1, Hk, BUDGET}), vw::tensor(there_counts, {1, Hk}),
                        vw::tensor(there_places, {1, Hk, BUDGET})};
    resolve.missed_counts = vw::tensor(missed, {1, Hk});
    cache.resolve(resolve);
    cache.fetch(0);  // on a GPU the copies run beside the attention

    std::vector<float> acc(Hq * D), m(Hq), l(Hq);
    auto kv = vw::make<vwd_paged_kv>();
    kv.k = slots.k;
    kv.v = slots.v;
    kv.seq_lens = vw::tensor(lens);
    auto attention = vw::make<vwd_attention_args>();
    attention.block_size = S;
    attention.kv = &kv;
    attention.q = select.q;
    attention.list = resolve.resident;
    attention.out = vw::tensor(out, {1, Hq, D});
    attention.state = {vw::tensor(acc, {1, Hq, D}), vw::tensor(m, {1, Hq}), vw::tensor(l, {1, Hq})};
    session.attention(attention);

    cache.wait(0);
    auto repair = vw::make<vwd_repair_args>();
    repair.mode = VWD_REPAIR_SUPERSET;  // what is resident was selected: nothing has to be taken out
    repair.block_size = S;
    repair.kv = &kv;
    repair.q = attention.q;
    repair.predicted = {resolve.resident.ids, resolve.resident.counts, {}};
    repair.selected = resolve.wanted;
    repair.predicted_state = attention.state;
    repair.out = attention.out;
    session.repair(repair);
    // [end]
    travelled += missed[0] + missed[1];
    check_answer(text, out.data());
    text.push_back(next_token(out.data()));
  }
  std::printf("%zu tokens through %u slots: %d of %d blocks travelled\n", text.size(), options.slots, travelled, wanted * Hk * BUDGET);
  check(travelled > 0, "blocks travel");
}

int main() {
  auto options = vw::make<vwd_session_options>();
  options.device = VWD_DEVICE_CPU;
  const auto session = vw::Session::create(options);
  run_batches(session);
  run_beside(session);
  run_tiered(session);
  std::printf("%d answers are those of dense attention\n", answers);
}
