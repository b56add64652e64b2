// What the warps of the Hopper key gradients share: the tile's shape, shared memory with its barriers, the parameters, and
// how a CTA goes through its tiles.
//
// Prelude: as sm90/backward_dkv.cu.
#pragma once
#define DIM_SLICES 1
#define WIDE (HEAD_DIM > 128)
#if WIDE
#define BLOCK_N 64
#else
#define BLOCK_N 128
#endif
#include "common/arch.cuh"
#include "common/bias.cuh"
#include "common/key_tile.cuh"
#include "common/params.cuh"
#include "common/softmax.cuh"
#include "sm90/backward_mma.cuh"
#include "sm90/key_plan.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/swizzle.cuh"
#if STORED
#include "sm90/stored_ds.cuh"
#endif

constexpr int QUERY_FRAGMENTS = BLOCK_Q / 16;
constexpr int WORDS = BLOCK_Q / 32;        // BITS: of a key in a step
constexpr int MAX_STEPS = 2048;            // BITS: of a head
// DQUERY: a warpgroup makes half of a step's dq: 64 of 128 queries, or half of the columns of 64.
constexpr bool DQ_BY_ROWS = BLOCK_Q == 128;
constexpr int DQ_FRAGMENTS = DQ_BY_ROWS ? OUT_FRAGMENTS : CHUNKS == 2 ? 4 : OUT_FRAGMENTS == 4 ? 2 : 1;
constexpr int DQ_HALF = 64 * 16 * DQ_FRAGMENTS;  // elements
constexpr int UNIT_QUERIES = 64, DQ_UNIT = DQ_BY_ROWS ? DQ_HALF : 2 * DQ_HALF;
enum : int { SUMS_BARRIER = 1, TURN_BARRIER = 3 };  // named barriers, one of each warpgroup
constexpr int CONSUMER_THREADS = 256, THREADS = 128 + CONSUMER_THREADS;
constexpr int LOOKAHEAD = 10;  // steps before a tile's end at which the next ticket is taken and its keys are gathered
// Warps of the producer; a warp each for the two stages of keys.
constexpr int QUERY_WARP = 0, STATISTICS_WARP = 1, KEY_WARP = 2;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static_assert(HEAD_DIM <= 256 && !(WIDE && DQUERY) && !(SEQUENCES && KEYS == KEYS_SHARED), "what the kernel is made for");
static_assert(!BITS || (KEYS == KEYS_LISTED && !DQUERY && !INTERVALS && !CAUSAL && !SEQUENCES), "dense masks have lists");
static_assert(!(BITS && DELAY), "with bits keys have no intervals");
static_assert(!SEQUENCES || SUPER_UNIT % BLOCK_N == 0, "a tile's keys are of one list");
static_assert(!STORED || (KEYS == KEYS_LISTED && BLOCK_Q == 64 && !WIDE && !BITS && !SEQUENCES && !DQUERY), "stored dS");

struct BackwardDkvParams {
    TensorMap query, dout;
    AttentionParams attention;
    unsigned* tickets;  // one, 0 before
    int tiles;
    int query_units;      // DQUERY: units of queries of a head
    float* dquery_sums;  // (batch, heads, query_units, DQ_UNIT), 0 before; halves in the order of their accumulators
    // KEYS_CONTIGUOUS: a tile's queries are split, `steps_per_split` steps each (0: not at all). The sums of splits are
    // partial_key and partial_value, (splits, batch, key_length, kv_heads, HEAD_DIM), and partial_bias, (splits, batch,
    // heads, key_length), 0 before.
    int steps_per_split, tiles_per_split;
#if STORED
    StoredDs stored;
#endif
#if KEYS == KEYS_SHARED
    KeyPlan plan;
#endif

    __device__ __forceinline__ bool is_split() const { return KEYS == KEYS_CONTIGUOUS && steps_per_split > 0; }
    // Whether a ticket may be a part of a tile.
    __device__ __forceinline__ bool has_parts() const { return KEYS == KEYS_SHARED || is_split(); }
};

// Where the units of a sequence begin (or of a super-tile, or of all queries: sequence 0).
__device__ __forceinline__ int unit_of(int first_query, int sequence) { return first_query / UNIT_QUERIES + sequence; }

// What is known of a tile's keys.
struct KeyTileMeta {
    int index[BLOCK_N], start[BLOCK_N], stop[BLOCK_N];
    float bias[BLOCK_N];  // in log 2 units
#if DELAY
    int far_from[BLOCK_N];
    int last_far_from;  // the highest
#endif
#if KEYS == KEYS_SHARED
    Ticket ticket;
#endif
    KeyTile tile;  // KEYS_SHARED: of a split, `first` is ~ the row of its first key's partial sums
    QueryRange queries;
    int steps;  // of one head; END: there are no more tiles
    int split, first_step, all_steps;  // of the steps of all heads
    int first_unit;  // DQUERY: of the first query, among the head's
#if STORED
    int stored_tile;  // which tile of the launch it is
#endif
#if BITS
    unsigned live[MAX_STEPS / 32], masked[MAX_STEPS / 32];  // a bit a step, which see some pair, and not all pairs
#endif

    // The head of the first step, and its number there.
    __device__ __forceinline__ int first_head() const { return KEYS != KEYS_LISTED ? first_step / max(steps, 1) : 0; }
    __device__ __forceinline__ int first_of_head() const { return KEYS != KEYS_LISTED ? first_step % max(steps, 1) : 0; }
};
constexpr int END = -1;

// The steps of a split of a tile, head by head. BITS: those of a head that see some pair.
struct StepQueries {
    const KeyTileMeta& meta;
    const int begin, steps;
    int h, i, left;  // the current step is number i of head h
#if BITS
    int word = 0, bit = 0;
    unsigned pending = 0;  // steps of the current word still to come
#endif

    __device__ __forceinline__ StepQueries(const KeyTileMeta& meta)
        : meta(meta), begin(meta.queries.begin), steps(meta.steps), h(meta.first_head()), i(meta.first_of_head()),
          left(meta.all_steps) {}

    __device__ __forceinline__ bool more() const { return left > 0; }

    __device__ __forceinline__ void advance() {
        --left;
        if (++i < steps) return;
        i = 0;
        ++h;
    }

    // Its first query; asked for once a step.
    __device__ __forceinline__ int first() {
#if BITS
        if (i == 0) pending = meta.live[word = 0];
        while (pending == 0) pending = meta.live[++word];
        bit = __ffs(pending) - 1;
        pending &= pending - 1;
        return begin + (32 * word + bit) * BLOCK_Q;
#else
        return begin + i * BLOCK_Q;
#endif
    }

#if BITS
    // Whether it has hidden pairs.
    __device__ __forceinline__ bool masked() const { return (meta.masked[word] >> bit & 1) != 0; }
#endif
};

struct Shared {
    ELEMENT key[KEY_STAGES][CHUNKS * BLOCK_N * CHUNK_COLUMNS];
    ELEMENT value[KEY_STAGES][CHUNKS * BLOCK_N * CHUNK_COLUMNS];
    ELEMENT query[STAGES][CHUNKS * BLOCK_Q * CHUNK_COLUMNS];
    ELEMENT dout[STAGES][CHUNKS * BLOCK_Q * CHUNK_COLUMNS];
    float lse[STAGES][BLOCK_Q];  // -lse * log2(e); -inf: a row that counts for nothing
    float delta[STAGES][BLOCK_Q];  // -delta
#if BITS
    unsigned words[STAGES][WORDS][BLOCK_N];  // of a step with hidden pairs
    int masked[STAGES];  // whether it has
#endif
#if DQUERY
    ELEMENT ds[2][BLOCK_N * BLOCK_Q];  // rows are keys
    float dq[2][DQ_HALF];              // of each warpgroup
    float* sums[2];                    // of dq of the current step; each for one thread
    Barrier ds_full[2];                // a stage is empty when the other one is full: see docs/hopper-backward.md
#endif
#if WIDE
    float4 probability[QUERY_FRAGMENTS * 2][128];  // of a step, thread by thread
    Barrier probability_full, probability_empty;
#endif
    KeyTileMeta meta[KEY_STAGES];
    Barrier key_full[KEY_STAGES], key_empty[KEY_STAGES];
    Barrier query_landed[STAGES], dout_landed[STAGES];  // by TMA; a stage's rows and statistics, too, when it is ready
    Barrier ready[STAGES];
    Barrier query_empty[STAGES];  // both kinds of rows, and statistics
};

// The stages of keys in turn. A stage that has ended keeps its phase; the other one, if there are two, has at most one tile
// more, whose ticket was taken earlier.
struct KeyRing {
    int stage = 0;
    unsigned phases = 0;  // a bit a stage
    bool ended = false;

    __device__ __forceinline__ unsigned phase() const { return phases >> stage & 1; }

    __device__ __forceinline__ void advance() {
        phases ^= 1u << stage;
        stage = (stage + 1) % KEY_STAGES;
    }

    // The tile at this stage is none; whether that has been so before.
    __device__ __forceinline__ bool end() {
        const bool all = ended;
        ended = true;
        stage = (stage + 1) % KEY_STAGES;
        return all;
    }
};

// Goes through the tiles of this CTA as they come: work(stage, meta).
template <typename Work>
__device__ __forceinline__ void for_each_tile(Shared& shared, const Work& work) {
    for (KeyRing ring;;) {
        barrier_wait(&shared.key_full[ring.stage], ring.phase());
        if (shared.meta[ring.stage].steps == END) {
            if (ring.end()) return;
            continue;
        }
        work(ring.stage, shared.meta[ring.stage]);
        ring.advance();
    }
}
