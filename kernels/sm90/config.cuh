// What the warps of the Hopper forward share: the tile's shape, shared memory, tiles and their keys, turns.
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "common/arch.cuh"
#include "sm90/ptx.cuh"
#include "common/bias.cuh"
#include "common/mask.cuh"
#include "common/params.cuh"
#include "common/query_tile.cuh"
#include "common/softmax.cuh"
#include "sm90/split_kv.cuh"

constexpr int CONSUMERS = BLOCK_M / 64;  // warpgroups that multiply
constexpr int CONSUMER_THREADS = CONSUMERS * 128;
constexpr int PRODUCER_WARPS = 4;
constexpr int PRODUCER_THREADS = PRODUCER_WARPS * 32;
constexpr int THREADS = PRODUCER_THREADS + CONSUMER_THREADS;
constexpr int HEAD_DIM_PADDED = (HEAD_DIM + 15) / 16 * 16;
constexpr int CHUNKS = (HEAD_DIM + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS;
constexpr int ROW_PIECES = HEAD_DIM_PADDED / 8;  // 16-byte pieces of a row
constexpr int ROW_LANES = ROW_PIECES <= 8 ? 8 : ROW_PIECES <= 16 ? 16 : 32;  // lanes that share a row
constexpr int KEY_FRAGMENTS = BLOCK_N / 16;
constexpr int DIM_FRAGMENTS = HEAD_DIM_PADDED / 16;
// What a launch has, 504 for a lane of each warpgroup where there are two consumers and 512 where there are three, is dealt
// out anew: as few to the consumers as their products do with. The producer keeps a run of row addresses.
constexpr int SUMS = KEY_FRAGMENTS * 12 + DIM_FRAGMENTS * 8;  // and probabilities
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? (BIAS == BIAS_DENSE ? 216 : 208) : SUMS > 112 ? 160 : SOFTCAP ? 152 : 144;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 504 - 2 * CONSUMER_REGISTERS : 512 - 3 * CONSUMER_REGISTERS;
// Whether a consumer keeps its queries in registers, where there are enough: then QK reads half as much of shared memory, all
// of whose width it needs otherwise.
constexpr bool QUERIES_KEPT = BIAS != BIAS_DENSE && SUMS + DIM_FRAGMENTS * 4 <= (CONSUMERS == 2 ? 144 : 96);
constexpr int WARP_KEYS = BLOCK_N / PRODUCER_WARPS;  // keys of a block that a producer warp gathers
constexpr bool BY_EIGHTS = WARP_KEYS == 24;          // not those that follow each other, but eight of every 32
constexpr int ALL_BARRIER = 0, CONSUMER_BARRIER = 1, TURN_BARRIER = 2;  // named barriers; of turns one for each warpgroup
constexpr int LISTS = 4;  // of blocks, which the producer has at a time
// Whether a block of at most FEW_KEYS keys, with which most lists end, is less work than others.
#define FEW (KEYS == KEYS_LISTED && !BITS && BLOCK_N > FEW_KEYS)
constexpr int FEW_KEYS = 32;
constexpr int FEW_FRAGMENTS = FEW_KEYS / 16;
// Whether the consumers have a way of their own for whole blocks. Masks as bits leave few blocks whole.
#define PLAIN (!BITS)
// Whether whole blocks behind whole blocks have a loop of their own, whose code remains in one place: where a warp jumps it
// waits for instructions. By measurement; lists gain nothing.
#define STRAIGHT (PLAIN && KEYS == KEYS_CONTIGUOUS && (CONSUMERS == 2 || SOFTCAP || BIAS == BIAS_NONE))
// Whether places of a block that have no key need no test for being seen: they have a bias of -inf, and another key's row.
#define HOLES (KEYS == KEYS_LISTED && BIAS == BIAS_OF_KEYS)
// Whether it matters that a block's keys follow each other: their rows come through the copy engine then, and their dense
// bias in vectors.
#define ORDERED (RUNS || BIAS == BIAS_DENSE)
constexpr int RUN_STEP = 8;   // such a block begins at a multiple of this key
constexpr int RUN_KEYS = 32;  // of a box
// Whether the last tiles, too few for all blocks of the grid, are cut up among them, 64 rows for each warpgroup that
// multiplies. Of a dense mask a tile's words must begin at a word; causality's last tiles are short ones.
#define CUT (64 % HEADS == 0 && !BITS && !(CAUSAL && KEYS == KEYS_CONTIGUOUS) && !SPLIT)
constexpr int PART_QUERIES = 64 / HEADS;
static_assert(!SPLIT || (!SEQUENCES && !BITS), "such tiles are not split up");
// Whether some numbers of tiles, or of parts, have none.
#define GAPS (SEQUENCES || CUT)
// Whether the producer has a loop of its own for blocks full of keys that all queries see, which gathers them.
#define WHOLE_BLOCKS (KEYS == KEYS_LISTED && !ORDERED)
static_assert(WARP_KEYS <= 32 && WARP_KEYS * ROW_LANES % 32 == 0, "a producer lane knows one key");

// A bias of keys is where the sums of the products begin, unless a softcap comes between.
#define BIAS_FIRST (BIAS == BIAS_OF_KEYS && !SOFTCAP)
// Whether logits are powers of 2 as soon as they have their softcap, whose coefficients, and the bias, are in that unit.
#define POWERS_OF_2 (SOFTCAP && BIAS != BIAS_DENSE)

// Whether the consumers must know the rows of keys: to compare them with positions, or to find their bias.
#define KEYS_KNOWN ((CAUSAL && KEYS != KEYS_CONTIGUOUS) || BIAS == BIAS_DENSE)

// What the consumers are told of a block of keys.
struct Order {
    int state;      // 0: all queries see all of its keys, and others of the tile follow
    int following;  // BIAS_DENSE: the first key, if BLOCK_N keys follow each other from a multiple of 16 bytes on, else -1

    // In a state: how many keys not all queries see, all those before them being seen, and these. LEAVING, and the bits above
    // it: that a consumer has no part in what follows.
    static constexpr int MASKED = 255, FEW_OF_THEM = 256, CLOSES = 512, UNWRITTEN = 1024, HELD = 2048, LEAVING = 4096;
    static_assert(BLOCK_N <= MASKED, "a state holds their number");

    Order() = default;
    __device__ __forceinline__ explicit Order(int state) : state(state), following(-1) {}

    // `clear`: all queries see so many keys from the block's first on. `closes`: it is its tile's last, and so many consumers
    // have a part in the next tile.
    __device__ __forceinline__ Order(int clear, bool few, bool closes, int staying, int following)
        : state(BLOCK_N - clear + (FEW && few ? FEW_OF_THEM : 0) +
                (closes ? CLOSES + (LEAVING << CONSUMERS) - (LEAVING << staying) : 0)),
          following(following) {}

    __device__ __forceinline__ int clear() const { return BLOCK_N - (state & MASKED); }
    __device__ __forceinline__ bool few() const { return FEW && (state & FEW_OF_THEM) != 0; }  // at most FEW_KEYS keys
    __device__ __forceinline__ bool whole() const { return (state & (MASKED | FEW_OF_THEM)) == 0; }
    __device__ __forceinline__ bool closes() const { return (state & CLOSES) != 0; }
    // Whether it is the last one of which this consumer has rows, and of all.
    __device__ __forceinline__ bool ends(int consumer) const { return (state & (LEAVING << consumer)) != 0; }
    __device__ __forceinline__ bool ends() const { return ends(0); }
    // Of a block at hand: the tile before its own has not been written yet; its keys have not been released yet.
    __device__ __forceinline__ bool unwritten() const { return (state & UNWRITTEN) != 0; }
    __device__ __forceinline__ bool held() const { return (state & HELD) != 0; }
};

// Whether outputs go to memory through the copy engine, a warp's 16 rows at a time: those of a sequence's last tile may be
// another sequence's.
#define OUT_BULK (QUERY_BULK && !SEQUENCES && 16 % HEADS == 0)

#if SOFTCAP
// cap * tanh(scale / cap * x) as an odd polynomial of x, where x^2 < `square`, which is below 0 if there is none; with
// POWERS_OF_2 times log2(e). `softcapped` is right everywhere, but takes two results of the special functions unit.
struct SoftcapPolynomial {
    float square;
    float c[4];  // of x (x^2 - square)^k

    // Below 0 where the polynomial holds.
    __device__ __forceinline__ float distance(float x) const { return fmaf(x, x, -square); }

    // Of x, whose distance is t, plus a bias. `high`: c[3] is not 0.
    template <bool high>
    __device__ __forceinline__ float logit(float x, float t, float bias) const {
        return fmaf(fmaf(fmaf(high ? fmaf(c[3], t, c[2]) : c[2], t, c[1]), t, c[0]), x, bias);
    }
};
#endif

struct ForwardParams {
#if BULK || RUNS
    TensorMap key, value;
#endif
#if QUERY_BULK
    TensorMap query;
#endif
#if OUT_BULK
    TensorMap out;
#endif
    AttentionParams attention;
#if SPLIT
    Parts parts;
#endif
#if SOFTCAP
    SoftcapPolynomial softcap[2];  // the second one of a lower degree, and of fewer products
#endif
};

// Where a tile's output goes to.
struct Output {
    int batch, first_head, first_query, rows;  // as many rows as the tile has
    float* lse;                                // of its first row

    __device__ __forceinline__ Output(const AttentionParams& p, const Tile& t)
        : batch(t.batch), first_head(t.first_head), first_query(t.first_query),
          rows(min(t.end_query - t.first_query, QUERIES) * HEADS),
          lse(p.lse + ((long long)t.batch * p.heads + t.first_head) * p.query_length + t.first_query) {}
};

// A tile and where its keys, what is known of them and its output lie.
struct Plan {
    Tile tile;
    Output output;
    KeySource source;  // KEYS_LISTED: the list's lengths are on their way when the tile has been found
    const ELEMENT *keys, *values;
    const float* bias;
#if SPLIT
    int part;  // the tile's keys are those of this part; negative: all
#endif

    __device__ __forceinline__ Plan(const AttentionParams& p, const Tile& t)
        : tile(t), output(p, t), source(locate_keys(p, t)), keys(p.key + t.batch * p.key_batch + t.group * p.key_head),
          values(p.value + t.batch * p.value_batch + t.group * p.value_head),
          bias(p.bias + t.batch * p.bias_batch + t.group * p.bias_group + t.first_head * p.bias_head) {}
};

struct Shared {
    ELEMENT query[QUERY_STAGES][CHUNKS * BLOCK_M * CHUNK_COLUMNS];  // later the tile's output
    ELEMENT keys[STAGES][CHUNKS * BLOCK_N * CHUNK_COLUMNS];
    ELEMENT values[VALUE_STAGES][CHUNKS * BLOCK_N * CHUNK_COLUMNS];
    float bias[STAGES][BLOCK_N];  // with BIAS_FIRST in units of the products, with POWERS_OF_2 times log2(e)
#if BITS
    unsigned words[STAGES][WORDS][BLOCK_N];
#else
    int start[STAGES][BLOCK_N], stop[STAGES][BLOCK_N];
#endif
#if KEYS_KNOWN
    int key[STAGES][BLOCK_N];  // rows of the block's keys
#endif
#if KEYS != KEYS_CONTIGUOUS
    int listed[LISTS][BLOCK_N];  // the producer's own: rows of the keys of the block at hand, of those around it
#endif
    Order order[STAGES];
    int spoiled;  // whether an output is not finite
    int careful;  // whether values are looked at where not all queries see their keys
    int staying;  // how many consumers have a part in the block's first tile
    Tile tile[QUERY_STAGES];
    Output output[QUERY_STAGES];
    Plan plans[PRODUCER_WARPS][2];  // the producer's own: of the tile at hand and of the next one
    Barrier everybody;  // of all threads, when all tiles have been written
    // `begin_again` goes through all of these, from the first to the last.
    Barrier query_arrived[QUERY_STAGES], query_free[QUERY_STAGES];
    Barrier key_arrived[STAGES], key_free[STAGES], value_arrived[VALUE_STAGES], value_free[VALUE_STAGES];
};

__device__ __forceinline__ int all_sets(const AttentionParams& p) { return p.batch * (p.heads / HEADS); }

// Place of piece `piece` of row `row` in a matrix of `rows` rows.
template <int rows>
__device__ __forceinline__ ELEMENT* piece_of(ELEMENT* matrix, int row, int piece) {
    return matrix + (piece / 8 * rows + row) * CHUNK_COLUMNS + ((piece ^ row) & 7) * 8;
}

// Where key `key` of a block stands in its matrices. Gathered, eight keys that follow each other are one lane's columns of two
// accumulator fragments (2t, 2t + 1, 2t + 8, ...), so that it reads what is known of them in whole vectors.
__device__ __forceinline__ constexpr int row_of_key(int key) {
    return BULK ? key : key / 32 * 32 + key % 8 / 2 * 8 + key / 8 % 4 * 2 + key % 2;
}

// Which key of the block is the (i + k)-th of producer warp `warp`. Of 96 keys it has eight of every 32, for of 24 that follow
// each other its groups of lanes would have rows at changing distances.
__device__ __forceinline__ constexpr int key_of(int warp, int i, int k = 0) {
    return BY_EIGHTS ? (i + k) / 8 * 32 + warp * 8 + (i + k) % 8 : warp * WARP_KEYS + i + k;
}

// Of the eight keys that a lane has of fragments n and n + 1 (n even): which one element i of fragment n + h is.
__device__ __forceinline__ constexpr int own_key(int h, int i) { return 4 * h + i / 4 * 2 + i % 2; }

// Key of the block that the t-th of four lanes has as the k-th of its four columns in fragment n; gathered, the four follow
// each other.
__device__ __forceinline__ constexpr int place_of(int t, int n, int k) {
    return BULK ? 16 * n + 2 * t + k % 2 + k / 2 * 8 : n / 2 * 32 + 8 * t + own_key(n % 2, 0) + k;
}

// Of this lane. Where registers are few it is worked out anew in each block that asks.
__device__ __forceinline__ int place_of(int n, int k) {
    return place_of((HEAD_DIM > 64 && BIAS != BIAS_DENSE ? lane_now() : threadIdx.x) & 3, n, k);
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

    __device__ __forceinline__ Turn next() const {
        Turn turn = *this;
        turn.advance();
        return turn;
    }

    __device__ __forceinline__ int stage_before() const { return stage == 0 ? count - 1 : stage - 1; }
};

#if BIAS == BIAS_DENSE
// The bias of a tile's rows at key 0; rows past the last query have the last one's.
__device__ __forceinline__ const BIAS_ELEMENT* bias_row(const AttentionParams& p, const Tile& t, int row) {
    const long long query = min(t.first_query + row / HEADS, p.query_length - 1);
    return static_cast<const BIAS_ELEMENT*>(p.bias_rows) + t.batch * p.bias_batch + t.group * p.bias_group +
           (t.first_head + row % HEADS) * p.bias_head + query * p.bias_query;
}
#endif
