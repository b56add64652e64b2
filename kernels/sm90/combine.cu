// Combines the splits of tiles of queries whose keys were split (sm90/split_kv.cuh): with lse_i the log-sum-exp of
// split i,
//
//     lse = log sum_i exp(lse_i),   out = sum_i exp(lse_i - lse) o_i
//
// for the rows of those tiles. Splits are added in order, so every run gives the same bits. If a row sees none of a
// split's keys, lse_i is -inf and the split has no weight. Each lse_i is a sum of two numbers, and the second matters
// even if the first is huge: firsts and seconds are subtracted separately.
//
// partial // (split tiles, splits, BLOCK_M, HEAD_DIM) f32, 16-byte aligned
// partial_lse // (split tiles, splits, BLOCK_M, 2) f32
// out     // (B, Lq, H, D) ELEMENT, contiguous       lse // (B, H, Lq) f32
// LANES lanes share a row, and a block has ROWS rows of one tile. Rows of other tiles are not touched.
//
// Prelude: ELEMENT (16 bit), HEAD_DIM (a multiple of 8), HEADS (query heads of a GQA group in one tile), BLOCK_M.
#include "sm90/split_kv.cuh"

struct CombineParams {
    const float* partial;
    const float2* partial_lse;
    ELEMENT* out;
    float* lse;
    int num_splits;  // of a tile
    int first;  // index of the first split tile in the order of the schedule
    int batch, query_length, heads;
    int tiles, tail_tiles;  // as in AttentionParams
};

constexpr int THREADS = 256;
constexpr int PIECES = HEAD_DIM / 4;  // of a row: four elements each
constexpr int LANES = PIECES <= 4 ? 4 : PIECES <= 8 ? 8 : PIECES <= 16 ? 16 : 32;
constexpr int OWN = (PIECES + LANES - 1) / LANES;  // pieces of a lane
constexpr int ROWS = THREADS / LANES;
constexpr int TOGETHER = 4;  // splits whose loads are in flight at a time
// Smallest weight of a split that has a key seen by the row: with a weight of 0 an infinite output would become NaN.
constexpr float LEAST = 1.175494351e-38f;
static_assert(BLOCK_M % ROWS == 0 && HEAD_DIM % 8 == 0, "a block has rows of one tile, and pieces are full");

extern "C" __global__ void __launch_bounds__(THREADS) combine_splits(const CombineParams p) {
    wait_for_earlier_kernels();
    constexpr int QUERIES = BLOCK_M / HEADS;
    const int first = blockIdx.x * ROWS, split_tile = first / BLOCK_M;
    const int row = first % BLOCK_M + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int sets = p.heads / HEADS;
    const TileIndex tile = tile_at(p.first + split_tile, p.batch * sets, p.tiles, p.tail_tiles);
    const int batch = tile.set / sets, head = tile.set % sets * HEADS + row % HEADS;
    const int query = (p.tiles - 1 - tile.index) * QUERIES + row / HEADS;
    if (row >= QUERIES * HEADS || query >= p.query_length) return;

    const float2* lse = p.partial_lse + row_of_split(split_tile * p.num_splits, row);
    const auto lse_of = [&](int split) { return lse[min(split, p.num_splits - 1) * BLOCK_M]; };
    float2 highest = make_float2(0.0f, -infinity());
#pragma unroll 1
    for (int begin = 0; begin < p.num_splits; begin += TOGETHER) {
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const float2 other = lse_of(begin + i);
            if (other.x + other.y > highest.x + highest.y) highest = other;
        }
    }

    const float* partial = p.partial + row_of_split(split_tile * p.num_splits, row) * HEAD_DIM;
    float o[OWN][4] = {}, sum = 0.0f;
#pragma unroll 1
    for (int begin = 0; begin < p.num_splits; begin += TOGETHER) {
        float2 own[TOGETHER];
        uint4 x[TOGETHER][OWN];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            own[i] = lse_of(begin + i);
#pragma unroll
            for (int k = 0; k < OWN; ++k) {
                const int piece = lane + k * LANES;
                x[i][k] = load_16(partial + (begin + i) * BLOCK_M * HEAD_DIM + 4 * piece,
                                  begin + i < p.num_splits && (PIECES % LANES == 0 || piece < PIECES));
            }
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            if (begin + i >= p.num_splits || own[i].y == -infinity()) continue;
            float weight = exp2_fast((own[i].x - highest.x + (own[i].y - highest.y)) * LOG2_E);
            if (weight < LEAST) weight = LEAST;  // NaN remains
            sum += weight;
#pragma unroll
            for (int k = 0; k < OWN; ++k) {
                const unsigned words[4] = {x[i][k].x, x[i][k].y, x[i][k].z, x[i][k].w};
#pragma unroll
                for (int n = 0; n < 4; ++n) o[k][n] = fmaf(weight, __uint_as_float(words[n]), o[k][n]);
            }
        }
    }
    const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
    ELEMENT* out = p.out + (((long long)batch * p.query_length + query) * p.heads + head) * HEAD_DIM;
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
        const int piece = lane + k * LANES;
        if (piece < PIECES)
            reinterpret_cast<uint2*>(out)[piece] = make_uint2(pack_pair(o[k][0] * factor, o[k][1] * factor),
                                                              pack_pair(o[k][2] * factor, o[k][3] * factor));
    }
    if (lane == 0) p.lse[((long long)batch * p.heads + head) * p.query_length + query] = highest.x + (highest.y + logf(sum));
}
