// Attention forward on Hopper: out = softmax over visible j of (softcap(scale * q_i . k_j) + bias_j), times v.
//
// query  // (B, Lq, H, D) ELEMENT       key, value // (B, Lk, Hkv, D) ELEMENT, any batch, row and head strides
// bias   // BIAS_OF_KEYS: (1|B, 1|Hkv|H, 1|Lk) f32; BIAS_DENSE: (1|B, 1|Hkv|H, Lq, 1|Lk) BIAS_ELEMENT; natural-log units
// out    // (B, Lq, H, D) ELEMENT, contiguous       lse // (B, H, Lq) f32, natural log, -inf where a row sees nothing
//
// The same tiles of queries and the same keys as the portable forward.cu. A block stays for many tiles (tile n * gridDim + its
// own number) and splits its warps: one warpgroup gathers rows into shared memory, the others multiply, 64 tile rows
// each. Blocks of keys pass through STAGES stages, whatever tile they belong to; each has barriers that say when its
// keys and values have arrived and when they may be overwritten. The products of the next block's logits, which may belong
// to the next tile, are issued together with the output products of the current one, so the tensor cores work while the
// softmax is computed.
//
// Prelude: ELEMENT, HEAD_DIM, HEADS, BLOCK_M, BLOCK_N, STAGES, QUERY_STAGES, KEYS, CAUSAL, BITS, BIAS, BIAS_ELEMENT (16 bit
// where BIAS_DENSE), SOFTCAP.
#include "arch.cuh"
#include "sm90/arch.cuh"
#include "bias.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "softmax.cuh"

constexpr int CONSUMERS = BLOCK_M / 64;  // warpgroups that multiply
constexpr int CONSUMER_THREADS = CONSUMERS * 128;
constexpr int PRODUCER_WARPS = 4;
constexpr int PRODUCER_THREADS = PRODUCER_WARPS * 32;
constexpr int THREADS = PRODUCER_THREADS + CONSUMER_THREADS;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 56 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 224 : 160;
constexpr int QUERIES = BLOCK_M / HEADS;
constexpr int WORDS = (QUERIES + 31) / 32;  // BITS: of a key
constexpr int HEAD_DIM_PADDED = (HEAD_DIM + 15) / 16 * 16;
constexpr int CHUNKS = (HEAD_DIM + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS;
constexpr int ROW_PIECES = HEAD_DIM_PADDED / 8;  // 16-byte pieces of a row
constexpr int ROW_LANES = ROW_PIECES <= 8 ? 8 : ROW_PIECES <= 16 ? 16 : 32;  // lanes that share a row
constexpr int KEY_FRAGMENTS = BLOCK_N / 16;
constexpr int DIM_FRAGMENTS = HEAD_DIM_PADDED / 16;
constexpr int WARP_KEYS = BLOCK_N / PRODUCER_WARPS;  // keys of a block that a producer warp gathers
constexpr int CONSUMER_BARRIER = 1;  // a named barrier
static_assert(WARP_KEYS <= 32 && WARP_KEYS * ROW_LANES % 32 == 0, "a producer lane knows one key");

// Whether the consumers must know the rows of keys: to compare them with positions, or to find their bias.
#define KEYS_KNOWN ((CAUSAL && KEYS != KEYS_CONTIGUOUS) || BIAS == BIAS_DENSE)

// What the consumers are told of a block of keys.
struct Order {
    int tile;  // negative: the work is done
    int opens;  // it is the tile's first block
    int masked;
    int following;  // BIAS_DENSE: the first key, if BLOCK_N keys follow each other from a multiple of 16 bytes on, else -1
};

struct Tile {
    int batch, group, first_head, first_query, first_position, last_position;
};

struct Shared {
    ELEMENT query[QUERY_STAGES][CHUNKS * BLOCK_M * CHUNK_COLUMNS];  // later the tile's output
    ELEMENT keys[STAGES][CHUNKS * BLOCK_N * CHUNK_COLUMNS];
    ELEMENT values[STAGES][CHUNKS * BLOCK_N * CHUNK_COLUMNS];
    float bias[STAGES][BLOCK_N];
#if BITS
    unsigned words[STAGES][WORDS][BLOCK_N];
#else
    int start[STAGES][BLOCK_N], stop[STAGES][BLOCK_N];
#endif
#if KEYS_KNOWN
    int key[STAGES][BLOCK_N];  // rows of the block's keys
#endif
    Order order[STAGES];
    Tile tile[QUERY_STAGES];
    Barrier query_arrived[QUERY_STAGES], query_free[QUERY_STAGES];
    Barrier key_arrived[STAGES], key_free[STAGES], value_arrived[STAGES], value_free[STAGES];
};

__device__ __forceinline__ int all_tiles(const AttentionParams& p) { return p.batch * (p.heads / HEADS) * p.tiles; }

__device__ __forceinline__ Tile tile_at(const AttentionParams& p, int index) {
    const int sets = p.heads / p.kv_heads / HEADS;  // tiles side by side that share a kv head
    Tile t;
    t.first_query = (p.tiles - 1 - index % p.tiles) * QUERIES;  // the longest causal tiles first
    int rest = index / p.tiles;
    const int set = rest % sets;
    rest /= sets;
    t.group = rest % p.kv_heads;
    t.batch = rest / p.kv_heads;
    t.first_head = (t.group * sets + set) * HEADS;
    t.first_position = t.first_query + p.key_length - p.query_length;
    t.last_position = min(t.first_query + QUERIES, p.query_length) - 1 + p.key_length - p.query_length;
    return t;
}

__device__ __forceinline__ long long mask_row_of(const AttentionParams& p, const Tile& t) {
    return (long long)t.batch * p.mask_batch + t.group * p.mask_group + t.first_head * p.mask_head;
}

__device__ __forceinline__ long long list_of(const AttentionParams& p, const Tile& t) {
    return mask_row_of(p, t) * p.tiles + t.first_query / QUERIES;
}

// What is known without reading: KEYS_LISTED leaves out how long the list is.
__device__ __forceinline__ KeySource keys_of(const AttentionParams& p, const Tile& t) {
    KeySource source = {};
#if KEYS == KEYS_CONTIGUOUS
    source.length = p.key_length;
#else
    const long long row = mask_row_of(p, t);
#if BITS
    source.columns = p.columns + (row * p.query_words + t.first_query / 32) * p.key_stride;
#else
    const long long head = row % p.mask_heads, batch = row / p.mask_heads;
    source.start = p.start + batch * p.start_batch + head * p.start_head;
    source.stop = p.stop + batch * p.stop_batch + head * p.stop_head;
#endif
#if KEYS == KEYS_LISTED
    source.list = p.list + list_of(p, t) * p.capacity;
    source.capacity = p.capacity;
#else
    source.list = p.list + row * p.key_length;
    source.summaries = p.summaries + row * ((p.key_length + BLOCK_N - 1) / BLOCK_N);
    source.length = p.list_lengths[row];
#endif
#endif
    return source;
}

// Place of piece `piece` of row `row` in a matrix of `rows` rows.
template <int rows>
__device__ __forceinline__ ELEMENT* piece_of(ELEMENT* matrix, int row, int piece) {
    return matrix + (piece / 8 * rows + row) * CHUNK_COLUMNS + ((piece ^ row) & 7) * 8;
}

// Which stage is next, and in which of its two phases.
template <int count>
struct Turn {
    int stage = 0;
    unsigned phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == count) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// ---- the producer: one block of keys after the other, of one tile after the other ----
// A warp copies ROWS rows at a time, ROW_LANES lanes a row. Its rows of a block are the same modulo 8 wherever ROWS allows,
// so that a lane's places in shared memory are constants apart.
constexpr int ROWS = 32 / ROW_LANES;

// Column of the block's key that lane `mine` of this warp knows: the warp's rows mine, mine + 1, ...
__device__ __forceinline__ int column_of(int mine) {
    return mine / ROWS * (PRODUCER_WARPS * ROWS) + threadIdx.x / 32 * ROWS + mine % ROWS;
}

// Which key of a block stands in row `column` of its matrices: a lane's columns of two accumulator fragments (2t, 2t + 1,
// 2t + 8, ...) are eight keys that follow each other, so that it reads what is known of them in whole vectors.
__device__ __forceinline__ constexpr int key_of_row(int column) {
    return column / 32 * 32 + column % 8 / 2 * 8 + column / 8 % 4 * 2 + column % 2;
}

struct Step {
    int tile;     // negative: there are no more
    int count;    // keys from the block's first on
    int key;      // row of this lane's key
    bool masked;
    bool opens;
#if BIAS == BIAS_DENSE
    int first_key, last_key;
#endif
};

struct Steps {
    const AttentionParams& p;
    KeyBlocks blocks;
    int tile;
    bool fresh;  // nothing of this tile has come yet
#if KEYS == KEYS_LISTED
    int2 lengths;  // of the next tile's list, fetched ahead
#endif

    __device__ __forceinline__ Steps(const AttentionParams& p)
        : p(p), blocks(KeySource{}, 0, 0), tile(blockIdx.x), fresh(true) {
        fetch_lengths(tile);
        open();
    }

    __device__ __forceinline__ void fetch_lengths(int of) {
#if KEYS == KEYS_LISTED
        if (of < all_tiles(p)) lengths = *reinterpret_cast<const int2*>(p.list_lengths + 2 * list_of(p, tile_at(p, of)));
#endif
    }

    __device__ __forceinline__ void open() {
        if (tile >= all_tiles(p)) return;
        const Tile t = tile_at(p, tile);
        KeySource source = keys_of(p, t);
#if KEYS == KEYS_LISTED
        source.full = lengths.x;
        source.length = lengths.y;
        fetch_lengths(tile + gridDim.x);
#endif
        blocks = KeyBlocks(source, t.first_position, t.last_position);
    }

    // A tile that meets no keys has one block without keys, so that its output is written.
    __device__ __forceinline__ Step next() {
        Step step = {-1, 0, 0, false, fresh};
        if (tile >= all_tiles(p)) return step;
        KeyBlock block = blocks.next();
        if (block.first < 0 && !fresh) {
            tile += gridDim.x;
            open();
            step.opens = true;
            if (tile >= all_tiles(p)) return step;
            block = blocks.next();
        }
        if (block.first < 0) block = {blocks.source.length, true};
        step.tile = tile;
        step.count = blocks.source.length - block.first;
        step.masked = block.masked;
        fresh = false;
        const int lane = threadIdx.x & 31, place = key_of_row(column_of(lane));
        bool exists;
        if (lane < WARP_KEYS && place < step.count) {
#if KEYS == KEYS_CONTIGUOUS
            step.key = block.first + place;
#else
            step.key = *blocks.entry(block.first + place, exists);
#endif
        }
#if BIAS == BIAS_DENSE
        step.first_key = 0;
        step.last_key = -1;
#if KEYS == KEYS_CONTIGUOUS
        step.first_key = block.first;
        step.last_key = block.first + BLOCK_N - 1;
#else
        // Lists are in order but for the step from full keys to partial ones.
        if (step.count >= BLOCK_N && (block.first >= blocks.source.full || block.first + BLOCK_N <= blocks.source.full)) {
            step.first_key = *blocks.entry(block.first, exists);
            step.last_key = *blocks.entry(block.first + BLOCK_N - 1, exists);
        }
#endif
        if (step.count < BLOCK_N) step.last_key = -1;
#endif
        return step;
    }
};

// This warp's rows of a block, from the key rows that its lanes know.
template <bool whole>
__device__ __forceinline__ void gather_rows(ELEMENT* matrix, const ELEMENT* source, int row_stride, const Step& step) {
    const int lane = threadIdx.x & 31, piece = lane % ROW_LANES, first = column_of(lane / ROW_LANES);
    const unsigned place = shared_address(piece_of<BLOCK_N>(matrix, first, piece));
    const int stride = row_stride * static_cast<int>(sizeof(ELEMENT));
    constexpr int DISTANCE = PRODUCER_WARPS * ROWS;  // rows from one copy of the warp to its next
    constexpr int COPIES = WARP_KEYS / ROWS, BATCH = COPIES < 8 ? COPIES : 8;
    source += piece * 8;
#pragma unroll
    for (int begin = 0; begin < COPIES; begin += BATCH) {
        int key[BATCH];  // all shuffles of a batch first: a copy would wait for its own
#pragma unroll
        for (int k = 0; k < BATCH; ++k)
            key[k] = __shfl_sync(ALL_LANES, step.key, (begin + k) * ROWS + lane / ROW_LANES);
        if (ROW_PIECES < ROW_LANES && piece >= ROW_PIECES) continue;
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            const int rows = (begin + k) * DISTANCE;
            const bool exists = (whole || key_of_row(first + rows) < step.count) && (HEAD_DIM == HEAD_DIM_PADDED || piece * 8 < HEAD_DIM);
            // Four rows further the piece stands four places away, eight rows further at the same place again.
            const unsigned turned = rows % 8 == 4 ? place ^ 64 : place;
            copy_async_16(turned + rows * CHUNK_ROW_BYTES, row_address(source, key[k], stride), exists ? 16 : 0);
        }
    }
}

__device__ __forceinline__ void gather(ELEMENT* matrix, const ELEMENT* source, int row_stride, const Step& step) {
    if (step.count < BLOCK_N)
        gather_rows<false>(matrix, source, row_stride, step);
    else
        gather_rows<true>(matrix, source, row_stride, step);
}

__device__ __forceinline__ void gather_queries(ELEMENT* matrix, const AttentionParams& p, const Tile& t) {
    const int piece = threadIdx.x % ROW_LANES;
    const ELEMENT* source = p.query + t.batch * p.query_batch + t.first_head * p.query_head;
    if (ROW_PIECES < ROW_LANES && piece >= ROW_PIECES) return;
#pragma unroll 4
    for (int row = threadIdx.x / ROW_LANES; row < BLOCK_M; row += PRODUCER_THREADS / ROW_LANES) {
        const int query = t.first_query + row / HEADS;
        const bool exists = row < QUERIES * HEADS && query < p.query_length;
        copy_async_16(piece_of<BLOCK_M>(matrix, row, piece),
                      source + (exists ? query : 0) * p.query_row + row % HEADS * p.query_head + piece * 8,
                      exists && (HEAD_DIM == HEAD_DIM_PADDED || piece * 8 < HEAD_DIM) ? 16 : 0);
    }
}

// Where a tile's keys and what is known of them lie.
struct Sources {
    const ELEMENT *keys, *values;
    const float* bias;
    const int *start, *stop;
    const unsigned* columns;

    __device__ __forceinline__ Sources() {}

    __device__ __forceinline__ Sources(const AttentionParams& p, const Tile& t)
        : keys(p.key + t.batch * p.key_batch + t.group * p.key_head),
          values(p.value + t.batch * p.value_batch + t.group * p.value_head),
          bias(p.bias + t.batch * p.bias_batch + t.group * p.bias_group + t.first_head * p.bias_head) {
        const KeySource source = keys_of(p, t);
        start = source.start;
        stop = source.stop;
        columns = source.columns;
    }
};

// What is known per key, by the lane that knows the key.
__device__ __forceinline__ void gather_facts(Shared& shared, const AttentionParams& p, const Sources& sources,
                                             const Step& step, int stage) {
    const int lane = threadIdx.x & 31, place = key_of_row(column_of(lane));
    if (lane >= WARP_KEYS) return;
    const bool exists = place < step.count;
#if BIAS == BIAS_OF_KEYS
    copy_async_4(&shared.bias[stage][place], sources.bias + (long long)step.key * p.bias_key, exists ? 4 : 0);
#endif
#if KEYS_KNOWN
    shared.key[stage][place] = step.key;
#endif
    if (!step.masked) return;
#if BITS
#pragma unroll
    for (int w = 0; w < WORDS; ++w)  // a key that does not exist has no bits
        copy_async_4(&shared.words[stage][w][place], sources.columns + (long long)w * p.key_stride + step.key, exists ? 4 : 0);
#elif KEYS == KEYS_CONTIGUOUS
    shared.start[stage][place] = CAUSAL ? step.key : INT_LOWEST;
    shared.stop[stage][place] = exists ? NEVER : INT_LOWEST;
#else
    copy_async_4(&shared.start[stage][place], sources.start + step.key, exists ? 4 : 0);
    copy_async_4(&shared.stop[stage][place], sources.stop + step.key, exists ? 4 : 0);  // 0, 0 where there is no key
#endif
}

#if BIAS == BIAS_DENSE
// The bias of a tile's rows at key 0; rows past the last query have the last one's.
__device__ __forceinline__ const BIAS_ELEMENT* bias_row(const AttentionParams& p, const Tile& t, int row) {
    const long long query = min(t.first_query + row / HEADS, p.query_length - 1);
    return static_cast<const BIAS_ELEMENT*>(p.bias_rows) + t.batch * p.bias_batch + t.group * p.bias_group +
           (t.first_head + row % HEADS) * p.bias_head + query * p.bias_query;
}
#endif

// Keys run one block ahead of values, the order in which they are used.
__device__ __forceinline__ void produce(Shared& shared, const AttentionParams& p) {
    Turn<STAGES> turn, value_turn;
    Turn<QUERY_STAGES> query_turn;
    Steps steps(p);
    Step step = steps.next(), before = {-1, 0, 0, false, false};
    Sources sources;
    const ELEMENT* values_before = nullptr;
#if BIAS == BIAS_DENSE
    static_assert(BLOCK_M == PRODUCER_THREADS, "a thread fetches one row of bias ahead");
    const BIAS_ELEMENT* bias = nullptr;
#endif
    while (true) {
        const Step following = steps.next();  // its list entries are under way while this block is copied
        barrier_wait(&shared.key_free[turn.stage], turn.phase ^ 1);
        int following_keys = -1;
#if BIAS == BIAS_DENSE
        if (p.bias_aligned && step.last_key - step.first_key == BLOCK_N - 1 && step.first_key % BIAS_WIDTH == 0)
            following_keys = step.first_key;
#endif
        if (threadIdx.x == 0) shared.order[turn.stage] = {step.tile, step.opens, step.masked, following_keys};
        values_before = sources.values;
        if (step.opens && step.tile >= 0) {
            const Tile t = tile_at(p, step.tile);
            sources = Sources(p, t);
#if BIAS == BIAS_DENSE
            bias = bias_row(p, t, threadIdx.x);
#endif
            barrier_wait(&shared.query_free[query_turn.stage], query_turn.phase ^ 1);
            if (threadIdx.x == 0) shared.tile[query_turn.stage] = t;
            gather_queries(shared.query[query_turn.stage], p, t);
            barrier_arrive_after_copies(&shared.query_arrived[query_turn.stage]);
            barrier_arrive(&shared.query_arrived[query_turn.stage]);
            query_turn.advance();
        }
        if (step.tile >= 0) {
#if BIAS == BIAS_DENSE
            if (following_keys >= 0)  // the consumers read it when its turn has come, from the second cache
                for (int i = 0; i < BLOCK_N; i += 128 / sizeof(BIAS_ELEMENT)) prefetch_line(bias + following_keys + i);
#endif
            gather_facts(shared, p, sources, step, turn.stage);
            gather(shared.keys[turn.stage], sources.keys, p.key_row, step);
        }
        barrier_arrive_after_copies(&shared.key_arrived[turn.stage]);
        barrier_arrive(&shared.key_arrived[turn.stage]);
        turn.advance();
        if (before.tile >= 0) {
            barrier_wait(&shared.value_free[value_turn.stage], value_turn.phase ^ 1);
            gather(shared.values[value_turn.stage], values_before, p.value_row, before);
            barrier_arrive_after_copies(&shared.value_arrived[value_turn.stage]);
            value_turn.advance();
        }
        if (step.tile < 0) break;
        before = step;
        step = following;
    }
}

// ---- the consumers: 64 rows of the tile each ----
// s = rows . k
__device__ __forceinline__ void begin_logits(Fragment (&s)[KEY_FRAGMENTS], const ELEMENT* query, const ELEMENT* key) {
    const unsigned a = matrix_descriptor(query, 0), b = matrix_descriptor(key, 0);
    pin(s);
    products_begin();
#pragma unroll
    for (int d = 0; d < DIM_FRAGMENTS; ++d) {
        const int chunk = d / 4, step = d % 4 * 32;
        Wgmma<KEY_FRAGMENTS>::multiply_shared(s, moved(a, chunk * BLOCK_M * CHUNK_ROW_BYTES + step),
                                              moved(b, chunk * BLOCK_N * CHUNK_ROW_BYTES + step), d > 0);
    }
    products_commit();
}

// o += p . values of 16 keys, in pieces of at most 128 columns
template <int first>
__device__ __forceinline__ void add_columns(Fragment (&o)[DIM_FRAGMENTS], const unsigned (&a)[4],
                                            unsigned value) {
    if constexpr (first < DIM_FRAGMENTS) {
        constexpr int REST = DIM_FRAGMENTS - first;
        constexpr int SIZE = REST >= 8 ? 8 : REST == 6 ? 6 : REST >= 4 ? 4 : REST >= 2 ? 2 : 1;
        Wgmma<SIZE>::multiply_registers(&o[first], a,
                                        moved(value, first / 4 * BLOCK_N * CHUNK_ROW_BYTES + first % 4 * 32));
        add_columns<first + SIZE>(o, a, value);
    }
}

__device__ __forceinline__ void begin_output(Fragment (&o)[DIM_FRAGMENTS], unsigned (&probability)[KEY_FRAGMENTS][4],
                                             const ELEMENT* value) {
    const unsigned b = matrix_descriptor(value, BLOCK_N * CHUNK_ROW_BYTES);
    pin(o);
    pin(probability);
    products_begin();
#pragma unroll
    for (int n = 0; n < KEY_FRAGMENTS; ++n) add_columns<0>(o, probability[n], moved(b, n * 16 * CHUNK_ROW_BYTES));
    products_commit();
}

// Logits are kept in a unit of their own, which the exponential takes in: products times `unit`, or natural logits times
// log2(e), are powers of 2. So a product that needs neither bias nor softcap is touched once. Needs scale > 0.
struct Logits {
    float scale, cap, exponent, unit;

    __device__ __forceinline__ Logits(float scale, float softcap)
        : scale(scale), cap(softcap), exponent(SOFTCAP ? 2.0f * LOG2_E / softcap : 0.0f),
          unit(BIAS != BIAS_NONE || SOFTCAP ? LOG2_E : scale * LOG2_E) {}

    template <typename Bias>
    __device__ __forceinline__ void finish(Fragment (&s)[KEY_FRAGMENTS], const Bias& bias) const {
        if (BIAS == BIAS_NONE && !SOFTCAP) return;
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float& x = s[n].x[i];
                x = SOFTCAP ? softcapped(x * scale, cap, exponent) + bias(n, i) : fmaf(x, scale, bias(n, i));
            }
    }
};

// Of the eight keys that a lane has of fragments n and n + 1 (n even): which one element i of fragment n + h is.
__device__ __forceinline__ constexpr int own_key(int h, int i) { return 4 * h + i / 4 * 2 + i % 2; }

// What a lane adds to its logits of a block: element i of fragment n.
#if BIAS == BIAS_DENSE
static_assert(sizeof(BIAS_ELEMENT) == 2, "eight numbers are 16 bytes");

struct LaneBias {
    uint4 eight[2][KEY_FRAGMENTS / 2];  // (row, pair of fragments)
    const BIAS_ELEMENT* row[2];         // at key 0, of this lane's two rows

    __device__ __forceinline__ void fetch(const AttentionParams& p, const Shared& shared, int stage, int following) {
        const int own = 8 * (threadIdx.x & 3);
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int m = 0; m < KEY_FRAGMENTS / 2; ++m) {
                if (following >= 0) {
                    eight[r][m] = __ldg(reinterpret_cast<const uint4*>(row[r] + following + 32 * m + own));
                } else {
                    BIAS_ELEMENT* x = reinterpret_cast<BIAS_ELEMENT*>(&eight[r][m]);
#pragma unroll
                    for (int k = 0; k < 8; ++k) x[k] = row[r][shared.key[stage][32 * m + own + k] * p.bias_key];
                }
            }
    }

    __device__ __forceinline__ float operator()(int n, int i) const {
        return to_float(reinterpret_cast<const BIAS_ELEMENT*>(&eight[fragment_row(i)][n / 2])[own_key(n % 2, i)]);
    }
};
#elif BIAS == BIAS_OF_KEYS
struct LaneBias {
    float4 four[KEY_FRAGMENTS];

    __device__ __forceinline__ void fetch(const AttentionParams& p, const Shared& shared, int stage, int) {
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; ++n)
            four[n] = reinterpret_cast<const float4*>(shared.bias[stage])[n / 2 * 8 + 2 * (threadIdx.x & 3) + n % 2];
    }

    __device__ __forceinline__ float operator()(int n, int i) const {
        return i & 1 ? (i & 4 ? four[n].w : four[n].y) : (i & 4 ? four[n].z : four[n].x);
    }
};
#else
struct LaneBias {
    __device__ __forceinline__ void fetch(const AttentionParams&, const Shared&, int, int) {}

    __device__ __forceinline__ float operator()(int, int) const { return 0.0f; }
};
#endif

// The online softmax (softmax.cuh) of logits in such a unit: s becomes exp(logit - m), in four strands a row.
__device__ __forceinline__ void update(RowState& state, Fragment (&s)[KEY_FRAGMENTS], float unit, float (&rescale)[2]) {
    float highest[2][4], sum[2][4], reference[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int k = 0; k < 4; ++k) highest[r][k] = s[0].x[(k & 1) + 2 * r + 4 * (k >> 1)];
#pragma unroll
    for (int n = 1; n < KEY_FRAGMENTS; ++n)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float& h = highest[fragment_row(i)][(i & 1) + 2 * (i >> 2)];
            h = fmaxf(h, s[n].x[i]);
        }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float m = fmaxf(state.m[r], row_max(fmaxf(fmaxf(highest[r][0], highest[r][1]), fmaxf(highest[r][2], highest[r][3]))));
        const float seen = m == -infinity() ? 0.0f : m;  // a row that has seen nothing: p = 2^-inf
        rescale[r] = exp2_fast((state.m[r] - seen) * unit);
        reference[r] = -seen * unit;
        state.m[r] = m;
    }
#pragma unroll
    for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int r = fragment_row(i), k = (i & 1) + 2 * (i >> 2);
            s[n].x[i] = exp2_fast(fmaf(s[n].x[i], unit, reference[r]));
            sum[r][k] = n == 0 ? s[n].x[i] : sum[r][k] + s[n].x[i];
        }
#pragma unroll
    for (int r = 0; r < 2; ++r)
        state.l[r] = fmaf(state.l[r], rescale[r], (sum[r][0] + sum[r][1]) + (sum[r][2] + sum[r][3]));
}

// What says who sees the block's key `place`: the word of this warp's queries, or the first position that sees it and the
// first that no longer does.
#if BITS
static_assert(32 % (16 / HEADS > 0 ? 16 / HEADS : 1) == 0, "a warp's queries are in one word");

__device__ __forceinline__ const unsigned* warp_words(const Shared& shared, int stage) {
    return shared.words[stage][(threadIdx.x - PRODUCER_THREADS) / 32 * 16 / HEADS / 32];
}

__device__ __forceinline__ int visibility(const Shared& shared, int stage, int place) {
    return static_cast<int>(warp_words(shared, stage)[place]);
}

__device__ __forceinline__ bool visible(int bit, int word) { return (word & bit) != 0; }
#else
__device__ __forceinline__ int2 visibility(const Shared& shared, int stage, int place) {
    int start = shared.start[stage][place];
#if CAUSAL && KEYS != KEYS_CONTIGUOUS
    start = max(start, shared.key[stage][place]);
#endif
    return make_int2(start, shared.stop[stage][place]);
}

__device__ __forceinline__ bool visible(int position, int2 interval) {
    return visible(position, interval.x, interval.y);
}
#endif

__device__ __forceinline__ void apply_mask(Fragment (&s)[KEY_FRAGMENTS], const Shared& shared, int stage,
                                           const int (&position)[2]) {
#pragma unroll
    for (int n = 0; n < KEY_FRAGMENTS; ++n) {
        const int place = n / 2 * 32 + 8 * (threadIdx.x & 3) + own_key(n % 2, 0);  // of four keys that follow each other
#if BITS
        const int4 words = *reinterpret_cast<const int4*>(warp_words(shared, stage) + place);
        const int seen[4] = {words.x, words.y, words.z, words.w};
#else
        int2 seen[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) seen[k] = visibility(shared, stage, place + k);
#endif
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (!visible(position[fragment_row(i)], seen[own_key(0, i)])) s[n].x[i] = -infinity();
    }
}

// Whether this thread's share of a block's values is finite. Rows of other tiles' columns are never read.
__device__ __forceinline__ bool share_is_finite(const ELEMENT* value) {
    unsigned found = 0;
    for (int i = threadIdx.x - PRODUCER_THREADS; i < BLOCK_N * ROW_PIECES; i += CONSUMER_THREADS) {
        const uint4 x = *reinterpret_cast<const uint4*>(
            piece_of<BLOCK_N>(const_cast<ELEMENT*>(value), i / ROW_PIECES, i % ROW_PIECES));
        found |= nonfinite(x.x, value) | nonfinite(x.y, value) | nonfinite(x.z, value) | nonfinite(x.w, value);
    }
    return (found & sign_bits(sizeof(ELEMENT))) == 0;
}

// A value that is not finite must not reach a row that does not see its key, and 0 * inf is NaN: such values are added
// to the rows that see them, and are zero for the product.
__device__ __forceinline__ void isolate_nonfinite(Fragment (&o)[DIM_FRAGMENTS], ELEMENT* value,
                                                  const Shared& shared, int stage, const int (&position)[2]) {
#pragma unroll 1
    for (int key = 0; key < BLOCK_N; ++key) {
        const auto seen = visibility(shared, stage, key_of_row(key));
#pragma unroll
        for (int d = 0; d < DIM_FRAGMENTS; ++d)
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int column = 16 * d + 2 * (threadIdx.x & 3) + fragment_column(i);
                const float v = to_float(piece_of<BLOCK_N>(value, key, column / 8)[column % 8]);
                if (!isfinite(v) && visible(position[fragment_row(i)], seen)) o[d].x[i] += v;
            }
    }
    named_barrier(CONSUMER_BARRIER, CONSUMER_THREADS);  // everybody has read the values that are about to be cleared
    for (int i = threadIdx.x - PRODUCER_THREADS; i < BLOCK_N * HEAD_DIM_PADDED; i += CONSUMER_THREADS) {
        const int column = i % HEAD_DIM_PADDED;
        ELEMENT& x = piece_of<BLOCK_N>(value, i / HEAD_DIM_PADDED, column / 8)[column % 8];
        if (!isfinite(to_float(x))) from_float(x, 0.0f);
    }
    shared_write_fence();
    named_barrier(CONSUMER_BARRIER, CONSUMER_THREADS);  // the block is finite
}

// Writes this warp's 16 rows of out and lse, through the tile's own query rows, which nobody needs any more.
__device__ __forceinline__ void write_tile(const AttentionParams& p, const Tile& t, ELEMENT* staging, int first_row,
                                           const Fragment (&o)[DIM_FRAGMENTS], RowState& state) {
    const int lane = threadIdx.x & 31;
    state.finish();
#pragma unroll
    for (int d = 0; d < DIM_FRAGMENTS; ++d)
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const int r = fragment_row(i), row = first_row + lane / 4 + 8 * r;
            const float factor = state.inverse_sum(r);
            const unsigned pair = pack_pair(o[d].x[i] * factor, o[d].x[i + 1] * factor);
            *reinterpret_cast<unsigned*>(piece_of<BLOCK_M>(staging, row, 2 * d + i / 4) + 2 * (lane & 3)) = pair;
        }
    __syncwarp();  // the warp's rows are complete
    constexpr int ROWS = 32 / ROW_LANES;
    const int piece = lane % ROW_LANES;
#pragma unroll 1
    for (int k = 0; k < 16; k += ROWS) {
        const int row = first_row + k + lane / ROW_LANES;
        const int query = t.first_query + row / HEADS, head = t.first_head + row % HEADS;
        if (piece * 8 >= HEAD_DIM || row >= QUERIES * HEADS || query >= p.query_length) continue;
        ELEMENT* target = p.out + (((long long)t.batch * p.query_length + query) * p.heads + head) * HEAD_DIM + piece * 8;
        *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(piece_of<BLOCK_M>(staging, row, piece));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = first_row + lane / 4 + 8 * r, query = t.first_query + row / HEADS;
        if ((lane & 3) == 0 && row < QUERIES * HEADS && query < p.query_length) {
            const long long head = (long long)t.batch * p.heads + t.first_head + row % HEADS;
            p.lse[head * p.query_length + query] = state.lse(r);
        }
    }
}

// A consumer warp's registers and turns.
struct Consumer {
    Shared& shared;
    const AttentionParams& p;
    const Logits logits;
    const int lane, group_row, first_row;  // rows of the warpgroup and of this warp in the tile
    Turn<STAGES> turn, value_turn;
    Turn<QUERY_STAGES> query_turn;
    Fragment s[KEY_FRAGMENTS], o[DIM_FRAGMENTS];
    unsigned probability[KEY_FRAGMENTS][4];
    LaneBias bias;
    bool look_at_values = true;  // some value of the tile at hand may not be finite
    RowState state, complete;  // of the tile at hand, and of the one before until its output is written
    int position[2];

    __device__ __forceinline__ Consumer(Shared& shared, const AttentionParams& p)
        : shared(shared), p(p), logits(p.scale, p.softcap), lane(threadIdx.x & 31),
          group_row(uniform((threadIdx.x - PRODUCER_THREADS) / 128) * 64),
          first_row(uniform((threadIdx.x - PRODUCER_THREADS) / 32) * 16) {}

    __device__ __forceinline__ Order wait_for_keys() const {
        barrier_wait(&shared.key_arrived[turn.stage], turn.phase);
        return shared.order[turn.stage];
    }

    // The softmax goes on to the tile whose queries are at `queries`.
    __device__ __forceinline__ void open_tile(const Turn<QUERY_STAGES>& queries) {
        const Tile& t = shared.tile[queries.stage];
        look_at_values = p.nonfinite == nullptr || p.nonfinite[t.batch * p.kv_heads + t.group] != 0;
        complete = state;
        state = RowState();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = first_row + lane / 4 + 8 * r, query = row / HEADS;
            position[r] = BITS ? static_cast<int>(1u << ((t.first_query + query) & 31)) : t.first_position + query;
#if BIAS == BIAS_DENSE
            bias.row[r] = bias_row(p, t, row);
#endif
        }
    }

    __device__ __forceinline__ void clear_output() {
#pragma unroll
        for (int d = 0; d < DIM_FRAGMENTS; ++d)
#pragma unroll
            for (int i = 0; i < 8; ++i) o[d].x[i] = 0.0f;
    }

    // Logits of the block at `turn`, of the tile whose queries are at `queries`.
    __device__ __forceinline__ void start_logits(const Turn<QUERY_STAGES>& queries) {
        barrier_wait(&shared.query_arrived[queries.stage], queries.phase);
        begin_logits(s, shared.query[queries.stage] + group_row * CHUNK_COLUMNS, shared.keys[turn.stage]);
    }

    __device__ __forceinline__ void finish_output() {
        products_wait<0>();
        pin(o);
        pin(probability);
    }

    __device__ __forceinline__ void release_values() {
        if (lane == 0) barrier_arrive(&shared.value_free[value_turn.stage]);
        value_turn.advance();
    }

    // Writes the tile whose queries were at `query_turn`.
    __device__ __forceinline__ void close_tile(RowState& result) {
        result.m[0] *= logits.unit;
        result.m[1] *= logits.unit;
        write_tile(p, shared.tile[query_turn.stage], shared.query[query_turn.stage], first_row, o, result);
        __syncwarp();  // the warp has read its output rows
        if (lane == 0) barrier_arrive(&shared.query_free[query_turn.stage]);
        query_turn.advance();
    }

    // What is added to the logits of the block at `turn`; to be called while their products are under way.
    __device__ __forceinline__ void fetch_bias(int following) { bias.fetch(p, shared, turn.stage, following); }

    __device__ __forceinline__ void release_keys(const Turn<STAGES>& turn) const {
        if (lane == 0) barrier_arrive(&shared.key_free[turn.stage]);
    }

    // Products become exponentials; `rescale` is what sums and outputs so far must be multiplied by. The keys of a masked
    // block are released when its values have been looked at.
    __device__ __forceinline__ void exponentiate(bool masked, float (&rescale)[2]) {
        logits.finish(s, bias);
        if (masked)
            apply_mask(s, shared, turn.stage, position);
        else
            release_keys(turn);
        update(state, s, logits.unit, rescale);
        // The exponentials are to be computed while the output products are under way. The assembler would move them
        // behind the wait for these products, but moves nothing across a branch that depends on them.
        if (__any_sync(ALL_LANES, state.l[0] + state.l[1] < 0.0f)) __nanosleep(0);
    }

    // Exponentials become the operand of the output product.
    __device__ __forceinline__ void round_probabilities() {
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) probability[n][i] = pack_pair(s[n].x[2 * i], s[n].x[2 * i + 1]);
    }

    // The output products of the block at `value_turn`, whose keys were at `keys`.
    __device__ __forceinline__ void start_output(bool masked, const Turn<STAGES>& keys) {
        barrier_wait(&shared.value_arrived[value_turn.stage], value_turn.phase);
        ELEMENT* value = shared.values[value_turn.stage];
        if (masked) {
            if (look_at_values && named_barrier_or(CONSUMER_BARRIER, CONSUMER_THREADS, !share_is_finite(value)))
                isolate_nonfinite(o, value, shared, keys.stage, position);
            release_keys(keys);
        }
        begin_output(o, probability, value);
    }
};

__device__ __forceinline__ void consume(Shared& shared, const AttentionParams& p) {
    Consumer c(shared, p);
    float rescale[2];
    Order current = c.wait_for_keys();
    Turn<STAGES> keys = c.turn;      // of the current block
    Turn<QUERY_STAGES> queries;      // of the next block
    c.start_logits(queries);
    c.open_tile(queries);
    c.fetch_bias(current.following);
    c.clear_output();
    products_wait<0>();
    pin(c.s);
    c.exponentiate(current.masked, rescale);
    c.round_probabilities();
    while (true) {
        c.turn.advance();
        const Order next = c.wait_for_keys();
        if (next.tile < 0) break;
        if (next.opens) queries.advance();
        c.start_logits(queries);
        c.start_output(current.masked, keys);
        if (next.opens) c.open_tile(queries);
        c.fetch_bias(next.following);
        products_wait<1>();
        pin(c.s);
        c.exponentiate(next.masked, rescale);
        c.finish_output();
        c.release_values();
        c.round_probabilities();
        if (next.opens) {  // the tile before is complete
            c.close_tile(c.complete);
            c.clear_output();
        } else if (__any_sync(ALL_LANES, rescale[0] != 1.0f || rescale[1] != 1.0f)) {  // rare after a few blocks
#pragma unroll
            for (int d = 0; d < DIM_FRAGMENTS; ++d)
#pragma unroll
                for (int i = 0; i < 8; ++i) c.o[d].x[i] *= rescale[fragment_row(i)];
        }
        current = next;
        keys = c.turn;
    }
    c.start_output(current.masked, keys);
    c.finish_output();
    c.close_tile(c.state);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_forward(const AttentionParams p) {
    extern __shared__ unsigned char shared_memory[];
    // The swizzle counts rows from 1024-byte boundaries.
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory + (0u - shared_address(shared_memory)) % 1024);
    if (threadIdx.x == 0) {
        for (int i = 0; i < QUERY_STAGES; ++i) {
            barrier_init(&shared.query_arrived[i], 2 * PRODUCER_THREADS);
            barrier_init(&shared.query_free[i], CONSUMER_THREADS / 32);
        }
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&shared.key_arrived[i], 2 * PRODUCER_THREADS);
            barrier_init(&shared.key_free[i], CONSUMER_THREADS / 32);
            barrier_init(&shared.value_arrived[i], PRODUCER_THREADS);
            barrier_init(&shared.value_free[i], CONSUMER_THREADS / 32);
        }
        barrier_init_fence();
    }
    __syncthreads();  // the barriers are in place
    if (threadIdx.x < PRODUCER_THREADS) {
        shrink_registers<PRODUCER_REGISTERS>();
        produce(shared, p);
    } else {
        grow_registers<CONSUMER_REGISTERS>();
        consume(shared, p);
    }
}
