// Attention forward over gathered keys: out = softmax over visible j of (softcap(scale * q_i . k_j) + bias_j), times v.
//
// query  // (B, Lq, H, D) ELEMENT       key, value // (B, Lk, Hkv, D) ELEMENT, any batch, row and head strides
// bias   // (1|B, 1|Hkv|H, 1|Lk) f32, natural-log units
// out    // (B, Lq, H, D) ELEMENT, contiguous       lse // (B, H, Lq) f32, natural log, -inf where a row sees nothing
//
// A block owns one tile: BLOCK_M / HEADS consecutive queries times HEADS heads of one group, which share every gathered
// key and value row. Tile row r is query r / HEADS, head r % HEADS. A warp owns WARP_ROWS fragments of 16 tile rows and
// keeps their logits, softmax state and output in registers; it alone writes their out and lse, once.
// mask.cuh says which keys come, tiles.cuh how rows reach shared memory, softmax.cuh the online softmax. While one
// block of BLOCK_N keys is multiplied, the next one is on its way (two stages) and the list entries of the one after.
//
// Prelude: ELEMENT, HEAD_DIM, VECTOR, HEADS, BLOCK_M, BLOCK_N, WARPS, MIN_BLOCKS, KEYS, CAUSAL, BIAS, SOFTCAP.
#include "arch.cuh"
#include "mask.cuh"
#include "softmax.cuh"
#include "tiles.cuh"

struct ForwardParams {
    const ELEMENT* query;
    const ELEMENT* key;
    const ELEMENT* value;
    ELEMENT* out;
    float* lse;
    const float* bias;
    const int* start;         // (1|B, 1|Hkv|H, key_length)
    const int* stop;
    const int* list;          // KEYS_LISTED (mask rows, tiles, capacity), KEYS_SHARED (mask rows, key_length)
    const int* list_lengths;  // KEYS_LISTED (mask rows, tiles, 2): full, all; KEYS_SHARED (mask rows)
    const int4* summaries;    // KEYS_SHARED (mask rows, key_length / BLOCK_N, rounded up)
    long long query_batch, query_row, query_head;  // strides, in elements
    long long key_batch, key_head, value_batch, value_head;
    long long bias_batch, bias_group, bias_head, bias_key;
    long long start_batch, start_head, stop_batch, stop_head;
    int key_row, value_row;
    int mask_batch, mask_group, mask_head;  // mask row = batch * . + kv head * . + query head * .
    int mask_heads;                         // 1, Hkv or H: mask head = mask row % mask_heads
    int query_length, key_length, heads, kv_heads;
    int tiles, capacity;
    float scale, softcap;
};

constexpr int THREADS = WARPS * 32;
constexpr int WARP_ROWS = BLOCK_M / (WARPS * 16);  // fragments of 16 rows a warp owns
constexpr int QUERIES = BLOCK_M / HEADS;
constexpr int KEY_FRAGMENTS = BLOCK_N / 16;
constexpr int DIM_FRAGMENTS = HEAD_DIM_PADDED / 16;

struct Shared {
    ELEMENT query[BLOCK_M * ROW_STRIDE];  // later the tile's output
    ELEMENT key[2][BLOCK_N * ROW_STRIDE];
    ELEMENT value[2][BLOCK_N * ROW_STRIDE];
    float bias[2][BLOCK_N];
    int start[2][BLOCK_N], stop[2][BLOCK_N];
    int index[3][BLOCK_N];  // key rows of the current, the next and the block after
};

struct Tile {
    int batch, group, first_head, first_query, first_position, last_position;
};

__device__ __forceinline__ Tile find_tile(const ForwardParams& p) {
    const int sets = p.heads / p.kv_heads / HEADS;  // tiles side by side that share a kv head
    long long rest = blockIdx.x;
    Tile t;
    t.first_query = (p.tiles - 1 - static_cast<int>(rest % p.tiles)) * QUERIES;  // the longest causal tiles first
    rest /= p.tiles;
    const int set = static_cast<int>(rest % sets);
    rest /= sets;
    t.group = static_cast<int>(rest % p.kv_heads);
    t.batch = static_cast<int>(rest / p.kv_heads);
    t.first_head = (t.group * sets + set) * HEADS;
    t.first_position = t.first_query + p.key_length - p.query_length;
    t.last_position = min(t.first_query + QUERIES, p.query_length) - 1 + p.key_length - p.query_length;
    return t;
}

__device__ __forceinline__ KeySource find_keys(const ForwardParams& p, const Tile& t) {
    KeySource source = {};
#if KEYS == KEYS_CONTIGUOUS
    source.length = p.key_length;
#else
    const long long row = (long long)t.batch * p.mask_batch + t.group * p.mask_group + t.first_head * p.mask_head;
    const long long head = row % p.mask_heads, batch = row / p.mask_heads;
    source.start = p.start + batch * p.start_batch + head * p.start_head;
    source.stop = p.stop + batch * p.stop_batch + head * p.stop_head;
#if KEYS == KEYS_LISTED
    const long long tile = row * p.tiles + t.first_query / QUERIES;
    source.list = p.list + tile * p.capacity;
    source.full = p.list_lengths[2 * tile];
    source.length = p.list_lengths[2 * tile + 1];
    source.capacity = p.capacity;
#else
    source.list = p.list + row * p.key_length;
    source.summaries = p.summaries + row * ((p.key_length + BLOCK_N - 1) / BLOCK_N);
    source.length = p.list_lengths[row];
#endif
#endif
    return source;
}

__device__ __forceinline__ void load_query(Shared& shared, const ForwardParams& p, const Tile& t) {
    const ELEMENT* base = p.query + t.batch * p.query_batch + t.first_head * p.query_head;
    for_each_piece<BLOCK_M, THREADS>([&](int row, int piece) {
        const int query = t.first_query + row / HEADS;
        const bool exists = row < QUERIES * HEADS && query < p.query_length;
        const ELEMENT* source = base + (exists ? query : 0) * p.query_row + row % HEADS * p.query_head;
        copy_piece(shared.query + row * ROW_STRIDE, source, piece, exists);
    });
}

// List entries of a block, one block ahead of its rows.
__device__ __forceinline__ void fetch_indices(Shared& shared, const KeyBlocks& blocks, KeyBlock block, int slot) {
#if KEYS != KEYS_CONTIGUOUS
    if (block.first >= 0 && threadIdx.x < BLOCK_N) {
        bool exists;
        const int* entry = blocks.entry(block.first + threadIdx.x, exists);
        copy_async_4(&shared.index[slot][threadIdx.x], exists ? entry : blocks.source.start, exists ? 4 : 0);
    }
#endif
}

// Key and value rows of a block, and what is known per key. `whole`: the block has BLOCK_N keys.
template <bool whole>
__device__ __forceinline__ void gather_keys(Shared& shared, const ForwardParams& p, const ELEMENT* keys,
                                            const ELEMENT* values, const float* biases, const KeyBlocks& blocks,
                                            KeyBlock block, int slot, int stage) {
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
        const long long key = key_at(column);
        const bool exists = whole || column < count;
        copy_piece(shared.key[stage] + column * ROW_STRIDE, keys + key * p.key_row, piece, exists);
        copy_piece(shared.value[stage] + column * ROW_STRIDE, values + key * p.value_row, piece, exists);
    });
    if (threadIdx.x < BLOCK_N) {
        const int column = threadIdx.x, key = key_at(column);
        const bool exists = whole || column < count;
#if BIAS
        copy_async_4(&shared.bias[stage][column], biases + (long long)key * p.bias_key, exists ? 4 : 0);
#endif
        if (block.masked) {
#if KEYS == KEYS_CONTIGUOUS
            shared.start[stage][column] = CAUSAL ? key : INT_LOWEST;
            shared.stop[stage][column] = exists ? NEVER : INT_LOWEST;
#else
            copy_async_4(&shared.start[stage][column], blocks.source.start + key, exists ? 4 : 0);
            copy_async_4(&shared.stop[stage][column], blocks.source.stop + key, exists ? 4 : 0);
#endif
        }
    }
}

// s = q . k for this warp's rows and the block's keys
__device__ __forceinline__ void scores(Accumulator (&s)[WARP_ROWS][KEY_FRAGMENTS], const ELEMENT* query,
                                       const ELEMENT* key) {
#pragma unroll
    for (int m = 0; m < WARP_ROWS; ++m)
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; ++n) clear(s[m][n]);
#pragma unroll
    for (int d = 0; d < DIM_FRAGMENTS; ++d) {
        FragmentA a[WARP_ROWS];
#pragma unroll
        for (int m = 0; m < WARP_ROWS; ++m) load_fragment(a[m], query + m * 16 * ROW_STRIDE + d * 16, ROW_STRIDE);
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; ++n) {
            FragmentBT b;
            load_fragment(b, key + n * 16 * ROW_STRIDE + d * 16, ROW_STRIDE);
#pragma unroll
            for (int m = 0; m < WARP_ROWS; ++m) multiply_add(s[m][n], a[m], b);
        }
    }
}

// Logits in log 2 units from products: scale, softcap, bias.
__device__ __forceinline__ void finish_logits(Accumulator (&s)[WARP_ROWS][KEY_FRAGMENTS], const float* bias_row,
                                              const ForwardParams& p) {
#if SOFTCAP
    const float exponent = 2.0f * LOG2_E / p.softcap;
#else
    const float scale = p.scale * LOG2_E;
#endif
#pragma unroll
    for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float bias = 0.0f;
#if BIAS
            bias = bias_row[16 * n + 2 * (threadIdx.x & 3) + fragment_column(i)] * LOG2_E;
#endif
#pragma unroll
            for (int m = 0; m < WARP_ROWS; ++m) {
                float& x = s[m][n].x[i];
#if SOFTCAP
                x = softcapped(x * p.scale, p.softcap, exponent) * LOG2_E + bias;
#else
                x = BIAS ? fmaf(x, scale, bias) : x * scale;
#endif
            }
        }
}

// First position that sees the block's key `column`, and the first that no longer does.
__device__ __forceinline__ int2 key_interval(const Shared& shared, int stage, int slot, int column) {
    int start = shared.start[stage][column];
#if CAUSAL && KEYS != KEYS_CONTIGUOUS
    start = max(start, shared.index[slot][column]);
#endif
    return make_int2(start, shared.stop[stage][column]);
}

__device__ __forceinline__ void apply_mask(Accumulator (&s)[WARP_ROWS][KEY_FRAGMENTS], const Shared& shared, int stage,
                                           int slot, const int (&position)[WARP_ROWS][2]) {
#pragma unroll
    for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int2 seen = key_interval(shared, stage, slot, 16 * n + 2 * (threadIdx.x & 3) + fragment_column(i));
#pragma unroll
            for (int m = 0; m < WARP_ROWS; ++m)
                if (!visible(position[m][fragment_row(i)], seen.x, seen.y)) s[m][n].x[i] = -infinity();
        }
}

// A value that is not finite must not reach a row that does not see its key, and 0 * inf is NaN. In a masked block with
// such values they are added to the rows that see them, and are zero for the product.
__device__ __noinline__ bool block_is_finite(const ELEMENT* value) {
    bool finite = true;
    for (int i = threadIdx.x; i < BLOCK_N * HEAD_DIM_PADDED; i += THREADS)
        finite = finite && isfinite(to_float(value[i / HEAD_DIM_PADDED * ROW_STRIDE + i % HEAD_DIM_PADDED]));
    return finite;
}

__device__ __forceinline__ void isolate_nonfinite(Accumulator (&o)[WARP_ROWS][DIM_FRAGMENTS], ELEMENT* value,
                                                  const Shared& shared, int stage, int slot,
                                                  const int (&position)[WARP_ROWS][2]) {
    for (int key = 0; key < BLOCK_N; ++key) {
        const int2 seen = key_interval(shared, stage, slot, key);
#pragma unroll
        for (int d = 0; d < DIM_FRAGMENTS; ++d)
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float v = to_float(value[key * ROW_STRIDE + 16 * d + 2 * (threadIdx.x & 3) + fragment_column(i)]);
#pragma unroll
                for (int m = 0; m < WARP_ROWS; ++m)
                    if (!isfinite(v) && visible(position[m][fragment_row(i)], seen.x, seen.y))
                        o[m][d].x[i] += v;
            }
    }
    __syncthreads();  // everybody has read the values that are about to be cleared
    for (int i = threadIdx.x; i < BLOCK_N * HEAD_DIM_PADDED; i += THREADS) {
        ELEMENT& x = value[i / HEAD_DIM_PADDED * ROW_STRIDE + i % HEAD_DIM_PADDED];
        if (!isfinite(to_float(x))) from_float(x, 0.0f);
    }
    __syncthreads();  // the tile is finite
}

// o += p . v, with p rounded to 16 bit
__device__ __forceinline__ void accumulate_values(Accumulator (&o)[WARP_ROWS][DIM_FRAGMENTS],
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

// Writes this warp's rows through its part of shared.query, so that global stores are whole 16-byte pieces of rows.
__device__ __forceinline__ void write_output(Shared& shared, const ForwardParams& p, const Tile& t, int first_row,
                                             const Accumulator (&o)[WARP_ROWS][DIM_FRAGMENTS],
                                             const RowState (&state)[WARP_ROWS]) {
    const int lane = threadIdx.x & 31;
    ELEMENT* rows = shared.query + first_row * ROW_STRIDE;
    __syncwarp();  // no lane reads the warp's query rows any more
#pragma unroll
    for (int m = 0; m < WARP_ROWS; ++m) {
        const float inverse[2] = {state[m].inverse_sum(0), state[m].inverse_sum(1)};
#pragma unroll
        for (int d = 0; d < DIM_FRAGMENTS; ++d)
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int r = fragment_row(i);
                from_float(rows[(16 * m + lane / 4 + 8 * r) * ROW_STRIDE + 16 * d + 2 * (lane & 3) + fragment_column(i)],
                           o[m][d].x[i] * inverse[r]);
            }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = first_row + 16 * m + lane / 4 + 8 * r, query = t.first_query + row / HEADS;
            if ((lane & 3) == 0 && row < QUERIES * HEADS && query < p.query_length) {
                const long long head = (long long)t.batch * p.heads + t.first_head + row % HEADS;
                p.lse[head * p.query_length + query] = state[m].lse(r);
            }
        }
    }
    __syncwarp();  // the warp's rows are complete
    constexpr int WIDTH = VECTOR ? 8 : 1;  // numbers a lane stores at a time
    for (int i = lane; i < WARP_ROWS * 16 * (HEAD_DIM / WIDTH); i += 32) {
        const int row = i / (HEAD_DIM / WIDTH), d = i % (HEAD_DIM / WIDTH) * WIDTH;
        const int query = t.first_query + (first_row + row) / HEADS, head = t.first_head + (first_row + row) % HEADS;
        if (first_row + row >= QUERIES * HEADS || query >= p.query_length) continue;
        ELEMENT* target = p.out + (((long long)t.batch * p.query_length + query) * p.heads + head) * HEAD_DIM + d;
        const ELEMENT* source = rows + row * ROW_STRIDE + d;
#if VECTOR
        *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
#else
        *target = *source;
#endif
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_forward(const ForwardParams p) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
    const Tile t = find_tile(p);
    const int first_row = threadIdx.x / 32 * WARP_ROWS * 16;  // of this warp

    KeyBlocks blocks(find_keys(p, t), t.first_position, t.last_position);
    KeyBlock current = blocks.next(), following = blocks.next();
    fetch_indices(shared, blocks, current, 0);
    fetch_indices(shared, blocks, following, 1);
    load_query(shared, p, t);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();  // the query rows and the first two blocks' indices are in place

    const ELEMENT* keys = p.key + t.batch * p.key_batch + t.group * p.key_head;
    const ELEMENT* values = p.value + t.batch * p.value_batch + t.group * p.value_head;
    const float* biases = p.bias + t.batch * p.bias_batch + t.group * p.bias_group + t.first_head * p.bias_head;
    auto gather = [&](KeyBlock block, int slot, int stage) {
        if (block.first < 0) return;
        if (block.masked)
            gather_keys<false>(shared, p, keys, values, biases, blocks, block, slot, stage);
        else
            gather_keys<true>(shared, p, keys, values, biases, blocks, block, slot, stage);
    };
    gather(current, 0, 0);
    copy_async_commit();

    int position[WARP_ROWS][2];  // of this lane's rows
    Accumulator o[WARP_ROWS][DIM_FRAGMENTS];
    RowState state[WARP_ROWS];
#pragma unroll
    for (int m = 0; m < WARP_ROWS; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
            position[m][r] = t.first_position + (first_row + 16 * m + (threadIdx.x & 31) / 4 + 8 * r) / HEADS;
#pragma unroll
        for (int d = 0; d < DIM_FRAGMENTS; ++d) clear(o[m][d]);
    }

    for (int slot = 0, stage = 0; current.first >= 0; stage ^= 1) {
        const KeyBlock after = blocks.next();
        const int next_slot = slot == 2 ? 0 : slot + 1, after_slot = next_slot == 2 ? 0 : next_slot + 1;
        copy_async_wait<0>();
        __syncthreads();  // this block's rows and the next one's indices are in place; nobody reads the other stage
        gather(following, next_slot, stage ^ 1);
        fetch_indices(shared, blocks, after, after_slot);
        copy_async_commit();

        Accumulator s[WARP_ROWS][KEY_FRAGMENTS];
        scores(s, shared.query + first_row * ROW_STRIDE, shared.key[stage]);
        finish_logits(s, shared.bias[stage], p);
        if (current.masked) apply_mask(s, shared, stage, slot, position);
#pragma unroll
        for (int m = 0; m < WARP_ROWS; ++m) {
            float rescale[2];
            state[m].update(s[m], rescale);
            if (__any_sync(ALL_LANES, rescale[0] != 1.0f || rescale[1] != 1.0f)) {  // rare after the first blocks
#pragma unroll
                for (int d = 0; d < DIM_FRAGMENTS; ++d)
#pragma unroll
                    for (int i = 0; i < 8; ++i) o[m][d].x[i] *= rescale[fragment_row(i)];
            }
        }
        // The barrier also tells whether any thread found a value that is not finite.
        if (current.masked && __syncthreads_or(!block_is_finite(shared.value[stage])))
            isolate_nonfinite(o, shared.value[stage], shared, stage, slot, position);
        accumulate_values(o, s, shared.value[stage]);
        current = following;
        following = after;
        slot = next_slot;
    }
#pragma unroll
    for (int m = 0; m < WARP_ROWS; ++m) state[m].finish();
    write_output(shared, p, t, first_row, o, state);
}
