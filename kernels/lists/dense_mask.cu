// Dense boolean masks as bits, and the key lists of tiles of queries made from them.
//
//   pack_mask    columns // (mask rows, query_words, key_stride) u32: bit i % 32 of word (i / 32, j) = query i sees key
//                j. A word holds 32 queries of one key, because lists, skipped blocks and tests all work by keys. It
//                also includes the call's interval mask and causality, so that no other kernel needs them: start_j <=
//                p_i < stop_j and j <= p_i with p_i = i + Lk - Lq.
//                states // (mask rows, query_words, key_stride / 64) u16: 0 no pair of these 32 queries and 64 keys is
//                visible, 1 some are, 3 all are (queries past the last are ignored, keys past the last are not seen)
//                query_words is a multiple of 4, so that a tile of 128 queries has all its words
//   dense_lists  per (mask row, tile of QUERIES queries) its list of keys as in lists/intervals.cu: keys that all its
//                queries see in order from the front, keys that some see in order from the back, and the two counts
//
// Both are bound by memory reads: pack_mask reads the bytes of the mask once, a thread 4 consecutive keys of 32
// queries; dense_lists reads the words once, a thread 4 consecutive keys of a tile.
//
// Prelude: QUERIES (of a tile: 4, 8, 16 or a multiple of 32).
#include "common/arch.cuh"
#include "common/block_select.cuh"

struct DenseParams {
    const unsigned char* dense;  // (B, heads, Lq, Lk) bool, 0 or 1, any strides
    const int* start;            // interval mask or null
    const int* stop;
    unsigned* columns;
    unsigned short* states;
    int* list;                   // (mask rows, tiles, capacity)
    int* list_lengths;           // (mask rows, tiles, 2): full, all
    long long dense_batch, dense_head, dense_query, dense_key;  // strides in bytes; 0 where an axis broadcasts
    long long start_batch, start_head, stop_batch, stop_head;   // in elements
    int mask_heads;                // mask row = batch * mask_heads + head
    int dense_share, start_share;  // mask heads that share a head of dense, of the interval mask
    int query_length, key_length, query_words, key_stride, key_chunks;
    int tiles, capacity;
};

constexpr int THREADS = 256;
constexpr int OWN = 4;  // consecutive keys of a thread
constexpr int CHUNK = THREADS * OWN;
constexpr int STATE_KEYS = 64;
constexpr unsigned ONES = 0x01010101u;

// Bits of the queries first_query .. first_query + 31 that stand at positions start <= p < stop.
__device__ __forceinline__ unsigned bits_between(long long first_position, int start, int stop) {
    const long long low = min(max(start - first_position, 0ll), 32ll), high = min(max(stop - first_position, 0ll), 32ll);
    if (low >= high) return 0;
    return (ALL_LANES >> (32 - (high - low))) << low;
}

// Four consecutive bytes of a row; 0 for keys past the last.
__device__ __forceinline__ unsigned four_keys(const DenseParams& p, const unsigned char* row, int key) {
    unsigned four = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k)
        if (key + k < p.key_length) four |= static_cast<unsigned>(row[(key + k) * p.dense_key]) << (8 * k);
    return four;
}

// Bits of the queries first_query .. first_query + 31 to which the interval mask and causality show a key.
__device__ __forceinline__ unsigned visible_queries(const DenseParams& p, int batch, int head, int first_query, int key) {
    if (key >= p.key_length) return 0;
    const long long first_position = static_cast<long long>(first_query) + p.key_length - p.query_length;
    unsigned seen = ALL_LANES;
#if INTERVALS
    const long long dense_head = head / p.start_share;
    seen &= bits_between(first_position, p.start[batch * p.start_batch + dense_head * p.start_head + key],
                         p.stop[batch * p.stop_batch + dense_head * p.stop_head + key]);
#endif
#if CAUSAL
    seen &= bits_between(first_position, key, NEVER);
#endif
    return seen;
}

// Byte k of the four words becomes word k: bits 8 g .. 8 g + 7 are byte k of x[g].
__device__ __forceinline__ uint4 transposed(const unsigned (&x)[4]) {
    const unsigned a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[2], x[3], 0x5140);
    const unsigned c = __byte_perm(x[0], x[1], 0x7362), d = __byte_perm(x[2], x[3], 0x7362);
    return make_uint4(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410),
                      __byte_perm(c, d, 0x7632));
}

extern "C" __global__ void __launch_bounds__(THREADS) pack_mask(const DenseParams p) {
    wait_for_earlier_kernels();
    unsigned rest = blockIdx.x;
    const int key = (static_cast<int>(rest % p.key_chunks) * THREADS + threadIdx.x) * OWN;
    rest /= p.key_chunks;
    const int word = static_cast<int>(rest % p.query_words), first_query = word * 32;
    const int row = static_cast<int>(rest / p.query_words), batch = row / p.mask_heads, head = row % p.mask_heads;
    const int queries = p.query_length - first_query;  // from this word's first query on
    const unsigned char* source = p.dense + batch * p.dense_batch + head / p.dense_share * p.dense_head +
                                  first_query * p.dense_query;

    // Byte k of gathered[g] holds bits 8 g .. 8 g + 7 of the word of this thread's key k: a shift and an or per four
    // keys.
    unsigned gathered[4] = {};
    if (VECTOR && queries >= 32 && key + OWN <= p.key_length) {
#pragma unroll
        for (int i = 0; i < 32; ++i)
            gathered[i / 8] |= (*reinterpret_cast<const unsigned*>(source + i * p.dense_query + key) & ONES) << (i % 8);
    } else {
#pragma unroll
        for (int g = 0; g < 4; ++g)
#pragma unroll 1
            for (int i = 0; i < 8; ++i)
                if (8 * g + i < queries)
                    gathered[g] |= (four_keys(p, source + (8 * g + i) * p.dense_query, key) & ONES) << i;
    }
    uint4 words = transposed(gathered);
#if INTERVALS || CAUSAL
    words.x &= visible_queries(p, batch, head, first_query, key);
    words.y &= visible_queries(p, batch, head, first_query, key + 1);
    words.z &= visible_queries(p, batch, head, first_query, key + 2);
    words.w &= visible_queries(p, batch, head, first_query, key + 3);
#endif
    const unsigned existing = queries <= 0 ? 0 : queries >= 32 ? ALL_LANES : ALL_LANES >> (32 - queries);
    unsigned any = words.x | words.y | words.z | words.w, all = existing & words.x & words.y & words.z & words.w;
#pragma unroll
    for (int distance = STATE_KEYS / OWN / 2; distance > 0; distance >>= 1) {
        any |= __shfl_xor_sync(ALL_LANES, any, distance);
        all &= __shfl_xor_sync(ALL_LANES, all, distance);
    }
    if (key >= p.key_stride) return;
    const long long line = static_cast<long long>(row) * p.query_words + word;
    *reinterpret_cast<uint4*>(p.columns + line * p.key_stride + key) = words;
    if (threadIdx.x % (STATE_KEYS / OWN) == 0)
        p.states[line * (p.key_stride / STATE_KEYS) + key / STATE_KEYS] = any == 0 ? 0 : all == existing ? 3 : 1;
}

extern "C" __global__ void __launch_bounds__(THREADS) dense_lists(const DenseParams p) {
    wait_for_earlier_kernels();
    constexpr int WORDS = (QUERIES + 31) / 32;
    __shared__ int warp_values[32];
    const long long row = blockIdx.x / p.tiles;
    const int tile = blockIdx.x % p.tiles, first_query = tile * QUERIES, first_word = first_query / 32;
    const unsigned* columns = p.columns + (row * p.query_words + first_word) * p.key_stride;
    int* list = p.list + (long long)blockIdx.x * p.capacity;

    unsigned existing[WORDS];  // bits of the tile's queries
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
        const int first = max(first_query, (first_word + w) * 32), end = min(first_query + QUERIES, p.query_length);
        existing[w] = bits_between((first_word + w) * 32, first, end);
    }
    int full = 0, partial = 0;  // keys in the list
    for (int at = 0; at < p.key_length; at += CHUNK) {
        const int key = at + threadIdx.x * OWN;
        unsigned any[OWN] = {0, 0, 0, 0};
        bool all[OWN] = {true, true, true, true};
        if (key < p.key_stride) {
#pragma unroll
            for (int w = 0; w < WORDS; ++w) {
                const uint4 x = *reinterpret_cast<const uint4*>(columns + (long long)w * p.key_stride + key);
                const unsigned own[OWN] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (int k = 0; k < OWN; ++k) {
                    any[k] |= own[k] & existing[w];
                    all[k] = all[k] && (own[k] & existing[w]) == existing[w];
                }
            }
        }
        int counts = 0, totals;  // full keys, and partial keys in the upper half
#pragma unroll
        for (int k = 0; k < OWN; ++k) counts += any[k] == 0 ? 0 : all[k] ? 1 : 1 << 16;
        counts = exclusive_sum<THREADS>(counts, totals, warp_values);
        int full_index = full + (counts & 0xffff), partial_index = p.capacity - 1 - (partial + (counts >> 16));
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            if (any[k] == 0) continue;
            if (all[k])
                list[full_index++] = key + k;
            else
                list[partial_index--] = key + k;
        }
        full += totals & 0xffff;
        partial += totals >> 16;
    }
    if (threadIdx.x == 0) {
        p.list_lengths[2 * (long long)blockIdx.x] = full;
        p.list_lengths[2 * (long long)blockIdx.x + 1] = full + partial;
    }
}
