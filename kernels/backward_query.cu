// Gradient of the queries over gathered keys:
//     p = exp(s - lse), ds = p * (dout . v - delta), dx = ds * (slope of the softcap), dq = scale * sum over j of dx k_j.
//
// dout   // (B, Lq, H, D) ELEMENT, any strides       lse, delta // (B, H, Lq) f32
// dquery // (B, Lq, H, D) ELEMENT, contiguous
//
// The same tiles and the same way through the keys as forward.cu, with three products a block instead of two. Probabilities
// come from lse, so no softmax state is kept. dx is rounded to 16 bit before its product.
//
// Prelude: ELEMENT, HEAD_DIM, VECTOR, HEADS, BLOCK_M, BLOCK_N, WARPS, MIN_BLOCKS, KEYS, CAUSAL, BIAS, SOFTCAP,
// SEQUENCES, PAGE_SIZE (0).
#include "arch.cuh"
#include "gather.cuh"

struct Shared {
    ELEMENT query[BLOCK_M * ROW_STRIDE];  // later the tile's dquery
    ELEMENT dout[BLOCK_M * ROW_STRIDE];
    KeyTiles keys;
};

// lse (log 2 units, +inf for a row that sees nothing) and delta of this lane's rows.
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
            lse[m][r] = x == -infinity() ? infinity() : x * LOG2_E;
            delta[m][r] = exists ? p.delta[head * p.query_length + query] : 0.0f;
        }
}

// s becomes dx from the products s = q . k and dp = dout . v.
__device__ __forceinline__ void logit_gradients(Accumulator (&s)[WARP_ROWS][KEY_FRAGMENTS],
                                                const Accumulator (&dp)[WARP_ROWS][KEY_FRAGMENTS],
                                                const float* bias_row, const LogitScale& logit,
                                                const float (&lse)[WARP_ROWS][2], const float (&delta)[WARP_ROWS][2]) {
#pragma unroll
    for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int column = 16 * n + 2 * (threadIdx.x & 3) + fragment_column(i), r = fragment_row(i);
            const float bias = BIAS ? bias_row[column] * LOG2_E : 0.0f;
#pragma unroll
            for (int m = 0; m < WARP_ROWS; ++m) {
                const float x = s[m][n].x[i], probability = exp2_fast(logit(x, bias) - lse[m][r]);
                s[m][n].x[i] = probability * (dp[m][n].x[i] - delta[m][r]) * logit.slope(x);
            }
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) backward_query(const AttentionParams p) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
    const Tile t = find_tile(p);
    if (!t.exists()) return;
    const int first_row = threadIdx.x / 32 * WARP_ROWS * 16;  // of this warp

    KeyBlocks blocks(find_keys(p, t), t.first_position, t.last_position);
    KeyBlock current = blocks.next(), following = blocks.next();
    fetch_indices(shared.keys, blocks, current, 0);
    fetch_indices(shared.keys, blocks, following, 1);
    load_rows(shared.query, p.query, p.query_batch, p.query_row, p.query_head, p, t);
    load_rows(shared.dout, p.dout, p.dout_batch, p.dout_row, p.dout_head, p, t);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();  // the tile's rows and the first two blocks' indices are in place

    const KeyGather gather(shared.keys, p, t, blocks);
    gather(current, 0, 0);
    copy_async_commit();

    int position[WARP_ROWS][2];
    float lse[WARP_ROWS][2], delta[WARP_ROWS][2];
    row_positions(position, t, first_row);
    load_statistics(lse, delta, p, t, first_row);
    const LogitScale logit(p.scale, p.softcap);
    Accumulator dq[WARP_ROWS][DIM_FRAGMENTS];
#pragma unroll
    for (int m = 0; m < WARP_ROWS; ++m)
#pragma unroll
        for (int d = 0; d < DIM_FRAGMENTS; ++d) clear(dq[m][d]);

    for (int slot = 0, stage = 0; current.first >= 0; stage ^= 1) {
        const KeyBlock after = blocks.next();
        const int next_slot = slot == 2 ? 0 : slot + 1, after_slot = next_slot == 2 ? 0 : next_slot + 1;
        copy_async_wait<0>();
        __syncthreads();  // this block's rows and the next one's indices are in place; nobody reads the other stage
        gather(following, next_slot, stage ^ 1);
        fetch_indices(shared.keys, blocks, after, after_slot);
        copy_async_commit();

        Accumulator s[WARP_ROWS][KEY_FRAGMENTS], dp[WARP_ROWS][KEY_FRAGMENTS];
        products(s, shared.query + first_row * ROW_STRIDE, shared.keys.key[stage]);
        products(dp, shared.dout + first_row * ROW_STRIDE, shared.keys.value[stage]);
        logit_gradients(s, dp, shared.keys.bias[stage], logit, lse, delta);
        if (current.masked) apply_mask(s, shared.keys, stage, slot, position, 0.0f);
        // The barrier also tells whether any thread found a key that is not finite.
        if (current.masked && __syncthreads_or(!block_is_finite(shared.keys.key[stage])))
            isolate_nonfinite(dq, shared.keys.key[stage], shared.keys, stage, slot, position);
        accumulate(dq, s, shared.keys.key[stage]);
        current = following;
        following = after;
        slot = next_slot;
    }
    float factor[WARP_ROWS][2];
#pragma unroll
    for (int m = 0; m < WARP_ROWS; ++m) factor[m][0] = factor[m][1] = p.scale;
    write_rows(p.dquery, shared.query, p, t, first_row, dq, factor);
}
