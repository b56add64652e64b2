// Adds up tiles of queries whose keys were split up into parts: with lse_i the logarithm of part i's sum of exponentials,
//
//     lse = log sum_i exp(lse_i),   out = sum_i exp(lse_i - lse) o_i
//
// for the rows of the tiles that sm90/parts.cuh describes. Parts are added in their order, so every run has the same bits. A row
// that sees nothing in a part has lse_i = -inf there, and the part does not count.
//
// partial // (split tiles, parts, BLOCK_M, HEAD_DIM) f32, on 16 bytes   partial_lse // (split tiles, parts, BLOCK_M) f32
// out     // (B, Lq, H, D) ELEMENT, contiguous                          lse         // (B, H, Lq) f32
// LANES lanes have a row, a block has ROWS rows of one tile. Rows of other tiles are left alone.
//
// Prelude: ELEMENT (16 bit), HEAD_DIM (a multiple of 8), HEADS (of a group in one tile), BLOCK_M.
#include "sm90/parts.cuh"

struct CombineParams {
    const float* partial;
    const float* partial_lse;
    ELEMENT* out;
    float* lse;
    int parts;  // of a tile
    int first;  // of the tiles that are split up, in the order in which tiles are dealt out
    int batch, query_length, heads;
    int tiles, shorter;  // as in AttentionParams
};

constexpr int THREADS = 256;
constexpr int PIECES = HEAD_DIM / 4;  // of a row: four numbers each
constexpr int LANES = PIECES <= 4 ? 4 : PIECES <= 8 ? 8 : PIECES <= 16 ? 16 : 32;
constexpr int OWN = (PIECES + LANES - 1) / LANES;  // pieces of a lane
constexpr int ROWS = THREADS / LANES;
constexpr float LEAST = 1.175494351e-38f;  // weight of a part that counts, so that infinite outputs do not become NaN
static_assert(BLOCK_M % ROWS == 0 && HEAD_DIM % 8 == 0, "a block's rows are of one tile, and pieces are whole");

extern "C" __global__ void __launch_bounds__(THREADS) combine_parts(const CombineParams p) {
    constexpr int QUERIES = BLOCK_M / HEADS;
    const int first = blockIdx.x * ROWS, number = first / BLOCK_M;
    const int row = first % BLOCK_M + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int sets = p.heads / HEADS;
    const Dealt tile = dealt(p.first + number, p.batch * sets, p.tiles, p.shorter);
    const int batch = tile.set / sets, head = tile.set % sets * HEADS + row % HEADS;
    const int query = (p.tiles - 1 - tile.place) * QUERIES + row / HEADS;
    if (row >= QUERIES * HEADS || query >= p.query_length) return;

    const float* lse = p.partial_lse + row_of_part(number * p.parts, row);
    float highest = -infinity();
#pragma unroll 8
    for (int i = 0; i < p.parts; ++i) highest = fmaxf(highest, lse[i * BLOCK_M]);

    const float4* partial = reinterpret_cast<const float4*>(p.partial + row_of_part(number * p.parts, row) * HEAD_DIM);
    float4 o[OWN] = {};
    float sum = 0.0f;
#pragma unroll 4
    for (int i = 0; i < p.parts; ++i) {
        const float own = lse[i * BLOCK_M];
        float4 x[OWN];
#pragma unroll
        for (int k = 0; k < OWN; ++k) x[k] = partial[(long long)i * BLOCK_M * PIECES + min(lane + k * LANES, PIECES - 1)];
        if (own == -infinity()) continue;
        float weight = exp2_fast((own - highest) * LOG2_E);
        if (weight < LEAST) weight = LEAST;  // NaN remains
        sum += weight;
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            o[k].x = fmaf(weight, x[k].x, o[k].x);
            o[k].y = fmaf(weight, x[k].y, o[k].y);
            o[k].z = fmaf(weight, x[k].z, o[k].z);
            o[k].w = fmaf(weight, x[k].w, o[k].w);
        }
    }
    const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
    ELEMENT* out = p.out + (((long long)batch * p.query_length + query) * p.heads + head) * HEAD_DIM;
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
        const int piece = lane + k * LANES;
        if (piece < PIECES)
            reinterpret_cast<uint2*>(out)[piece] = make_uint2(pack_pair(o[k].x * factor, o[k].y * factor),
                                                              pack_pair(o[k].z * factor, o[k].w * factor));
    }
    if (lane == 0) p.lse[((long long)batch * p.heads + head) * p.query_length + query] = highest + logf(sum);
}
