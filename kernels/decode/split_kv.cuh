// A few rows of queries against some keys, by warps that share only the query until the end: for decoding, where the
// queries are too few to fill a GPU with tiles, and keys and values are read once.
//
// A tile has ROWS <= 16 rows (queries times heads of one GQA group). A warp takes STEP = 16 keys at a time: it loads
// their rows straight into the registers of the tensor cores' operands, 16 bytes (a piece) per lane and load, and keeps
// logits, softmax state and output in registers. With g = lane / 4, t = lane % 4 a lane holds
//     of keys     keys g and g + 8, pieces t, t + 4, ...: B of  s = q . k^T     (rows by keys)
//     of values   keys 2t, 2t + 1, 2t + 8, 2t + 9, pieces g, g + 8, ...: A of  o^T = v^T . p^T     (dims by rows)
//     of s        rows g and g + 8, keys 2t, 2t + 1 and these + 8: B of the second MMA as they stand
//     of o        rows 2t and 2t + 1 (and + 8), two dims of each of its value pieces
// The order of summation within an MMA does not matter. So query and key use an order of dims in which a piece is two
// steps of an operand, and p and values a matching order of keys. 16-bit elements are multiplied by mma m16n8k16,
// float32 by m16n8k8 as TF32.
//
// Warps leave outputs, maxima and sums in shared memory, blocks in global memory: `combine` adds them in order, so the
// result does not depend on which finished first.
//
// With STORAGE, keys and values are 8-bit rows, which become operands where they are used; a piece has as
// many numbers as one of ELEMENT.
//
// Prelude: ELEMENT, HEAD_DIM, VALUE_DIM, VECTOR (rows may be read a piece at a time), ROWS, WARPS, SOFTCAP; STORAGE (as in
// decode/quantized_rows.cuh, or none).
#pragma once
#include "common/arch.cuh"
#include "common/softmax.cuh"
#include "decode/pieces.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int STEP = 16;
constexpr int KEY_CHUNKS = (HEAD_DIM + 4 * PIECE - 1) / (4 * PIECE);     // loads of the lanes that share a key
constexpr int VALUE_CHUNKS = (VALUE_DIM + 8 * PIECE - 1) / (8 * PIECE);  // loads of the lanes that share a value
constexpr int ROW_TILES = ROWS > 8 ? 2 : 1;
constexpr int VALUE_TILES = VALUE_CHUNKS * PIECE / 2;  // of 16 dims
constexpr bool TOGETHER = 2 * KEY_CHUNKS + 4 * VALUE_CHUNKS <= 16;  // values are loaded before the QK MMA
static_assert(ROWS <= 16, "a tile is one operand high");

struct Keys {
    Stored piece[2][KEY_CHUNKS];
    float scale[2];  // with STORAGE
};

struct Values {
    Stored piece[VALUE_CHUNKS][4];
    float scale[4];  // with STORAGE
};

struct Logits {
    float x[8];  // of an accumulator of 16x16: common/arch.cuh
};

// q . k as two sums. They are added when they are needed, after the next loads have been issued.
struct Products {
    float sum[2][8];

    __device__ __forceinline__ float operator[](int i) const { return sum[0][i] + sum[1][ROW_TILES == 2 ? i : i | 2]; }
};

// The softmax state of a warp, then of a split: its outputs are not divided by l yet, and in units of 2^m.
struct SplitState {
    float m, l;
};

struct SplitShared {
    Piece query[KEY_CHUNKS][ROW_TILES][32];  // A operands, by lane: score_keys
    float o[WARPS][ROWS][VALUE_DIM];
    SplitState state[WARPS][ROWS];
    float sum[ROWS];
};

// Element `i` of a word, as an operand.
template <typename T>
__device__ __forceinline__ float element_of(unsigned word, int i, const T* type) {
    return half_of(word, i, type);
}
__device__ __forceinline__ float element_of(unsigned word, int, const float*) {
    return round_tf32(__uint_as_float(word));
}

// The word with zeros in place of elements that are not finite.
__device__ __forceinline__ unsigned finite_word(unsigned word) {
    unsigned kept = 0;
    constexpr int PER_WORD = 4 / sizeof(ELEMENT);
#pragma unroll
    for (int i = 0; i < PER_WORD; ++i)
        if (isfinite(element_of(word, i, TYPE))) kept |= (PER_WORD == 1 ? ~0u : 0xffffu) << 16 * i;
    return word & kept;
}

// ---- MMA ----
__device__ __forceinline__ void multiply_words(float* c, const unsigned (&a)[4], const unsigned (&b)[2], const float*) {
    const float left[4] = {__uint_as_float(a[0]), __uint_as_float(a[1]), __uint_as_float(a[2]), __uint_as_float(a[3])};
    const float right[2] = {__uint_as_float(b[0]), __uint_as_float(b[1])};
    multiply_add_tf32(c, left, right);
}
template <typename T>
__device__ __forceinline__ void multiply_words(float* c, const unsigned (&a)[4], const unsigned (&b)[2], const T* type) {
    multiply_add_half(c, a, b, type);
}

// A word as an operand: floats are rounded to TF32.
__device__ __forceinline__ unsigned operand_word(unsigned x, const float*) {
    return __float_as_uint(round_tf32(__uint_as_float(x)));
}
template <typename T>
__device__ __forceinline__ unsigned operand_word(unsigned x, const T*) {
    return x;
}

// The tile's query rows on their way to shared memory: loaded first, so that other loads can be issued before they
// arrive.
struct Query {
    static constexpr int PIECES = KEY_CHUNKS * ROW_TILES * 32, OWN = (PIECES + THREADS - 1) / THREADS;
    Piece piece[OWN];

    // row_of(row) is the address of a row.
    template <typename RowOf>
    __device__ __forceinline__ Query(int rows, const RowOf& row_of) {
#pragma unroll
        for (int n = 0; n < OWN; ++n) {
            const int i = threadIdx.x + n * THREADS, chunk = i / 32 / ROW_TILES, row = row_at(i);
            const bool exists = i < PIECES && row < rows;
            piece[n] = load_piece<HEAD_DIM>(row_of(exists ? row : 0), 4 * chunk + i % 4, exists);
        }
    }

    // Complete after the next barrier.
    __device__ __forceinline__ void store(SplitShared& shared) const {
#pragma unroll
        for (int n = 0; n < OWN; ++n) {
            const int i = threadIdx.x + n * THREADS;
            if (i >= PIECES) continue;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int step = ROW_TILES == 2 ? k / 2 : 0, half = ROW_TILES == 2 ? i / 32 % 2 : k / 2;
                shared.query[i / 32 / ROW_TILES][step][i % 32].word[k % 2 * 2 + half] = operand_word(piece[n].word[k], TYPE);
            }
        }
    }

private:
    __device__ __forceinline__ static int row_at(int i) { return i % 32 / 4 + 8 * (i / 32 % ROW_TILES); }
};

// Rows of 16 keys: row_of(key of the step) is the address of a row. Loads are unconditional: otherwise the compiler
// makes them wait for each other to merge their results with zeros. An unwanted key is replaced by a wanted row and
// cancelled later: its logit is -inf, and `only_seen` clears its value.
template <typename RowOf>
__device__ __forceinline__ void load_keys(Keys& keys, const RowOf& row_of) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const Row* row = row_of(8 * n + lane / 4);
#pragma unroll
        for (int c = 0; c < KEY_CHUNKS; ++c) keys.piece[n][c] = load_row<HEAD_DIM>(row, 4 * c + lane % 4, true);
    }
}

// The key of the step that value piece k of this lane belongs to.
__device__ __forceinline__ int value_key(int k) { return 2 * (threadIdx.x & 3) + (k & 1) + 8 * (k >> 1); }

template <typename RowOf>
__device__ __forceinline__ void load_values(Values& values, const RowOf& row_of) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const Row* row = row_of(value_key(k));
#pragma unroll
        for (int c = 0; c < VALUE_CHUNKS; ++c) values.piece[c][k] = load_row<VALUE_DIM>(row, 8 * c + lane / 4, true);
    }
}

// With STORAGE, the scales of the rows of a step: scale_of(key of the step).
template <typename ScaleOf>
__device__ __forceinline__ void load_scales(Keys& keys, const ScaleOf& scale_of) {
#pragma unroll
    for (int n = 0; n < 2; ++n) keys.scale[n] = STORAGE ? scale_of(8 * n + (threadIdx.x & 31) / 4) : 1.0f;
}
template <typename ScaleOf>
__device__ __forceinline__ void load_scales(Values& values, const ScaleOf& scale_of) {
#pragma unroll
    for (int k = 0; k < 4; ++k) values.scale[k] = STORAGE ? scale_of(value_key(k)) : 1.0f;
}

// The key of a step to read in place of key `i`: itself if it is `wanted`, else the first wanted one (key 0 if none
// is).
__device__ __forceinline__ int key_to_read(int i, unsigned wanted) {
    return wanted >> i & 1 ? i : max(__ffs(static_cast<int>(wanted)), 1) - 1;
}

// Clears the values of keys that no query sees: a probability of 0 would turn an infinity into NaN.
__device__ __forceinline__ void only_seen(Values& values, unsigned seen) {
    if (seen == (1u << STEP) - 1) return;
#pragma unroll
    for (int k = 0; k < 4; ++k)
        if (!(seen >> value_key(k) & 1)) {
            if (STORAGE) values.scale[k] = 0.0f;
#pragma unroll
            for (int c = 0; c < VALUE_CHUNKS; ++c) values.piece[c][k] = {};
        }
}

// q . k^T, one sum of words 0 and 1 of all pieces and one of words 2 and 3. With one tile of rows an operand has both
// pairs of its piece, as rows g and g + 8: of the first product row g is used, of the second row g + 8. With two tiles
// rows g and g + 8 are the same pair of both. So a row's sums are the same in both cases, and no register is moved.
__device__ __forceinline__ void score_keys(Products& products, const SplitShared& shared, const Keys& keys) {
    const int lane = threadIdx.x & 31;
    products = {};
#pragma unroll
    for (int c = 0; c < KEY_CHUNKS; ++c) {
        const Piece key[2] = {piece_of(keys.piece[0][c], keys.scale[0]), piece_of(keys.piece[1][c], keys.scale[1])};
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const Piece query = shared.query[c][ROW_TILES == 2 ? step : 0][lane];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const unsigned b[2] = {operand_word(key[n].word[2 * step], TYPE),
                                       operand_word(key[n].word[2 * step + 1], TYPE)};
                multiply_words(products.sum[step] + 4 * n, query.word, b, TYPE);
            }
        }
    }
}

// Rows of a tile.
struct AllRows {
    static constexpr bool all = true;
};
struct RowRange {
    static constexpr bool all = false;
    int begin, end;

    __device__ __forceinline__ bool has(int row) const { return begin <= row && row < end; }
};

// The keys that a warp has seen so far.
struct WarpState {
    float o[VALUE_TILES][ROW_TILES][4];
    RowState rows;

    __device__ __forceinline__ WarpState() {
#pragma unroll
        for (int d = 0; d < VALUE_TILES; ++d)
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                for (int i = 0; i < 4; ++i) o[d][r][i] = 0.0f;
    }

    // Logits (-inf: not seen) become probabilities; earlier outputs are rescaled to the new maxima.
    __device__ __forceinline__ void online_softmax(Logits& s) {
        float rescale[2];
        Logits (&tile)[1] = reinterpret_cast<Logits (&)[1]>(s);
        rows.update<ROW_TILES>(tile, rescale);
        if (!__any_sync(ALL_LANES, rescale[0] != 1.0f || rescale[ROW_TILES - 1] != 1.0f)) return;
        const int t = threadIdx.x & 3;
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
            const float first = __shfl_sync(ALL_LANES, rescale[r], 8 * t);  // of row 2t: lane 4 * 2t
            const float second = __shfl_sync(ALL_LANES, rescale[r], 8 * t + 4);
#pragma unroll
            for (int d = 0; d < VALUE_TILES; ++d)
#pragma unroll
                for (int i = 0; i < 4; ++i) o[d][r][i] *= i & 1 ? second : first;
        }
    }

    // o^T += v^T . p^T, of some rows
    template <typename Rows = AllRows>
    __device__ __forceinline__ void add(const Logits& p, const Values& values, const Rows& rows = {}) {
        if constexpr (sizeof(ELEMENT) == 4) {
#pragma unroll
            for (int n = 0; n < 2; ++n)  // 8 keys each: 2t is k = t of the operands, 2t + 1 is k = t + 4
#pragma unroll
                for (int c = 0; c < VALUE_CHUNKS; ++c) {
                    const Piece even = piece_of(values.piece[c][2 * n], values.scale[2 * n]);
                    const Piece odd = piece_of(values.piece[c][2 * n + 1], values.scale[2 * n + 1]);
#pragma unroll
                    for (int i = 0; i < PIECE / 2; ++i) {
                        const unsigned a[4] = {
                            operand_word(even.word[2 * i], TYPE), operand_word(even.word[2 * i + 1], TYPE),
                            operand_word(odd.word[2 * i], TYPE), operand_word(odd.word[2 * i + 1], TYPE)};
#pragma unroll
                        for (int r = 0; r < ROW_TILES; ++r) {
                            const unsigned b[2] = {operand_word(__float_as_uint(p.x[4 * n + 2 * r]), TYPE),
                                                   operand_word(__float_as_uint(p.x[4 * n + 2 * r + 1]), TYPE)};
                            multiply_rows(o[c * (PIECE / 2) + i][r], a, b, r, rows);
                        }
                    }
                }
        } else {
            unsigned b[ROW_TILES][2];
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    ELEMENT first, second;
                    from_float(first, p.x[4 * n + 2 * r]);
                    from_float(second, p.x[4 * n + 2 * r + 1]);
                    b[r][n] = bits_of(first) | bits_of(second) << 16;
                }
#pragma unroll
            for (int c = 0; c < VALUE_CHUNKS; ++c) {
                const auto pair = [&](int k, int i) {  // an operand's word is one dim of two keys
                    return column_pair(values.piece[c][k], values.piece[c][k + 1], i, values.scale[k], values.scale[k + 1],
                                       TYPE);
                };
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const unsigned a[4] = {pair(0, 2 * i), pair(0, 2 * i + 1), pair(2, 2 * i), pair(2, 2 * i + 1)};
#pragma unroll
                    for (int r = 0; r < ROW_TILES; ++r) multiply_rows(o[c * (PIECE / 2) + i][r], a, b[r], r, rows);
                }
            }
        }
    }

    template <typename Rows>
    __device__ __forceinline__ static void multiply_rows(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                                         int r, const Rows& rows) {
        if constexpr (Rows::all) {
            multiply_words(c, a, b, TYPE);
        } else {
            float sum[4] = {c[0], c[1], c[2], c[3]};
            multiply_words(sum, a, b, TYPE);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (rows.has(row_at(r, i))) c[i] = sum[i];
        }
    }

    // Row (of the tile) and dim of o[d][r][i].
    __device__ __forceinline__ static int row_at(int r, int i) { return 8 * r + 2 * (threadIdx.x & 3) + (i & 1); }
    __device__ __forceinline__ static int dim_at(int d, int i) {
        constexpr int EACH = PIECE / 2;
        return (d / EACH * 8 + (threadIdx.x & 31) / 4) * PIECE + d % EACH * 2 + (i >> 1);
    }

    // Stores this warp's results to shared memory; visible after the next barrier.
    __device__ __forceinline__ void leave(SplitShared& shared) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
        rows.finish();
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
            if (lane % 4 == 0 && lane / 4 + 8 * r < ROWS) shared.state[warp][lane / 4 + 8 * r] = {rows.m[r], rows.l[r]};
#pragma unroll
            for (int d = 0; d < VALUE_TILES; ++d)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (row_at(r, i) < ROWS && dim_at(d, i) < VALUE_DIM)
                        shared.o[warp][row_at(r, i)][dim_at(d, i)] = o[d][r][i];
        }
    }
};

// ---- combining splits ----
constexpr int MAX_SPLITS = 512;
constexpr int VECTOR_WIDTH = VALUE_DIM % 4 == 0 ? 4 : 1;

struct alignas(4 * VECTOR_WIDTH) Vector {
    float x[VECTOR_WIDTH];
};

// Combines `count` splits: o (count, ROWS, VALUE_DIM) and state (count, ROWS), in global memory (`far`) or in shared
// memory (at most 32). `weights` has room for ROWS * count floats. Calls write_state(row, state) once per row and
// write(row, dim, o, l) once per element, in any thread. All threads of the block call it; `o` and `state` must be
// complete; if `far`, shared.o is overwritten. Loads are issued many at a time, because each batch costs a latency.
// Sums are in the order of a tile with `heads` rows.
template <bool far, int heads = ROWS, typename WriteState, typename Write>
__device__ __forceinline__ void combine(const float* o, const SplitState* state, int count, float* weights,
                                        SplitShared& shared, int rows, const WriteState& write_state,
                                        const Write& write) {
    // A thread adds VECTOR_WIDTH neighbouring elements of every SLICES-th split.
    constexpr int PER_ROW = VALUE_DIM / VECTOR_WIDTH, GROUPS = ROWS * PER_ROW;
    constexpr int FIT = THREADS / (heads * PER_ROW), MANY = FIT < WARPS ? FIT : WARPS;
    constexpr int SLICES = far && MANY > 1 ? MANY : 1;
    constexpr int BATCH = MIN_BLOCKS > 3 ? 4 : far && SLICES == 1 ? 16 : 8;  // in flight, as registers allow
    const auto row_of = [](int i) { return i % GROUPS / PER_ROW; };
    Vector own[BATCH];
    const auto load = [&](int i, int split) {
        const Vector* first = reinterpret_cast<const Vector*>(o) + i % GROUPS;
#pragma unroll
        for (int k = 0; k < BATCH; ++k)
            own[k] = split + k * SLICES < count ? first[(split + k * SLICES) * GROUPS] : Vector{};
    };
    // In flight together with the states.
    if (threadIdx.x < GROUPS * SLICES && row_of(threadIdx.x) < rows) load(threadIdx.x, threadIdx.x / GROUPS);

    const int lane = threadIdx.x & 31;
    for (int row = threadIdx.x / 32; row < rows; row += WARPS) {
        constexpr int EACH = far ? MAX_SPLITS / 32 : 1;
        SplitState split[EACH];
        float m = -infinity(), l = 0.0f;
#pragma unroll
        for (int k = 0; k < EACH; ++k)
            split[k] = lane + 32 * k < count ? state[(lane + 32 * k) * ROWS + row] : SplitState{-infinity(), 0.0f};
#pragma unroll
        for (int k = 0; k < EACH; ++k) m = fmaxf(m, split[k].m);
#pragma unroll
        for (int distance = 16; distance > 0; distance >>= 1) m = fmaxf(m, __shfl_xor_sync(ALL_LANES, m, distance));
        const float finite_max = m == -infinity() ? 0.0f : m;  // nothing seen: all weights are 2^-inf
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const float weight = exp2_fast(split[k].m - finite_max);
            if (lane + 32 * k < count) weights[row * count + lane + 32 * k] = weight;
            l = fmaf(weight, split[k].l, l);
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance >>= 1) l += __shfl_xor_sync(ALL_LANES, l, distance);
        if (lane == 0) {
            shared.sum[row] = l;
            write_state(row, SplitState{m, l});
        }
    }
    __syncthreads();  // weights and sums are complete

#pragma unroll 1
    for (int i = threadIdx.x; i < GROUPS * SLICES; i += THREADS) {
        const int row = row_of(i), slice = i / GROUPS;
        if (row >= rows) continue;
        Vector sum = {};
#pragma unroll 1
        for (int split = slice; split < count; split += BATCH * SLICES) {
            if (i >= THREADS || split > slice) load(i, split);
#pragma unroll
            for (int k = 0; k < BATCH; ++k) {
                const float weight = split + k * SLICES < count ? weights[row * count + split + k * SLICES] : 0.0f;
#pragma unroll
                for (int x = 0; x < VECTOR_WIDTH; ++x) sum.x[x] = fmaf(weight, own[k].x[x], sum.x[x]);
            }
        }
        if (SLICES > 1) {
            reinterpret_cast<Vector*>(shared.o)[i] = sum;
        } else {
#pragma unroll
            for (int x = 0; x < VECTOR_WIDTH; ++x)
                write(row, i % PER_ROW * VECTOR_WIDTH + x, sum.x[x], shared.sum[row]);
        }
    }
    if (SLICES == 1) return;
    __syncthreads();  // all slices are there
    const float* of_slices = &shared.o[0][0][0];
    for (int i = threadIdx.x; i < rows * VALUE_DIM; i += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) sum += of_slices[slice * ROWS * VALUE_DIM + i];
        write(i / VALUE_DIM, i % VALUE_DIM, sum, shared.sum[i / VALUE_DIM]);
    }
}

__device__ __forceinline__ float natural_lse(const SplitState& s) { return natural_lse(s.m, s.l); }
