// Gradient of the queries over gathered keys:
//     p = exp(s - lse), ds = p * (dout . v - delta), dx = ds * (slope of the softcap), dq = scale * sum over j of dx k_j.
//
// dout   // (B, Lq, H, D) ELEMENT, any strides       lse, delta // (B, H, Lq) f32
// dquery // (B, Lq, H, D) ELEMENT, contiguous
// dbias  // (B, H, Lq, Lk) BIAS_ELEMENT, with DBIAS: ds of the keys that the tile visits, each pair has one writer; all
//           others must be 0 before
//
// The same tiles and the same order of keys as sm80/forward.cu, with three MMAs per block instead of two. Probabilities
// come from lse, so no softmax state is kept. dx is rounded to the operand's type before its MMA.
//
// Prelude: that of sm80/gather.cuh (PAGE_SIZE 0), MIN_BLOCKS, DBIAS (with BIAS_DENSE of all batch entries, heads,
// queries and keys).
#include "common/arch.cuh"
#include "sm80/gather.cuh"

struct Shared {
    ELEMENT query[BLOCK_M * ROW_STRIDE];  // later the tile's dquery
    ELEMENT dout[BLOCK_M * ROW_STRIDE];
    KeyTiles keys;
};

// From s = q . k and dp = dout . v: s becomes dx and, with DBIAS, dp becomes ds.
__device__ __forceinline__ void logit_gradients(Accumulator (&s)[WARP_ROWS][KEY_FRAGMENTS],
                                                Accumulator (&dp)[WARP_ROWS][KEY_FRAGMENTS],
                                                const KeyTiles& shared, int stage, const LogitScale& logit,
                                                const float (&lse)[WARP_ROWS][2], const float (&delta)[WARP_ROWS][2],
                                                const Tile& t) {
#if BIAS == BIAS_DENSE
    const int first_row = threadIdx.x / 32 * WARP_ROWS * 16 + (threadIdx.x & 31) / 4;
#pragma unroll
    for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
        for (int i = 0; i < 8; i += 2)
#pragma unroll
            for (int m = 0; m < WARP_ROWS; ++m) {
                const int r = fragment_row(i);
                const float2 bias = bias_pair(shared.bias_rows[stage], (first_row + 16 * m + 8 * r) / HEADS,
                                              16 * n + 2 * (threadIdx.x & 3) + fragment_column(i));
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const float x = s[m][n].x[i + k];
                    const float probability = exp2_fast(logit(x, k == 0 ? bias.x : bias.y) - lse[m][r]);
                    const float ds = probability == 0.0f ? 0.0f : probability * (dp[m][n].x[i + k] - delta[m][r]);
                    if (DBIAS) dp[m][n].x[i + k] = ds;
                    s[m][n].x[i + k] = ds * logit.slope(x);
                }
            }
#else
    const BlockBiases bias(shared, stage, t);
#pragma unroll
    for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int column = 16 * n + 2 * (threadIdx.x & 3) + fragment_column(i), r = fragment_row(i);
#pragma unroll
            for (int m = 0; m < WARP_ROWS; ++m) {
                const float x = s[m][n].x[i], own = bias(column, m, r);
                const float probability = exp2_fast(logit(x, own) - lse[m][r]);
                s[m][n].x[i] = probability * (dp[m][n].x[i] - delta[m][r]) * logit.slope(x);
            }
        }
#endif
}

#if DBIAS
static_assert(HEADS == 1, "heads have biases of their own");

// ds of this warp's rows and the block's keys, in place of their biases.
__device__ __forceinline__ void write_bias_gradients(const Accumulator (&ds)[WARP_ROWS][KEY_FRAGMENTS], KeyTiles& shared,
                                                     int stage, const AttentionParams& p, const Tile& t, int first_row,
                                                     const BlockKeys& columns) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
        for (int i = 0; i < 8; i += 2)
#pragma unroll
            for (int m = 0; m < WARP_ROWS; ++m)
                set_bias_pair(shared.bias_rows[stage], first_row + lane / 4 + 16 * m + 8 * fragment_row(i),
                              16 * n + 2 * (lane & 3) + fragment_column(i), ds[m][n].x[i], ds[m][n].x[i + 1]);
    __syncwarp();  // the warp's rows are complete
    const int count = min(WARP_ROWS * 16, p.query_length - t.first_query - first_row);
    const long long row = ((long long)t.batch * p.heads + t.first_head) * p.query_length + t.first_query + first_row;
    store_bias(static_cast<BIAS_ELEMENT*>(p.dbias_rows) + row * p.key_length, p.key_length, shared.bias_rows[stage],
               first_row, count, columns.following(), columns);
}
#endif

// With DBIAS and BITS, runs before backward_dq with as many blocks: zeros the bias gradients of a tile that does not
// visit every key.
extern "C" __global__ void __launch_bounds__(THREADS) clear_bias(const AttentionParams p) {
    wait_for_earlier_kernels();
#if DBIAS && BITS
    const Tile t = find_tile(p, static_cast<long long>(blockIdx.x));
    if (find_keys(p, t).length == p.key_length) return;
    const long long row = ((long long)t.batch * p.heads + t.first_head) * p.query_length + t.first_query;
    const long long count = (long long)min(QUERIES, p.query_length - t.first_query) * p.key_length;  // contiguous rows
    BIAS_ELEMENT* target = static_cast<BIAS_ELEMENT*>(p.dbias_rows) + row * p.key_length;
    if (p.key_length % BIAS_WIDTH == 0) {
        for (long long i = threadIdx.x; i < count / BIAS_WIDTH; i += THREADS)
            reinterpret_cast<uint4*>(target)[i] = make_uint4(0, 0, 0, 0);
        return;
    }
    for (long long i = threadIdx.x; i < count; i += THREADS) from_float(target[i], 0.0f);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) backward_dq(const AttentionParams p) {
    wait_for_earlier_kernels();
    static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch has less shared memory");
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
    const Tile t = find_tile(p, static_cast<long long>(blockIdx.x));
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
    round_rows<BLOCK_M, THREADS>(shared.query);
    round_rows<BLOCK_M, THREADS>(shared.dout);
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
        __syncthreads();  // this block's rows and the next one's indices are in place; no thread reads the other stage
        gather(following, next_slot, stage ^ 1);
        fetch_indices(shared.keys, blocks, after, after_slot);
        copy_async_commit();

        Accumulator s[WARP_ROWS][KEY_FRAGMENTS], dp[WARP_ROWS][KEY_FRAGMENTS];
        mma_rows_keys(s, shared.query + first_row * ROW_STRIDE, shared.keys.key[stage]);
        mma_rows_keys(dp, shared.dout + first_row * ROW_STRIDE, shared.keys.value[stage]);
        logit_gradients(s, dp, shared.keys, stage, logit, lse, delta, t);
        if (current.masked) apply_mask(s, shared.keys, stage, slot, position, 0.0f);
#if DBIAS
        if (current.masked) apply_mask(dp, shared.keys, stage, slot, position, 0.0f);
        write_bias_gradients(dp, shared.keys, stage, p, t, first_row,
                             BlockKeys(blocks, current, shared.keys.index[slot]));
#endif
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
    for (int m = 0; m < WARP_ROWS; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) factor[m][r] = lse[m][r] == infinity() ? 0.0f : p.scale;  // no visible key
    write_rows(p.dquery, shared.query, p, t, first_row, dq, factor);
}
