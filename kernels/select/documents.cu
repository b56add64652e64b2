// Selection within documents, and of one set of keys for all queries: everything except ranking (SPEC section 3).
//
//   runs_of_lengths  first key and end (one past the last key) of every key's document, from cumulative lengths: a
//                    binary search per key, log2(n) reads shared by all keys of a document, 8 bytes written
//   runs_of_ids      the same from an id per key; a document begins wherever the id changes. A block takes a chunk of a
//                    row and searches for the nearest changes before and after it. Per key 8 bytes written and one id
//                    read; per chunk also the ids of all keys of the documents that cross its edges
//   finish_runs      the positions that see a key, from the position at which `prefix_top_w.cu` drops it: per key and
//                    head 4 bytes read, 4 written, and 8 of its document read
//
//     prefix         start = j,  stop = min(stop, end)
//     global         start = first,  stop = (stop >= end and the key is real) ? end : first
//
// where the first document begins before, and the last ends after, all positions. With `apart` the attention separates
// the documents, and all runs are open in this way. A key is among the best of its document if it outlives it.
//
// documents   // (count) cumulative lengths or (rows, Lk) ids, ID, any strides
// first, end  // (rows, Lk) int32         stop     // (B, Hkv, Lk) int32, contiguous
// start       // (rows|1, Lk) int32       padding  // (1|B, Lk) bytes, 0 = no candidate
//
// Prelude: ID.
#include "common/arch.cuh"

struct DocumentParams {
    const ID* documents;
    int* first;
    int* end;
    long long row_stride, stride;  // of `documents`, in elements
    int count, key_length;
};

struct RunParams {
    const int* first;              // null: no documents
    const int* end;
    const unsigned char* padding;  // null: none
    int* stop;
    int* start;                    // null: not wanted, or written already
    long long document_batch, padding_batch;  // strides, in elements; start uses document_batch if it has a batch axis
    int kv_heads, key_length;
    int global, apart;
    int everything;                // every key is kept: `stop` holds nothing yet
};

constexpr int THREADS = 256;
constexpr int WORDS = 128, CHUNK = 32 * WORDS;
constexpr int AHEAD = 8;  // keys that a thread reads in one step of a search
constexpr int EVER = INT_LOWEST;  // start of a key that is visible from the beginning

extern "C" __global__ void __launch_bounds__(THREADS) runs_of_lengths(const DocumentParams p) {
    wait_for_earlier_kernels();
    const long long thread = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (thread >= p.key_length) return;
    const int key = static_cast<int>(thread);
    auto bound = [&](int i) { return static_cast<int>(p.documents[i * p.stride]); };
    int low = 0, high = p.count;  // the first bound above the key, `count` if there is none, is one of low .. high
    while (low < high) {
        const int middle = (low + high) / 2;
        if (bound(middle) <= key) low = middle + 1;
        else high = middle;
    }
    p.first[key] = min(max(bound(max(low - 1, 0)), 0), key);  // even with invalid lengths at most this key
    p.end[key] = bound(min(low, p.count - 1));                // a key past all documents is in an empty one
}

// The highest set bit at or below bit `i`; -1: none.
__device__ __forceinline__ int last_bit(const unsigned* bits, int i) {
    for (int word = i >> 5; word >= 0; --word) {
        const unsigned found = word == i >> 5 ? bits[word] & (~0u >> (31 - (i & 31))) : bits[word];
        if (found != 0) return 32 * word + 31 - __clz(static_cast<int>(found));
    }
    return -1;
}

// The lowest set bit at or above bit `i` of this many words; -1: none.
__device__ __forceinline__ int next_bit(const unsigned* bits, int i, int words) {
    for (int word = i >> 5; word < words; ++word) {
        const unsigned found = word == i >> 5 ? bits[word] & (~0u << (i & 31)) : bits[word];
        if (found != 0) return 32 * word + __ffs(found) - 1;
    }
    return -1;
}

extern "C" __global__ void __launch_bounds__(THREADS) runs_of_ids(const DocumentParams p) {
    wait_for_earlier_kernels();
    __shared__ unsigned begins[WORDS];         // a bit per key of the chunk: whether it begins a document
    __shared__ unsigned nonzero[WORDS / 32];   // a bit per word of these: whether it is nonzero
    __shared__ int before, behind;             // nearest beginnings: up to the chunk's first key, and from its end on
    const int chunks = (p.key_length + CHUNK - 1) / CHUNK;
    const int begin = blockIdx.x % chunks * CHUNK, end = min(begin + CHUNK, p.key_length);
    const long long row = blockIdx.x / chunks;
    const ID* ids = p.documents + row * p.row_stride;
    auto begins_at = [&](long long j) {
        if (j <= 0 || j >= p.key_length) return j == 0 || j == p.key_length;
        return ids[j * p.stride] != ids[(j - 1) * p.stride];
    };
    if (threadIdx.x == 0) {
        before = 0;
        behind = p.key_length;
    }
    for (int i = threadIdx.x; i < CHUNK; i += THREADS) {
        const unsigned word = __ballot_sync(ALL_LANES, begin + i < end && begins_at(begin + i));
        if (threadIdx.x % 32 == 0) begins[i / 32] = word;
    }
    __syncthreads();  // bits are in place, and the bounds of both searches
    if (threadIdx.x < WORDS) {
        const unsigned word = __ballot_sync(ALL_LANES, begins[threadIdx.x] != 0);
        if (threadIdx.x % 32 == 0) nonzero[threadIdx.x / 32] = word;
    }
    for (long long j = begin - static_cast<int>(threadIdx.x);; j -= AHEAD * THREADS) {
        int found = -1;
#pragma unroll
        for (int k = AHEAD - 1; k >= 0; --k)
            if (begins_at(j - k * THREADS)) found = static_cast<int>(j - k * THREADS);
        if (found >= 0) atomicMax(&before, found);
        if (__syncthreads_or(found >= 0)) break;
    }
    for (long long j = end + static_cast<int>(threadIdx.x);; j += AHEAD * THREADS) {
        int found = -1;
#pragma unroll
        for (int k = AHEAD - 1; k >= 0; --k)
            if (begins_at(j + k * THREADS)) found = static_cast<int>(j + k * THREADS);
        if (found >= 0) atomicMin(&behind, found);
        if (__syncthreads_or(found >= 0)) break;  // and all words are in place
    }
    for (int i = threadIdx.x; begin + i < end; i += THREADS) {
        const int word = i / 32;
        int last = last_bit(begins + word, i % 32), next = i % 32 == 31 ? -1 : next_bit(begins + word, i % 32 + 1, 1);
        last = last < 0 ? -1 : 32 * word + last;
        next = next < 0 ? -1 : 32 * word + next;
        if (last < 0 && word > 0) {
            const int other = last_bit(nonzero, word - 1);
            if (other >= 0) last = 32 * other + last_bit(begins + other, 31);
        }
        if (next < 0) {
            const int other = next_bit(nonzero, word + 1, WORDS / 32);
            if (other >= 0) next = 32 * other + next_bit(begins + other, 0, 1);
        }
        p.first[row * p.key_length + begin + i] = last < 0 ? before : begin + last;
        p.end[row * p.key_length + begin + i] = next < 0 ? behind : begin + next;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) finish_runs(const RunParams p) {
    wait_for_earlier_kernels();
    const int slices = (p.key_length + THREADS - 1) / THREADS;
    const int row = blockIdx.x / slices, batch = row / p.kv_heads;
    const long long key = (long long)(blockIdx.x % slices) * THREADS + threadIdx.x;
    if (key >= p.key_length) return;
    int first = 0, end = p.key_length;
    if (p.first != nullptr) {
        first = p.first[batch * p.document_batch + key];
        end = p.end[batch * p.document_batch + key];
    }
    const bool opens = p.apart || first <= 0, stays = p.apart || end >= p.key_length;
    int* stop = p.stop + (long long)row * p.key_length + key;
    const int dropped = p.everything ? NEVER : *stop;
    if (!p.global) {
        *stop = stays ? dropped : min(dropped, end);
        return;
    }
    const bool real = p.padding == nullptr || p.padding[batch * p.padding_batch + key] != 0;
    const int start = opens ? EVER : first;
    *stop = dropped >= end && real ? (stays ? NEVER : end) : start;
    if (row % p.kv_heads == 0 && (batch == 0 || (p.document_batch != 0 && !p.apart)))
        p.start[batch * p.document_batch + key] = start;
}
