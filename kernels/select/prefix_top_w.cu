// Exact prefix top-w: stop[j] = the first position at which `window` better-ranked keys exist; j if that many exist
// before position j already (never visible) or the key is no candidate; NEVER if it outlives the sequence.
// Rank: (score, j), highest first; NaN above everything, -0 = +0. With DOCUMENTS a key competes only with keys of its
// own document, and `document` is the row of the document's first key. With HEAD_WINDOWS each kv head has its own
// window, and the parameter `window` is the largest.
//
// score    // (B, Hkv, Lk) f32, any strides       padding // (1|B, Lk) bytes, 0 = no candidate (PADDING)
// document // (1|B, Lk) int32 (DOCUMENTS)         stop    // (B, Hkv, Lk) int32, contiguous
// start    // (Lk) int32, becomes 0, 1, 2, ...; or null
//
// Three kernels; a row is one (batch, kv head), cut into chunks:
//   local_top        a chunk's `window` best keys                                         -> local
//   filter_arrivals  the best of all earlier chunks' lists are kept when the chunk begins (kept). Keys of the chunk
//                    below the last of these are never visible; the others arrive               -> kept, arrivals, stop
//   sweep_arrivals   a block takes ARRIVALS arrivals of a chunk. It finds the keys kept before the first of them, which
//                    of these can be dropped after so many arrivals, and for each of these and of the arrivals the time
//                    of the n-th better arrival, n = window - (kept keys that are better)    -> stop
// A key is dropped in one block, which writes its stop; filter_arrivals writes all others. If all keys up to the end of
// a chunk are equal, the window slides: each of its keys pushes out the one `window` keys before it.
//
// If few keys compete, one kernel compares each of them with all others:
//   count_better     a thread scans the row until `window` keys are better than its own -> stop
//
// Prelude: DOCUMENTS, PADDING, HEAD_WINDOWS.
#include "common/arch.cuh"
#include "common/rank.cuh"
#include "common/block_select.cuh"

struct SelectParams {
    const float* score;
    const unsigned char* padding;
    const int* document;
    Ranked* local;        // (rows, chunks, local_capacity), unordered, padded with 0
    Ranked* kept;         // (rows, chunks, window), unordered
    int* kept_count;      // (rows, chunks)
    Ranked* arrivals;     // (rows, chunks, chunk), by position
    int* arrival_count;   // (rows, chunks); SLIDES if the window slides
    int* stop;
    int* start;
    long long score_batch, score_head, score_key;  // strides, in elements
    long long padding_batch, document_batch;
    int kv_heads, key_length, window, chunk, chunks, local_capacity;
    int head_window[128];  // (kv_heads) HEAD_WINDOWS
};

constexpr int LIST_THREADS = 1024;  // of local_top and filter_arrivals
constexpr int SWEEP_THREADS = 512;
constexpr int ARRIVALS = 256;
constexpr int SLIDES = -1;

struct Row {
    const SelectParams& p;
    int row, batch, window;
    const float* score;

    __device__ Row(const SelectParams& p, int row)
        : p(p), row(row), batch(row / p.kv_heads),
#if HEAD_WINDOWS
          window(p.head_window[row % p.kv_heads]),
#else
          window(p.window),
#endif
          score(p.score + batch * p.score_batch + row % p.kv_heads * p.score_head) {}

    __device__ __forceinline__ Ranked ranked(int j) const {
#if PADDING
        if (p.padding[batch * p.padding_batch + j] == 0) return 0;
#endif
        return static_cast<Ranked>(ordered(score[j * p.score_key])) << 32 | static_cast<unsigned>(j);
    }

    // Row of the first key that key j competes with.
    __device__ __forceinline__ int since(int j) const {
#if DOCUMENTS
        return p.document[batch * p.document_batch + j];
#else
        return 0;
#endif
    }

    __device__ __forceinline__ long long chunk(int c) const { return (long long)row * p.chunks + c; }
};

// 32 keys' ranks and documents.
struct Keys {
    unsigned ranks[32];
    int documents[32];  // DOCUMENTS

    __device__ __forceinline__ Keys(const unsigned* of, const int* document) {
#pragma unroll
        for (int i = 0; i < 32; i += 4) *reinterpret_cast<uint4*>(ranks + i) = *reinterpret_cast<const uint4*>(of + i);
#if DOCUMENTS
#pragma unroll
        for (int i = 0; i < 32; i += 4)
            *reinterpret_cast<int4*>(documents + i) = *reinterpret_cast<const int4*>(document + i);
#endif
    }

    __device__ __forceinline__ unsigned above(unsigned limit, int document) const {
        unsigned found = 0;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            bool higher = ranks[i] > limit;
#if DOCUMENTS
            higher = higher && documents[i] == document;
#endif
            found |= static_cast<unsigned>(higher) << i;
        }
        return found;
    }

    // A bit per key that is better than the `own`-th of them would be (below 0: an older key, above 31: a newer one):
    // keys of its document with a higher rank, or an equal one if they are newer.
    __device__ __forceinline__ unsigned better(unsigned rank, int document, int own) const {
        const unsigned found = above(own < 0 ? rank - 1 : rank, document);
        if (own < 0 || own > 31) return found;
        const unsigned newer = 0xfffffffeu << own;
        return (found & ~newer) | (above(rank - 1, document) & newer);
    }
};

// Position of the n-th set bit, n >= 1.
__device__ __forceinline__ int nth_bit(unsigned bits, int n) {
    int position = 0;
#pragma unroll
    for (int half = 16; half > 0; half /= 2) {
        const int lower = __popc(bits & ((1u << half) - 1));
        if (n <= lower) continue;
        n -= lower;
        bits >>= half;
        position += half;
    }
    return position;
}

extern "C" __global__ void __launch_bounds__(LIST_THREADS) local_top(const SelectParams p) {
    wait_for_earlier_kernels();
    __shared__ SelectShared shared;
    __shared__ int stored;
    const int c = blockIdx.x % p.chunks;
    const Row row(p, blockIdx.x / p.chunks);
    if (c == p.chunks - 1) return;  // no chunk follows
    const int first = c * p.chunk;  // every chunk but the last is full
    const int since = row.since(first + p.chunk - 1);
    auto entry = [&](int i) { return first + i >= since ? row.ranked(first + i) : 0; };
    const Candidates<LIST_THREADS, 4, decltype(entry)> candidates(entry, p.chunk);
    const Selection best = select_highest(candidates, range_of(candidates, rank_of, shared), row.window, shared);

    Ranked* local = p.local + row.chunk(c) * p.local_capacity;
    if (threadIdx.x == 0) stored = 0;
    __syncthreads();  // the counter is 0
    candidates.for_each([&](Ranked e) {
        if (e >= best.threshold) local[atomicAdd(&stored, 1)] = e;
    });
    for (int i = best.count + threadIdx.x; i < p.local_capacity; i += LIST_THREADS) local[i] = 0;
}

extern "C" __global__ void __launch_bounds__(LIST_THREADS) filter_arrivals(const SelectParams p) {
    wait_for_earlier_kernels();
    __shared__ SelectShared shared;
    __shared__ int stored;
    const int c = p.chunks - 1 - blockIdx.x % p.chunks;  // the longest first
    const Row row(p, blockIdx.x / p.chunks);
    const int first = c * p.chunk, count = min(p.chunk, p.key_length - first), since = row.since(first);

    const Ranked* lists = p.local + row.chunk(0) * p.local_capacity;
    auto entry = [&](int i) {
        const Ranked e = lists[i];
        return row_of(e) >= since ? e : 0;
    };
    const Candidates<LIST_THREADS, 16, decltype(entry)> candidates(entry, c * p.local_capacity);
    const unsigned rank = rank_of(row.ranked(first));  // read among other loads, so that nothing waits for it alone
    const WordRange ranks = range_of(candidates, rank_of, shared);
    const Selection best = select_highest(candidates, ranks, row.window, shared);
    if (threadIdx.x == 0) {
        stored = 0;
        p.kept_count[row.chunk(c)] = best.count;
    }
    __syncthreads();  // the counter is 0
    Ranked* kept = p.kept + row.chunk(c) * p.window;
    candidates.for_each([&](Ranked e) {
        if (e >= best.threshold) kept[atomicAdd(&stored, 1)] = e;
    });

    // Do the kept keys and the chunk's all have the same rank, with none missing?
    const Ranked oldest = static_cast<Ranked>(rank) << 32 | static_cast<unsigned>(first - row.window);
    bool slides = rank != 0 && (ranks.count == 0 || (ranks.low == rank && ranks.span == 0))
                  && (best.count == first - since || best.threshold == oldest);

    // Arrivals in the order of their positions: a thread reads consecutive keys, LIST_THREADS * OWN keys per round.
    constexpr int OWN = 4;
    int arrived = 0;
    Ranked* arrivals = p.arrivals + row.chunk(c) * p.chunk;
    int* stop = p.stop + (long long)row.row * p.key_length;
    for (int base = 0; base < count; base += LIST_THREADS * OWN) {
        Ranked own[OWN];
        int passing = 0, total;
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            const int i = base + threadIdx.x * OWN + k, j = first + i;
            own[k] = i < count ? row.ranked(j) : 0;
            const bool rival = best.count == row.window && row.since(min(j, p.key_length - 1)) == since;
            if (rival && own[k] < best.threshold) own[k] = 0;
            passing += own[k] != 0;
            slides = slides && (i >= count || rank_of(own[k]) == rank);
        }
        int slot = arrived + exclusive_sum<LIST_THREADS>(passing, total, shared.warp_sums);
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            const int i = base + threadIdx.x * OWN + k;
            if (own[k] != 0) arrivals[slot++] = own[k];
            if (i < count) stop[first + i] = own[k] != 0 ? NEVER : first + i;
            if (i < count && row.row == 0 && p.start != nullptr) p.start[first + i] = first + i;
        }
        arrived += total;
    }
    slides = __syncthreads_and(slides);
    if (threadIdx.x == 0) p.arrival_count[row.chunk(c)] = slides ? SLIDES : arrived;
}

extern "C" __global__ void __launch_bounds__(SWEEP_THREADS) sweep_arrivals(const SelectParams p) {
    wait_for_earlier_kernels();
    __shared__ SelectShared shared;
    __shared__ __align__(16) Ranked mortal[ARRIVALS];    // kept keys that can be dropped, padded with 0
    __shared__ __align__(16) unsigned arriving[ARRIVALS];  // ranks of the arrivals, by position, padded with 0
    __shared__ int time[ARRIVALS];                         // their positions
    __shared__ __align__(16) int document[ARRIVALS];       // and documents
    __shared__ int stored;
    const int slices = (p.chunk + ARRIVALS - 1) / ARRIVALS;
    const int slice = blockIdx.x % slices, c = blockIdx.x / slices % p.chunks;
    const Row row(p, blockIdx.x / slices / p.chunks);
    const int arrived = p.arrival_count[row.chunk(c)];
    if (arrived == SLIDES) {
        const int j = c * p.chunk + slice * ARRIVALS + threadIdx.x;
        if (threadIdx.x < ARRIVALS && j < p.key_length && j - row.window >= row.since(j))
            p.stop[(long long)row.row * p.key_length + j - row.window] = j;
        return;
    }
    const int before = slice * ARRIVALS, coming = min(ARRIVALS, arrived - before);
    if (coming <= 0) return;

    // The keys kept when the first arrival comes: the best of the chunk's kept set and the arrivals before it.
    const Ranked* kept = p.kept + row.chunk(c) * p.window;
    const Ranked* arrivals = p.arrivals + row.chunk(c) * p.chunk;
    const int kept_count = p.kept_count[row.chunk(c)], since = row.since(row_of(arrivals[before]));
    auto entry = [&](int i) {
        const Ranked e = i < kept_count ? kept[i] : arrivals[i - kept_count];
        return row_of(e) >= since ? e : 0;
    };
    const Candidates<SWEEP_THREADS, 6, decltype(entry)> candidates(entry, kept_count + before);
    const WordRange ranks = range_of(candidates, rank_of, shared);
    const Selection held = select_highest(candidates, ranks, row.window, shared);
    const int mortals = min(held.count, coming - (row.window - held.count));  // each arrival pushes out at most one
    if (mortals <= 0 && coming <= row.window) return;
    const int safe = held.count - max(mortals, 0);
    const Selection secure = select_highest(candidates, ranks, safe, shared);
    if (threadIdx.x == 0) stored = 0;
    if (threadIdx.x < ARRIVALS) {
        const Ranked e = threadIdx.x < coming ? arrivals[before + threadIdx.x] : 0;
        arriving[threadIdx.x] = rank_of(e);
        time[threadIdx.x] = row_of(e);
        document[threadIdx.x] = e != 0 ? row.since(row_of(e)) : -1;
        mortal[threadIdx.x] = 0;
    }
    __syncthreads();  // the counter is 0, arrivals are in place, mortal is empty
    candidates.for_each([&](Ranked e) {
        if (e >= held.threshold && e < secure.threshold) mortal[atomicAdd(&stored, 1)] = e;
    });
    __syncthreads();  // mortal is complete

    const bool arrives = threadIdx.x >= ARRIVALS;
    const int mine = threadIdx.x & (ARRIVALS - 1);
    if (mine >= (arrives ? coming : stored)) return;
    const Ranked e = arrives ? static_cast<Ranked>(arriving[mine]) << 32 | static_cast<unsigned>(time[mine]) : mortal[mine];
    const int own_document = arrives ? document[mine] : since;

    int better = 0;  // initially kept keys that rank above e; too many for e above a safe key, which cannot die here
    if (own_document == since) {
        better = safe;
        for (int i = 0; i < stored; i += 8)
#pragma unroll
            for (int k = 0; k < 8; ++k) better += mortal[i + k] > e;
    }
    // Arrivals that rank above e: those with a higher score, or an equal one if they are newer. Of ARRIVALS keys a warp
    // holds 32 consecutive ones, so all but its own 32 arrivals are either older or newer than all of it.
    int remaining = row.window - better;  // e is dropped after this many better arrivals
    int fatal = remaining <= 0 ? 0 : ARRIVALS;
    const unsigned rank = rank_of(e);
    const int slot = arrives ? mine : -1;
    for (int base = 0; base < coming && fatal == ARRIVALS; base += 32) {
        const unsigned above = Keys(arriving + base, document + base).better(rank, own_document, slot - base);
        const int count = __popc(above);
        if (count >= remaining) fatal = base + nth_bit(above, remaining);
        remaining -= count;
    }
    if (fatal == ARRIVALS) return;
    const int j = row_of(e);
    p.stop[(long long)row.row * p.key_length + j] = max(time[fatal], j);  // before its own arrival: never visible
}

constexpr int COUNT_THREADS = 128;
constexpr int ROUND = 1024;  // keys of a row whose ranks are in shared memory

extern "C" __global__ void __launch_bounds__(COUNT_THREADS) count_better(const SelectParams p) {
    wait_for_earlier_kernels();
    __shared__ __align__(16) unsigned ranks[ROUND];  // 0: no candidate
    __shared__ __align__(16) int document[ROUND];
    const int slices = (p.key_length + COUNT_THREADS - 1) / COUNT_THREADS;
    const int first_key = blockIdx.x % slices * COUNT_THREADS;
    const Row row(p, blockIdx.x / slices);
    const int j = first_key + threadIdx.x;
    const Ranked e = j < p.key_length ? row.ranked(j) : 0;
    const unsigned rank = rank_of(e);
    const int own_document = row.since(min(j, p.key_length - 1));
    int remaining = row.window;  // the key is dropped after this many better keys
    int stop = e != 0 ? NEVER : j;
    for (int base = row.since(first_key) & ~31; base < p.key_length; base += ROUND) {
        if (!__syncthreads_or(stop == NEVER)) break;  // and nobody reads the round before any more
#pragma unroll
        for (int i = 0; i < ROUND; i += COUNT_THREADS) {
            const int slot = i + threadIdx.x, k = min(base + slot, p.key_length - 1);
            const unsigned met = rank_of(row.ranked(k));
            ranks[slot] = k == base + slot ? met : 0;
            document[slot] = row.since(k);
        }
        __syncthreads();  // the round is in place
        const int end = min(ROUND, p.key_length - base), own = j - base;
        int fatal = -1;  // the 32 keys during which it is dropped; which of them is determined once, as that is slow
#pragma unroll 1
        for (int from = 0; from < end; from += 32) {
            const int count = __popc(Keys(ranks + from, document + from).better(rank, own_document, own - from));
            if (fatal >= 0) continue;
            if (count < remaining) remaining -= count;
            else fatal = from;
        }
        if (fatal < 0 || stop != NEVER) continue;
        const unsigned better = Keys(ranks + fatal, document + fatal).better(rank, own_document, own - fatal);
        stop = max(base + fatal + nth_bit(better, remaining), j);  // before its own arrival: never visible
    }
    if (j >= p.key_length) return;
    p.stop[(long long)row.row * p.key_length + j] = stop;
    if (row.row == 0 && p.start != nullptr) p.start[j] = j;
}
