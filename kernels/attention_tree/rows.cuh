// What the rows of a draft tree see, for attention/verify128.cuh: a Rows of VerifyProducts. general.cu says what a row sees. In a tile of the tree's
// own tokens a thread looks the bits of its two rows up, those of the first 32 nodes in a register.
#pragma once

#include "attention/verify128.cuh"
#include "attention_tree/reach.cuh"

// Parameters: those of the kernel, which begin with AttentionParams and have a tree.
template <typename Parameters, uint32 REGISTERS_OF_THREAD>
struct TreeRows {
    static constexpr uint32 REGISTERS = REGISTERS_OF_THREAD;
    static constexpr int32 SEEN_BY_ALL = 0;  // not even the root: a node that no sound link reaches sees itself alone

    uint32 word[2], positions;  // of the thread's two rows: the bits of nodes 0 … 31; their query positions, 16 bits each

    __device__ explicit TreeRows(const VerifyJob &) : word{0, 0}, positions(0) {}
    __device__ static TreeReach reach_of(const AttentionParams &p, const WorkItem &item, const Reach &chain) {
        return {p, item, chain, reinterpret_cast<const Parameters &>(p).tree};
    }
    // A list of one row may have tokens that the row does not see; of another list each token is seen by its own row. Each warp that copies keeps the bits
    // of the row in shared memory: registers are few.
    struct Seen {
        static constexpr uint32 COPYING_WARPS = 8, WORDS = 32;

        __device__ static uint32 *words() {
            __shared__ uint32 of_warps[COPYING_WARPS][WORDS];
            return of_warps[threadIdx.x / WARP % COPYING_WARPS];
        }
        __device__ static void find(const AttentionParams &p, const WorkItem &item, const Reach &chain) {
            if (!p.own_lists) return;
            const TreeReach reach = reach_of(p, item, chain);
            const uint32 row = item.position, n = threadIdx.x % WARP;
            uint32 word = n <= row / 32 && row < WORDS * 32 ? reach.word(row, n) : 0xffffffff;
#pragma unroll 1
            for (uint32 node = n * 32; p.window && node <= min(row, n * 32 + 31); node++)
                if (!is_seen(p, reach, row, reach.root() + int32(node))) word &= ~(1u << node % 32);
            words()[n] = word;
            __syncwarp();
        }
        __device__ static bool has(const AttentionParams &p, int32 node) { return !p.own_lists || node < 0 || words()[node / 32 % WORDS] >> node % 32 & 1; }
    };
    __device__ void row(const VerifyJob &job, uint32 i, uint32 position, int32 &first, uint32 &count) {
        const TreeReach reach = reach_of(job.p, job.item, job.reach);
        positions |= position << i * 16;
        word[i] = reach.word(position, 0);
        reach.row(job.p, position, first, count);
    }
    __device__ uint32 hidden(const VerifyJob &job, uint32 stage) const {
        const int32 root = job.reach.length - job.reach.queries;
        uint32 found = 0;
#pragma unroll 1
        for (uint32 j = 0; j < STAGE_TOKENS / 8; j++) {
            const int2 tokens = job.tokens_of(stage, j);
            if (max(tokens.x, tokens.y) < root) continue;
            const uint32 of_rows = !sees(job, 0, tokens.x) | !sees(job, 0, tokens.y) << 1 | !sees(job, 1, tokens.x) << 2 | !sees(job, 1, tokens.y) << 3;
            found |= of_rows << j * 4;
        }
        return found;
    }

private:
    // Whether the thread's row i sees a token. What it says of one beyond the row's reach does not matter.
    __device__ bool sees(const VerifyJob &job, uint32 i, int32 token) const {
        const uint32 row = positions >> i * 16 & 0xffff, node = token - (job.reach.length - job.reach.queries);
        if (node > row) return true;
        if (node < 32 && !job.p.window) return word[i] >> node & 1;
        return is_seen(job.p, reach_of(job.p, job.item, job.reach), row, token);
    }
};
