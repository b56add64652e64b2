// A tile of queries and the keys that it gathers, for sm80/forward.cu and sm80/backward_dq.cu.
//
// A block owns one tile: BLOCK_M / HEADS consecutive queries times HEADS query heads of one GQA group, which share
// every gathered key and value row. Tile row r is query r / HEADS, head r % HEADS. A warp owns WARP_ROWS fragments of
// 16 tile rows. common/mask.cuh says which keys come, common/smem_rows.cuh how rows reach shared memory. While one
// block of BLOCK_N keys is multiplied, the rows of the next one (two stages) and the list entries of the one after are
// in flight.
//
// With SEQUENCES a tile's queries belong to one sequence (common/varlen.cuh); with PAGE_SIZE the row of a key is found
// in its page. Positions are those of keys, except that a list of keys of sequences uses rows of query.
//
// The Shared struct of a kernel holds KeyTiles as `keys`.
//
// With BITS the words for a masked block's test are loaded too; a warp's rows are queries of one word.
//
// Prelude: ELEMENT, HEAD_DIM, VECTOR, HEADS, BLOCK_M, BLOCK_N, WARPS, KEYS, CAUSAL, BITS, BIAS, DELAY, BIAS_ELEMENT,
// SOFTCAP, SEQUENCES (with neither BITS nor BIAS_DENSE), PAGE_SIZE (0: not paged).
#pragma once
#include "common/arch.cuh"
#include "common/bias.cuh"
#include "common/mask.cuh"
#include "common/params.cuh"
#include "common/query_tile.cuh"
#include "common/softmax.cuh"
#include "common/smem_rows.cuh"

static_assert(!SEQUENCES || (!BITS && BIAS != BIAS_DENSE), "packed sequences have no rectangle of queries and keys");
constexpr int THREADS = WARPS * 32;
constexpr int WARP_ROWS = BLOCK_M / (WARPS * 16);  // fragments of 16 rows a warp owns
constexpr int BIAS_ROWS = (BLOCK_M + HEADS - 1) / HEADS;
constexpr int KEY_FRAGMENTS = BLOCK_N / 16;
constexpr int DIM_FRAGMENTS = HEAD_DIM_PADDED / 16;

struct KeyTiles {
    ELEMENT key[2][BLOCK_N * ROW_STRIDE];
    ELEMENT value[2][BLOCK_N * ROW_STRIDE];
    float bias[2][BLOCK_N];
#if DELAY
    int far_from[2][BLOCK_N];
#endif
#if BITS
    unsigned words[2][WORDS][BLOCK_N];
#else
    int start[2][BLOCK_N], stop[2][BLOCK_N];
#endif
    int index[3][BLOCK_N];  // key rows of the current, the next and the block after
#if BIAS == BIAS_DENSE
    BiasTile<BIAS_ROWS, BLOCK_N> bias_rows[2];
#endif
};

// The tile's rows of query or dout.
__device__ __forceinline__ void load_rows(ELEMENT* rows, const ELEMENT* source, long long batch, long long row_stride,
                                          long long head, const AttentionParams& p, const Tile& t) {
    const ELEMENT* base = source + t.batch * batch + t.first_head * head;
    for_each_piece<BLOCK_M, THREADS>([&](int row, int piece) {
        const int query = t.first_query + row / HEADS;
        const bool exists = row < QUERIES * HEADS && query < t.end_query;
        copy_piece(rows + row * ROW_STRIDE, base + (exists ? query : 0) * row_stride + row % HEADS * head, piece, exists);
    });
}

// List entries of a block, one block ahead of its rows.
__device__ __forceinline__ void fetch_indices(KeyTiles& shared, const KeyBlocks& blocks, KeyBlock block, int slot) {
#if KEYS != KEYS_CONTIGUOUS
    if (block.first >= 0 && threadIdx.x < BLOCK_N) {
        bool exists;
        const int* entry = blocks.entry(block.first + threadIdx.x, exists);
        copy_async_4(&shared.index[slot][threadIdx.x], exists ? entry : blocks.source.list, exists ? 4 : 0);
    }
#endif
}

// Key and value rows of a block, and the data of each key. `whole`: the block has BLOCK_N keys.
template <bool whole>
__device__ __forceinline__ void gather_keys(KeyTiles& shared, const AttentionParams& p, const ELEMENT* keys,
                                            const ELEMENT* values, const float* biases, const KeyBlocks& blocks,
                                            KeyBlock block, int slot, int stage, int bias_delay) {
    const int count = blocks.source.length - block.first;  // keys from the block's first on
    auto key_at = [&](int column) {
#if KEYS == KEYS_CONTIGUOUS
        const int key = block.first + column;
#else
        const int key = shared.index[slot][column];
#endif
        return whole || column < count ? key : 0;
    };
    for_each_piece<BLOCK_N, THREADS>([&](int column, int piece) {
        const bool exists = whole || column < count;
#if PAGE_SIZE
        const int key = key_at(column);
        const long long page = exists ? p.page_table[key / PAGE_SIZE] : 0, row = exists ? key % PAGE_SIZE : 0;
#else
        const long long page = 0, row = key_at(column);
#endif
        copy_piece(shared.key[stage] + column * ROW_STRIDE, keys + page * p.key_page + row * p.key_row, piece, exists);
        copy_piece(shared.value[stage] + column * ROW_STRIDE, values + page * p.value_page + row * p.value_row, piece,
                   exists);
    });
    if (threadIdx.x < BLOCK_N) {
        const int column = threadIdx.x, key = key_at(column);
        const bool exists = whole || column < count;
#if BIAS == BIAS_OF_KEYS
        bool applies = exists;
#if DELAY
        shared.far_from[stage][column] = key + bias_delay;
        applies = exists && !is_near(key + bias_delay, blocks.last_position);
#endif
        copy_async_4(&shared.bias[stage][column], biases + (long long)key * p.bias_key, applies ? 4 : 0);
#endif
        if (block.masked) {
#if BITS
#pragma unroll
            for (int w = 0; w < WORDS; ++w)  // a key that does not exist has no bits
                copy_async_4(&shared.words[stage][w][column],
                             blocks.source.columns + (long long)w * p.key_stride + key, exists ? 4 : 0);
#elif KEYS == KEYS_CONTIGUOUS
            shared.start[stage][column] = CAUSAL ? key : INT_LOWEST;
            shared.stop[stage][column] = exists ? NEVER : INT_LOWEST;
#else
            copy_async_4(&shared.start[stage][column], blocks.source.start + key, exists ? 4 : 0);
            copy_async_4(&shared.stop[stage][column], blocks.source.stop + key, exists ? 4 : 0);
#endif
        }
    }
}

#if BIAS == BIAS_DENSE
// The keys of a block's columns.
struct BlockKeys {
    const KeyBlocks& blocks;
    KeyBlock block;
    const int* index;

    __device__ __forceinline__ BlockKeys(const KeyBlocks& blocks, KeyBlock block, const int* index)
        : blocks(blocks), block(block), index(index) {}

    __device__ __forceinline__ int operator()(int column) const {
        if (block.first + column >= blocks.source.length) return -1;
        return KEYS == KEYS_CONTIGUOUS ? block.first + column : index[column];
    }

    // The first key if BLOCK_N keys are consecutive from a multiple of 16 bytes on, else -1.
    __device__ __forceinline__ int following() const {
        if (block.first + BLOCK_N > blocks.source.length) return -1;
#if KEYS == KEYS_CONTIGUOUS
        return block.first;
#else
#if KEYS == KEYS_LISTED  // in order, except at the step from full keys to partial ones
        if (block.first < blocks.source.full && block.first + BLOCK_N > blocks.source.full) return -1;
#endif
        return index[BLOCK_N - 1] - index[0] == BLOCK_N - 1 && index[0] % BIAS_WIDTH == 0 ? index[0] : -1;
#endif
    }
};
#endif

// The key side of a tile's pipeline: gather(block, slot, stage) starts the copies of a block, if there is one.
struct KeyGather {
    KeyTiles& shared;
    const AttentionParams& p;
    const KeyBlocks& blocks;
    const ELEMENT* keys;
    const ELEMENT* values;
    const float* biases;
    int bias_delay = 0;
#if BIAS == BIAS_DENSE
    BiasRows bias_rows;
#endif

    __device__ __forceinline__ KeyGather(KeyTiles& shared, const AttentionParams& p, const Tile& t,
                                         const KeyBlocks& blocks)
        : shared(shared), p(p), blocks(blocks), keys(p.key + t.batch * p.key_batch + t.group * p.key_head),
          values(p.value + t.batch * p.value_batch + t.group * p.value_head),
          biases(BIAS == BIAS_OF_KEYS
                     ? p.bias + t.batch * p.bias_batch + t.group * p.bias_group + t.first_head * p.bias_head
                     : nullptr)
#if BIAS == BIAS_DENSE
          , bias_rows(p, t.batch, t.group, t.first_head, t.first_query)
#endif
    {
#if DELAY
        bias_delay = t.bias_delay;
#endif
    }

    __device__ __forceinline__ void operator()(KeyBlock block, int slot, int stage) const {
        if (block.first < 0) return;
        if (block.masked)
            gather_keys<false>(shared, p, keys, values, biases, blocks, block, slot, stage, bias_delay);
        else
            gather_keys<true>(shared, p, keys, values, biases, blocks, block, slot, stage, bias_delay);
#if BIAS == BIAS_DENSE
        const BlockKeys columns(blocks, block, shared.index[slot]);
        load_bias<BIAS_ROWS, BLOCK_N, THREADS>(shared.bias_rows[stage], bias_rows, columns.following(), columns);
#endif
    }
};

// Positions of the queries of this lane's rows; with BITS their bits in a word.
__device__ __forceinline__ void row_positions(int (&position)[WARP_ROWS][2], const Tile& t, int first_row) {
#pragma unroll
    for (int m = 0; m < WARP_ROWS; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int query = (first_row + 16 * m + (threadIdx.x & 31) / 4 + 8 * r) / HEADS;
            position[m][r] = BITS ? static_cast<int>(1u << ((t.first_query + query) & 31)) : t.first_position + query;
        }
}

// The biases of a block's keys, in log 2 units.
struct BlockBiases {
    const KeyTiles& shared;
    const int stage, first_position;  // of the tile
    bool mixed = false;               // some of them apply only to the tile's last rows

    __device__ __forceinline__ BlockBiases(const KeyTiles& shared, int stage, const Tile& t)
        : shared(shared), stage(stage), first_position(t.first_position) {
#if DELAY
        for (int i = threadIdx.x & 31; i < BLOCK_N; i += 32)
            mixed |= is_mixed(shared.far_from[stage][i], t.first_position, t.last_position);
        mixed = __any_sync(ALL_LANES, mixed);
#endif
    }

    // The bias of the block's key `column`, for row r of this lane in the warp's fragment m.
    __device__ __forceinline__ float operator()(int column, int m, int r) const {
        if (BIAS != BIAS_OF_KEYS) return 0.0f;
#if DELAY
        const int row = threadIdx.x / 32 * WARP_ROWS * 16 + 16 * m + (threadIdx.x & 31) / 4 + 8 * r;
        if (mixed && is_near(shared.far_from[stage][column], first_position + row / HEADS)) return 0.0f;
#endif
        return log2_units(shared.bias[stage][column]);
    }
};

// lse (log 2 units, +inf for a row that sees nothing) and delta of this lane's rows (backward pass).
__device__ __forceinline__ void load_statistics(float (&lse)[WARP_ROWS][2], float (&delta)[WARP_ROWS][2],
                                                const AttentionParams& p, const Tile& t, int first_row) {
#pragma unroll
    for (int m = 0; m < WARP_ROWS; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = first_row + 16 * m + (threadIdx.x & 31) / 4 + 8 * r, query = t.first_query + row / HEADS;
            const bool exists = row < QUERIES * HEADS && query < t.end_query;
            const long long head = (long long)t.batch * p.heads + t.first_head + row % HEADS;
            const float x = exists ? p.lse[head * p.query_length + query] : -infinity();
            lse[m][r] = x == -infinity() ? infinity() : log2_lse(x);
            delta[m][r] = exists ? p.delta[head * p.query_length + query] : 0.0f;
        }
}

// s = rows . k for this warp's rows (16-row fragments, ROW_STRIDE apart) and the block's keys
template <int unrolled = DIM_FRAGMENTS>
__device__ __forceinline__ void mma_rows_keys(Accumulator (&s)[WARP_ROWS][KEY_FRAGMENTS], const ELEMENT* rows,
                                         const ELEMENT* key) {
#pragma unroll
    for (int m = 0; m < WARP_ROWS; ++m)
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; ++n) clear(s[m][n]);
#pragma unroll unrolled
    for (int d = 0; d < DIM_FRAGMENTS; ++d) {
        FragmentA a[WARP_ROWS];
#pragma unroll
        for (int m = 0; m < WARP_ROWS; ++m) load_fragment(a[m], rows + m * 16 * ROW_STRIDE + d * 16, ROW_STRIDE);
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; ++n) {
            FragmentBT b;
            load_fragment(b, key + n * 16 * ROW_STRIDE + d * 16, ROW_STRIDE);
#pragma unroll
            for (int m = 0; m < WARP_ROWS; ++m) multiply_add(s[m][n], a[m], b);
        }
    }
}

#if BITS
static_assert(WARP_ROWS * 16 <= 32 * HEADS && 32 % (WARP_ROWS * 16 / HEADS) == 0, "a warp's queries are in one word");

// Which queries of this warp's word see the block's key `column`.
__device__ __forceinline__ int key_visibility(const KeyTiles& shared, int stage, int slot, int column) {
    return static_cast<int>(shared.words[stage][threadIdx.x / 32 * WARP_ROWS * 16 / HEADS / 32][column]);
}
#else
// First position that sees the block's key `column`, and the first that no longer does.
__device__ __forceinline__ int2 key_visibility(const KeyTiles& shared, int stage, int slot, int column) {
    int start = shared.start[stage][column];
#if CAUSAL && KEYS != KEYS_CONTIGUOUS
    start = max(start, shared.index[slot][column]);
#endif
    return make_int2(start, shared.stop[stage][column]);
}
#endif

// Pairs that are not visible become `hidden`: -inf for logits, 0 for their gradients.
__device__ __forceinline__ void apply_mask(Accumulator (&s)[WARP_ROWS][KEY_FRAGMENTS], const KeyTiles& shared, int stage,
                                           int slot, const int (&position)[WARP_ROWS][2], float hidden) {
#pragma unroll
    for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const auto seen = key_visibility(shared, stage, slot, 16 * n + 2 * (threadIdx.x & 3) + fragment_column(i));
#pragma unroll
            for (int m = 0; m < WARP_ROWS; ++m)
                if (!visible(position[m][fragment_row(i)], seen)) s[m][n].x[i] = hidden;
        }
}

// A non-finite value must not reach a row that does not see its key, but 0 * inf is NaN. In a masked block such values
// are added only to the rows that see them, and are zero in the MMA.
__device__ __forceinline__ bool block_is_finite(const ELEMENT* value) {
    unsigned found = 0;
    for_each_piece<BLOCK_N, THREADS>([&](int column, int piece) {
        found |= nonfinite(*reinterpret_cast<const uint4*>(value + column * ROW_STRIDE + piece * PIECE), value);
    });
    return (found & sign_bits(sizeof(ELEMENT))) == 0;
}

__device__ __forceinline__ void isolate_nonfinite(Accumulator (&o)[WARP_ROWS][DIM_FRAGMENTS], ELEMENT* value,
                                                  const KeyTiles& shared, int stage, int slot,
                                                  const int (&position)[WARP_ROWS][2]) {
    for (int key = 0; key < BLOCK_N; ++key) {
        const auto seen = key_visibility(shared, stage, slot, key);
#pragma unroll
        for (int d = 0; d < DIM_FRAGMENTS; ++d)
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float v = to_operand(value[key * ROW_STRIDE + 16 * d + 2 * (threadIdx.x & 3) + fragment_column(i)]);
#pragma unroll
                for (int m = 0; m < WARP_ROWS; ++m)
                    if (!isfinite(v) && visible(position[m][fragment_row(i)], seen))
                        o[m][d].x[i] += v;
            }
    }
    __syncthreads();  // all threads have read the values that are about to be cleared
    for (int i = threadIdx.x; i < BLOCK_N * HEAD_DIM_PADDED; i += THREADS) {
        ELEMENT& x = value[i / HEAD_DIM_PADDED * ROW_STRIDE + i % HEAD_DIM_PADDED];
        if (!isfinite(to_operand(x))) from_float(x, 0.0f);
    }
    __syncthreads();  // the tile is finite
}

// o += p . rows, with p rounded to the type of an operand
__device__ __forceinline__ void accumulate(Accumulator (&o)[WARP_ROWS][DIM_FRAGMENTS],
                                                  const Accumulator (&s)[WARP_ROWS][KEY_FRAGMENTS],
                                                  const ELEMENT* value) {
#pragma unroll
    for (int n = 0; n < KEY_FRAGMENTS; ++n) {
        FragmentA a[WARP_ROWS];
#pragma unroll
        for (int m = 0; m < WARP_ROWS; ++m) round_to_operand(a[m], s[m][n]);
#pragma unroll
        for (int d = 0; d < DIM_FRAGMENTS; ++d) {
            FragmentB b;
            load_fragment(b, value + n * 16 * ROW_STRIDE + d * 16, ROW_STRIDE);
#pragma unroll
            for (int m = 0; m < WARP_ROWS; ++m) multiply_add(o[m][d], a[m], b);
        }
    }
}

// Writes this warp's rows of out or dquery, times a factor per row, through its part of `staging`, so that global
// stores are 16-byte pieces of rows.
__device__ __forceinline__ void write_rows(ELEMENT* target_base, ELEMENT* staging, const AttentionParams& p, const Tile& t,
                                           int first_row, const Accumulator (&o)[WARP_ROWS][DIM_FRAGMENTS],
                                           const float (&factor)[WARP_ROWS][2]) {
    const int lane = threadIdx.x & 31;
    ELEMENT* rows = staging + first_row * ROW_STRIDE;
    __syncwarp();  // no lane reads the warp's rows of the staging tile any more
#pragma unroll
    for (int m = 0; m < WARP_ROWS; ++m)
#pragma unroll
        for (int d = 0; d < DIM_FRAGMENTS; ++d)
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int r = fragment_row(i);
                from_float(rows[(16 * m + lane / 4 + 8 * r) * ROW_STRIDE + 16 * d + 2 * (lane & 3) + fragment_column(i)],
                           factor[m][r] == 0.0f ? 0.0f : o[m][d].x[i] * factor[m][r]);
            }
    __syncwarp();  // the warp's rows are complete
    constexpr int WIDTH = VECTOR ? PIECE : 1;  // elements a lane stores at a time
    for (int i = lane; i < WARP_ROWS * 16 * (HEAD_DIM / WIDTH); i += 32) {
        const int row = i / (HEAD_DIM / WIDTH), d = i % (HEAD_DIM / WIDTH) * WIDTH;
        const int query = t.first_query + (first_row + row) / HEADS, head = t.first_head + (first_row + row) % HEADS;
        if (first_row + row >= QUERIES * HEADS || query >= t.end_query) continue;
        ELEMENT* target = target_base + (((long long)t.batch * p.query_length + query) * p.heads + head) * HEAD_DIM + d;
        const ELEMENT* source = rows + row * ROW_STRIDE + d;
#if VECTOR
        *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
#else
        *target = *source;
#endif
    }
}
