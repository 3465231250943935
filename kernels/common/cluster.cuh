// How the CTAs of a cluster exchange words through shared memory (compute capability 9.0; elsewhere a CTA is alone).
#pragma once

#include "common/barrier.cuh"

__device__ inline uint32 cluster_ctas() {
    uint32 n = 1;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
#endif
    return n;
}
__device__ inline uint32 cluster_rank() {
    uint32 rank = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}

// A barrier of all threads of the cluster in two halves: writes before the first half are seen after the second.
__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// The address in CTA `rank` of what lies at p in this CTA's shared memory.
__device__ inline uint32 address_in(uint32 rank, const void *p) {
    uint32 there = shared_address(p);
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(there) : "r"(rank));
#endif
    return there;
}
// Loads two words at p in CTA `rank`. Without clusters that is this CTA.
__device__ inline uint2 load_two_from(uint32 rank, const uint32 *p) {
#if __CUDA_ARCH__ >= 900
    uint2 x;
    asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address_in(rank, p)) : "memory");
    return x;
#else
    return *reinterpret_cast<const uint2 *>(p);
#endif
}
__device__ inline void store_word_to(uint32 rank, uint32 *p, uint32 x) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address_in(rank, p)), "r"(x) : "memory");
#else
    *p = x;
#endif
}
// p is aligned to 8 bytes.
__device__ inline void store_two_to(uint32 rank, uint32 *p, const uint2 &x) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(address_in(rank, p)), "r"(x.x), "r"(x.y) : "memory");
#else
    *reinterpret_cast<uint2 *>(p) = x;
#endif
}
// Adds x to *p in CTA `rank`.
__device__ inline void add_word_in(uint32 rank, uint32 *p, uint32 x) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" ::"r"(address_in(rank, p)), "r"(x) : "memory");
#else
    atomicAdd(p, x);
#endif
}

// A barrier of the cluster in two halves, after which all its CTAs have started and see the barriers that were opened before the first half.
// It orders no other memory, as it would then wait for all earlier writes.
__device__ inline void cluster_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ inline void cluster_started() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
// Counts bytes that a CTA which is alone has written itself, as if they had arrived.
__device__ inline void complete_local_bytes(const Barrier &arrived, uint32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.acq_rel.cta;\n\t"
                 "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&arrived)), "r"(bytes) : "memory");
#endif
}
// Sends a word to p in CTA `rank`, together with its arrival at the barrier there. MAY_BE_ALONE: the CTA may be in no cluster.
template <bool MAY_BE_ALONE = true> __device__ inline void send_word(uint32 rank, uint32 *p, uint32 x, const Barrier &arrived) {
#if __CUDA_ARCH__ >= 900
    if (MAY_BE_ALONE && cluster_ctas() == 1) {
        *p = x;
        return complete_local_bytes(arrived, sizeof(x));
    }
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address_in(rank, p)), "r"(x),
                 "r"(address_in(rank, &arrived)) : "memory");
#endif
}
// p is aligned to 8 bytes.
template <bool MAY_BE_ALONE = true> __device__ inline void send_two(uint32 rank, void *p, const uint2 &x, const Barrier &arrived) {
#if __CUDA_ARCH__ >= 900
    if (MAY_BE_ALONE && cluster_ctas() == 1) {
        *static_cast<uint2 *>(p) = x;
        return complete_local_bytes(arrived, sizeof(x));
    }
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];" ::"r"(address_in(rank, p)),
                 "r"(x.x), "r"(x.y), "r"(address_in(rank, &arrived)) : "memory");
#endif
}
// The same to addresses that address_in() gave, or that lie as far behind them as they do in this CTA.
__device__ inline void send_four_to(uint32 there, const uint4 &x, uint32 arrived) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(there), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w), "r"(arrived) : "memory");
#endif
}
// p is aligned to 16 bytes.
template <bool MAY_BE_ALONE = true> __device__ inline void send_four(uint32 rank, void *p, const uint4 &x, const Barrier &arrived) {
#if __CUDA_ARCH__ >= 900
    if (MAY_BE_ALONE && cluster_ctas() == 1) {
        *static_cast<uint4 *>(p) = x;
        return complete_local_bytes(arrived, sizeof(x));
    }
    send_four_to(address_in(rank, p), x, address_in(rank, &arrived));
#endif
}

// What the CTAs of a cluster, or a CTA that is alone, send to the first CTA. Nothing is fenced, as words and their arrival travel together
// (st.async). Calls: open() ─ join() ─ send() ─ receive().
struct Mailbox {
    Barrier arrived;  // counts the bytes still to arrive

    // Called early: the CTAs of the cluster start between this and join().
    __device__ void open() {
#if __CUDA_ARCH__ >= 900
        if (cluster_ctas() == 1) return;
        if (threadIdx.x == 0) arrived.open(1);
        __syncwarp();
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
    }
    // Called by all threads, as all that follows. Afterwards the CTAs of the cluster have started.
    __device__ void start() const {
#if __CUDA_ARCH__ >= 900
        if (cluster_ctas() == 1) return;
        asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
    }
    // The first CTA's threads say how many bytes arrive, its own included. Some may have arrived before.
    __device__ void expect(uint32 bytes) const {
#if __CUDA_ARCH__ >= 900
        if (cluster_ctas() == 1) return;
        if (cluster_rank() == 0 && threadIdx.x == 0) arrived.expect(bytes);
#endif
    }
    __device__ void join(uint32 bytes) const { start(), expect(bytes); }
    // Sends a word to p in the first CTA's shared memory.
    __device__ void send(uint32 *p, uint32 x) const {
#if __CUDA_ARCH__ >= 900
        if (cluster_ctas() > 1) {
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address_in(0, p)), "r"(x),
                         "r"(address_in(0, &arrived)) : "memory");
            return;
        }
#endif
        *p = x;
    }
    // Waits until all words have arrived. Called by all threads of the first CTA.
    __device__ void receive() const {
#if __CUDA_ARCH__ >= 900
        if (cluster_ctas() > 1) {
            arrived.wait(0);
            return;
        }
#endif
        __syncthreads();
    }
};

// A table that a cluster of 1, 2, 4 or 8 CTAs fills together. Each CTA fills a share of the entries, a whole number of chunks, and sends it to
// the others. Nothing is fenced, as a chunk and its arrival travel together (st.async).
template <uint32 ENTRIES>
struct SharedTable {
    static constexpr uint32 CHUNK = 16;
    alignas(CHUNK) uint8 entry[ENTRIES];
    Barrier arrived;  // counts the bytes still to arrive

    __device__ static uint32 chunks(uint32 entries) { return (entries + CHUNK - 1) / CHUNK; }

    // Called early: the CTAs of the cluster start between this and exchange(). CTA r fills `share` entries from r · share on.
    __device__ void open(uint32 share, uint32 entries) {
#if __CUDA_ARCH__ >= 900
        if (cluster_ctas() == 1) return;
        if (threadIdx.x == 0) {
            const uint32 begin = min(cluster_rank() * share, entries), end = min(begin + share, entries);
            arrived.open(1);
            arrived.expect((chunks(entries) - chunks(end - begin)) * CHUNK);
        }
        __syncwarp();
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
    }
    // Called once this CTA has filled its share; afterwards all entries are here. A thread sends one chunk to one CTA, and there are enough threads.
    __device__ void exchange(uint32 share, uint32 entries) {
        __syncthreads();
#if __CUDA_ARCH__ >= 900
        const uint32 ctas = cluster_ctas();
        if (ctas == 1) return;
        asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
        const uint32 peer = threadIdx.x & (ctas - 1), within = (threadIdx.x >> (__ffs(ctas) - 1)) * CHUNK;
        const uint32 begin = cluster_rank() * share + within;
        if (peer != cluster_rank() && within < share && begin < entries) {
            const uint4 chunk = *reinterpret_cast<const uint4 *>(entry + begin);
            asm volatile("{\n\t.reg .b32 there, barrier;\n\t"
                         "mapa.shared::cluster.u32 there, %0, %2;\n\t"
                         "mapa.shared::cluster.u32 barrier, %1, %2;\n\t"
                         "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [there], {%3, %4, %5, %6}, [barrier];\n\t}" ::"r"(
                             shared_address(entry + begin)),
                         "r"(shared_address(&arrived)), "r"(peer), "r"(chunk.x), "r"(chunk.y), "r"(chunk.z), "r"(chunk.w) : "memory");
        }
        arrived.wait(0);
#endif
    }
};
