/* Where a batch keeps keys and values, and what sequences share of them: pages that attention reads where they are (paged.c), or a tiered
 * cache in host memory (tiered.c). Both count pages of PAGE_TOKENS tokens.
 *
 * A call that fails for another reason than room sets `broken` and `error` of the batch. */
#ifndef ENGINE_STORE_H
#define ENGINE_STORE_H

#include "batch.h"

typedef struct sequence sequence;
typedef struct group group;

typedef struct {
  int most_rows; /* of a sequence in a step of the decoder; a pass that has more of a prompt makes several steps in each layer */

  /* Makes the memory, and the decoder by options that lack what depends on the memory. */
  bool (*create)(batch *b, vwd_decoder_options *options, batch_error *error);
  void (*release)(batch *b);

  /* Pages for the text so far, of which those that are known are shared. False, and nothing changed, where that leaves less than a page for
   * each sequence that runs: one of them would soon have to give its own back. */
  bool (*enter)(batch *b, sequence *s);
  /* Shares what has become known since, such as what another sequence has filled. */
  void (*share)(batch *b, sequence *s);
  /* Pages for so many tokens in all. False where none is left. */
  bool (*take)(batch *b, sequence *s, int64_t tokens);
  /* Gives the pages back; known ones stay known until their room is needed. */
  void (*leave)(batch *b, sequence *s);
  /* Full pages become known, those of sparse steps aside. */
  void (*publish)(batch *b, sequence *s);

  /* Member n of the pass has the tokens first … first + count − 1 of a sequence. The first token whose summaries it makes. */
  int32_t (*add)(batch *b, sequence *s, int n, uint32_t mode, int first, int count);
  /* Says in a decoder's step where the members of a group have their tokens, and in a layer's arguments where all have theirs. */
  void (*place)(const batch *b, const group *g, vwd_decoder_step *step);
  void (*place_layer)(const batch *b, int layer, vwd_decoder_attend_args *args);

  /* Moves the accepted nodes of a group's trees to where their texts have them, and sees to it that no summary of other nodes is read. */
  bool (*compact)(batch *b, const group *g, vwd_tensor path, vwd_tensor accepted);

  void (*count)(const batch *b, batch_counters *out);
} store;

extern const store paged_store, tiered_store;

#endif
