// Attention forward over gathered keys: out = softmax over visible j of (softcap(scale * q_i . k_j) + bias_j), times v.
//
// query  // (B, Lq, H, D) ELEMENT       key, value // (B, Lk, Hkv, D) ELEMENT, any batch, row and head strides
// bias   // natural-log units: (1|B, 1|Hkv|H, 1|Lk) f32 (BIAS_OF_KEYS), or of every query (BIAS_DENSE, common/bias.cuh)
// out    // (B, Lq, H, D) ELEMENT, contiguous       lse // (B, H, Lq) f32, natural log, -inf where a row sees nothing
//
// sm80/gather.cuh says what a block and a warp own, and how keys reach shared memory. A warp keeps the logits, softmax
// state and output of its rows in registers; it alone writes their out and lse, once.
//
// Prelude: that of sm80/gather.cuh, MIN_BLOCKS.
#include "common/arch.cuh"
#include "sm80/gather.cuh"

struct Shared {
    ELEMENT query[BLOCK_M * ROW_STRIDE];  // later the tile's output
    KeyTiles keys;
};

__device__ __forceinline__ void finish_logits(Accumulator (&s)[WARP_ROWS][KEY_FRAGMENTS], const KeyTiles& shared, int stage,
                                              const LogitScale& logit, const Tile& t) {
#if BIAS == BIAS_DENSE
    const int first_row = threadIdx.x / 32 * WARP_ROWS * 16 + (threadIdx.x & 31) / 4;
#pragma unroll
    for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
        for (int i = 0; i < 8; i += 2)
#pragma unroll
            for (int m = 0; m < WARP_ROWS; ++m) {
                const float2 bias = bias_pair(shared.bias_rows[stage], (first_row + 16 * m + 8 * fragment_row(i)) / HEADS,
                                              16 * n + 2 * (threadIdx.x & 3) + fragment_column(i));
                s[m][n].x[i] = logit(s[m][n].x[i], bias.x);
                s[m][n].x[i + 1] = logit(s[m][n].x[i + 1], bias.y);
            }
#else
    const BlockBiases bias(shared, stage, t);
#pragma unroll
    for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int column = 16 * n + 2 * (threadIdx.x & 3) + fragment_column(i);
#pragma unroll
            for (int m = 0; m < WARP_ROWS; ++m)
                s[m][n].x[i] = logit(s[m][n].x[i], bias(column, m, fragment_row(i)));
        }
#endif
}

__device__ __forceinline__ void write_lse(const AttentionParams& p, const Tile& t, int first_row,
                                          const RowState (&state)[WARP_ROWS]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int m = 0; m < WARP_ROWS; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = first_row + 16 * m + lane / 4 + 8 * r, query = t.first_query + row / HEADS;
            if ((lane & 3) == 0 && row < QUERIES * HEADS && query < t.end_query) {
                const long long head = (long long)t.batch * p.heads + t.first_head + row % HEADS;
                p.lse[head * p.query_length + query] = state[m].lse(r);
            }
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_forward(const AttentionParams p) {
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
    copy_async_commit();
    copy_async_wait<0>();
    round_rows<BLOCK_M, THREADS>(shared.query);
    __syncthreads();  // the query rows and the first two blocks' indices are in place

    const KeyGather gather(shared.keys, p, t, blocks);
    gather(current, 0, 0);
    copy_async_commit();

    int position[WARP_ROWS][2];
    row_positions(position, t, first_row);
    const LogitScale logit(p.scale, p.softcap);
    Accumulator o[WARP_ROWS][DIM_FRAGMENTS];
    RowState state[WARP_ROWS];
#pragma unroll
    for (int m = 0; m < WARP_ROWS; ++m)
#pragma unroll
        for (int d = 0; d < DIM_FRAGMENTS; ++d) clear(o[m][d]);

    for (int slot = 0, stage = 0; current.first >= 0; stage ^= 1) {
        const KeyBlock after = blocks.next();
        const int next_slot = slot == 2 ? 0 : slot + 1, after_slot = next_slot == 2 ? 0 : next_slot + 1;
        copy_async_wait<0>();
        __syncthreads();  // this block's rows and the next one's indices are in place; no thread reads the other stage
        gather(following, next_slot, stage ^ 1);
        fetch_indices(shared.keys, blocks, after, after_slot);
        copy_async_commit();

        Accumulator s[WARP_ROWS][KEY_FRAGMENTS];
        mma_rows_keys(s, shared.query + first_row * ROW_STRIDE, shared.keys.key[stage]);
        finish_logits(s, shared.keys, stage, logit, t);
        if (current.masked) apply_mask(s, shared.keys, stage, slot, position, -infinity());
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
        if (current.masked && __syncthreads_or(!block_is_finite(shared.keys.value[stage])))
            isolate_nonfinite(o, shared.keys.value[stage], shared.keys, stage, slot, position);
        accumulate(o, s, shared.keys.value[stage]);
        current = following;
        following = after;
        slot = next_slot;
    }
    float inverse_sum[WARP_ROWS][2];
#pragma unroll
    for (int m = 0; m < WARP_ROWS; ++m) {
        state[m].finish();
#pragma unroll
        for (int r = 0; r < 2; ++r) inverse_sum[m][r] = state[m].inverse_sum(r);
    }
    write_rows(p.out, shared.query, p, t, first_row, o, inverse_sum);
    write_lse(p, t, first_row, state);
}
