// What the environment says; README.md has the table.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace vanward {

enum class Method { minmax, axis };

struct Options {
    bool enabled = true;
    /** Whether blocks are selected; otherwise every visible token is attended to. */
    bool sparse = true;
    /** How blocks are scored. */
    Method method = Method::axis;
    /** Tokens of a block. */
    int block = 16;
    /** The budget: a number of tokens, or else a share of the visible tokens. */
    int64_t budget_tokens = 0;
    double budget_share = 0.25;
    /** Layers that are never sparse. */
    std::vector<int> dense_layers;
    /** A cache with no more rows than this is left to ggml, and a sequence with no more tokens is not sparse; −1: what suits the device. */
    int64_t dense_below = -1;
    /** Most query rows of a node; more are a prompt, which is ggml's. */
    int64_t rows = 32;
    /** Threads of an attention; 0: as many as the context uses. */
    int threads = 0;
    /** ggml's devices that are wrapped: names, or beginnings of names with a * at the end. */
    std::vector<std::string> devices = {"CUDA*"};
    /** The backend that has them; empty: those that ggml loaded. */
    std::string backend;
    /** Whether steps on a GPU are captured and replayed. */
    bool graphs = true;
    /** Whether a layer's selection on a GPU runs beside its keys and values, where it does not need them. */
    bool beside = true;
    /** Whether everything is checked against plain loops; for tests. */
    bool check = false;

    int64_t dense_below_on(bool gpu) const { return dense_below >= 0 ? dense_below : gpu ? 12288 : 4096; }

    bool is_dense(int layer) const {
        for (int each : dense_layers) {
            if (each == layer) {
                return true;
            }
        }
        return false;
    }
};

/** Reads the environment. Returns an empty string, or what is wrong: the variable, what was found, what was expected. */
std::string read_options(Options &options);

extern Options options;

}  // namespace vanward
