// Gradient of a dense bias that several heads, batch entries or keys share:
//     dbias[b', h', i, j] = sum of ds[b, h, i, j] over the (b, h) that share it (SUM_KEYS: and over all j),
// with ds as in sm80/backward_dq.cu. (backward_dq.cu computes the gradient of a bias that is not shared.)
//
// dbias // (1|B, 1|Hkv|H, Lq, 1|Lk) BIAS_ELEMENT, contiguous
//
// A block owns BLOCK_M queries and BLOCK_N keys (SUM_KEYS: all keys, BLOCK_N at a time) of one row of the bias, and
// computes s and dp of every head and batch entry in turn. Their sum stays in registers, in float32 and in a fixed
// order; every element has one writer. Keys and values stay loaded while heads of one GQA group follow each other.
// Pairs of tiles without a visible pair are skipped before anything is loaded.
//
// Prelude: that of sm80/gather.cuh (with HEADS 1, KEYS_CONTIGUOUS, BIAS_DENSE, no SEQUENCES), MIN_BLOCKS, INTERVALS,
// SUM_KEYS.
#include "common/arch.cuh"
#include "sm80/gather.cuh"

struct Shared {
    ELEMENT query[BLOCK_M * ROW_STRIDE];
    ELEMENT dout[BLOCK_M * ROW_STRIDE];
    ELEMENT key[BLOCK_N * ROW_STRIDE];
    ELEMENT value[BLOCK_N * ROW_STRIDE];
    int start[BLOCK_N], stop[BLOCK_N];
    unsigned words[WORDS][BLOCK_N];
    BiasTile<BLOCK_M, BLOCK_N> bias;  // in the end its gradient
};

// MMA loop steps to unroll: with all of float32's, the compiler loads ahead until registers spill.
constexpr int UNROLLED = sizeof(ELEMENT) == 4 ? 2 : DIM_FRAGMENTS;

// Which of the BLOCK_N keys from first_key on the tile's queries see. Afterwards the intervals or words for the test
// are in shared memory, or on their way. All threads of the block call it.
struct Sight {
    bool any, all;
};

__device__ __forceinline__ Sight look(Shared& shared, const AttentionParams& p, const Tile& t, int first_key) {
    const long long row = mask_row_of(p, t);
#if BITS
    const unsigned short* states =
        p.states + (row * p.query_words + t.first_query / 32) * (p.key_stride / 64) + first_key / 64;
    unsigned any = 0, all = 3;
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
        const unsigned state = states[w * (p.key_stride / 64)];
        any |= state;
        all &= state;
    }
    __syncthreads();  // all threads are done with the rows and words of the pair before
    if (any != 0 && all != 3) {
        const unsigned* columns = p.columns + (row * p.query_words + t.first_query / 32) * p.key_stride + first_key;
        for (int i = threadIdx.x; i < WORDS * BLOCK_N; i += THREADS)
            copy_async_4(&shared.words[i / BLOCK_N][i % BLOCK_N],
                         columns + (long long)(i / BLOCK_N) * p.key_stride + i % BLOCK_N, 4);
    }
    return {any != 0, all == 3};
#else
    bool any = false, some_hidden = false;
    const int key = first_key + threadIdx.x;
    int start = CAUSAL ? key : INT_LOWEST, stop = key < p.key_length ? NEVER : INT_LOWEST;
#if INTERVALS
    if (threadIdx.x < BLOCK_N && key < p.key_length) {
        const long long head = row % p.mask_heads, batch = row / p.mask_heads;
        start = max(start, p.start[batch * p.start_batch + head * p.start_head + key]);
        stop = p.stop[batch * p.stop_batch + head * p.stop_head + key];
    }
#endif
    if (threadIdx.x < BLOCK_N) {
        any = start < stop && start <= t.last_position && stop > t.first_position;
        some_hidden = !(start <= t.first_position && stop > t.last_position);
    }
    any = __syncthreads_or(any);  // also: all threads are done with the rows and facts of the pair before
    some_hidden = __syncthreads_or(some_hidden);
    if (threadIdx.x < BLOCK_N) {
        shared.start[threadIdx.x] = start;
        shared.stop[threadIdx.x] = stop;
    }
    return {any, !some_hidden};
#endif
}

// Rows of one head; rows from `count` on are zero. Not inlined: the addresses of four arrays at once do not fit into
// the registers beside the sums.
template <int rows>
__device__ __noinline__ void load_tile(ELEMENT* target, const ELEMENT* source, long long stride, int count) {
    for_each_piece<rows, THREADS>([&](int row, int piece) {
        copy_piece(target + row * ROW_STRIDE, source + (row < count ? row : 0) * stride, piece, row < count);
    });
}

// sum += ds of this warp's rows.
__device__ __forceinline__ void add_gradients(Accumulator (&sum)[WARP_ROWS][KEY_FRAGMENTS],
                                              const Accumulator (&s)[WARP_ROWS][KEY_FRAGMENTS],
                                              const Accumulator (&dp)[WARP_ROWS][KEY_FRAGMENTS], const Shared& shared,
                                              const LogitScale& logit, const float (&lse)[WARP_ROWS][2],
                                              const float (&delta)[WARP_ROWS][2], const int (&position)[WARP_ROWS][2],
                                              bool masked) {
    const int first_row = threadIdx.x / 32 * WARP_ROWS * 16, lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
        for (int i = 0; i < 8; i += 2)
#pragma unroll
            for (int m = 0; m < WARP_ROWS; ++m) {
                const int r = fragment_row(i), column = 16 * n + 2 * (lane & 3) + fragment_column(i);
                const float2 bias = bias_pair(shared.bias, first_row + lane / 4 + 16 * m + 8 * r, column);
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const float probability =
                        exp2_fast(logit(s[m][n].x[i + k], k == 0 ? bias.x : bias.y) - lse[m][r]);
                    const float ds = probability * (dp[m][n].x[i + k] - delta[m][r]);
                    bool hidden = (k == 0 ? bias.x : bias.y) == -infinity();
                    if (masked) {
#if BITS
                        hidden |= (shared.words[first_row / 32][column + k] & position[m][r]) == 0;
#else
                        hidden |= !visible(position[m][r], shared.start[column + k], shared.stop[column + k]);
#endif
                    }
                    if (!hidden) sum[m][n].x[i + k] += ds;
                }
            }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) backward_dbias(const AttentionParams p) {
    wait_for_earlier_kernels();
    static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch has less shared memory");
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
    const int key_blocks = (p.key_length + BLOCK_N - 1) / BLOCK_N, lane = threadIdx.x & 31;
    long long rest = blockIdx.x;
    const int first_block = SUM_KEYS ? 0 : static_cast<int>(rest % key_blocks);
    if (!SUM_KEYS) rest /= key_blocks;
    const int end_block = SUM_KEYS ? key_blocks : first_block + 1;
    Tile t = {};
    t.first_query = static_cast<int>(rest % p.tiles) * BLOCK_M;
    t.end_query = p.query_length;
    const long long bias_row = rest / p.tiles;
    t.first_position = t.first_query + p.key_length - p.query_length;
    t.last_position = min(t.first_query + BLOCK_M, p.query_length) - 1 + p.key_length - p.query_length;
    const int sharing = p.heads / p.dbias_heads, first_head = static_cast<int>(bias_row % p.dbias_heads) * sharing;
    const int batch = static_cast<int>(bias_row / p.dbias_heads), end_batch = p.dbias_batch == 1 ? p.batch : batch + 1;

    const int first_row = threadIdx.x / 32 * WARP_ROWS * 16;  // of this warp
    int position[WARP_ROWS][2];
    row_positions(position, t, first_row);
    const LogitScale logit(p.scale, p.softcap);
    Accumulator sum[WARP_ROWS][KEY_FRAGMENTS];
#pragma unroll
    for (int m = 0; m < WARP_ROWS; ++m)
#pragma unroll
        for (int n = 0; n < KEY_FRAGMENTS; ++n) clear(sum[m][n]);

    for (int block = first_block; block < end_block; ++block) {
        const int first_key = block * BLOCK_N, count = min(BLOCK_N, p.key_length - first_key);
        bool bias_is_here = false;
        int loaded = -1;  // the kv head whose keys and values are here
        for (t.batch = batch; t.batch < end_batch; ++t.batch)
            for (t.first_head = first_head; t.first_head < first_head + sharing; ++t.first_head) {
                t.group = t.first_head / (p.heads / p.kv_heads);
                const Sight sight = look(shared, p, t, first_key);
                if (!sight.any) continue;
                if (!bias_is_here)
                    load_bias<BLOCK_M, BLOCK_N, THREADS>(
                        shared.bias, BiasRows(p, t.batch, t.group, t.first_head, t.first_query),
                        count == BLOCK_N ? first_key : -1,
                        [&](int column) { return column < count ? first_key + column : -1; });
                bias_is_here = true;
                if (loaded != t.batch * p.kv_heads + t.group) {
                    const long long key = first_key;
                    load_tile<BLOCK_N>(shared.key, p.key + t.batch * p.key_batch + t.group * p.key_head + key * p.key_row,
                                       p.key_row, count);
                    load_tile<BLOCK_N>(shared.value,
                                       p.value + t.batch * p.value_batch + t.group * p.value_head + key * p.value_row,
                                       p.value_row, count);
                    loaded = t.batch * p.kv_heads + t.group;
                }
                const int queries = p.query_length - t.first_query;
                load_tile<BLOCK_M>(
                    shared.query,
                    p.query + t.batch * p.query_batch + t.first_head * p.query_head + t.first_query * p.query_row,
                    p.query_row, queries);
                load_tile<BLOCK_M>(
                    shared.dout,
                    p.dout + t.batch * p.dout_batch + t.first_head * p.dout_head + t.first_query * p.dout_row,
                    p.dout_row, queries);
                copy_async_commit();
                round_rows<BLOCK_M, THREADS>(shared.query);
                round_rows<BLOCK_M, THREADS>(shared.dout);
                float lse[WARP_ROWS][2], delta[WARP_ROWS][2];
                load_statistics(lse, delta, p, t, first_row);
                copy_async_wait<0>();
                __syncthreads();  // rows, biases and what the test needs are in place

                Accumulator s[WARP_ROWS][KEY_FRAGMENTS], dp[WARP_ROWS][KEY_FRAGMENTS];
                mma_rows_keys<UNROLLED>(s, shared.query + first_row * ROW_STRIDE, shared.key);
                mma_rows_keys<UNROLLED>(dp, shared.dout + first_row * ROW_STRIDE, shared.value);
                add_gradients(sum, s, dp, shared, logit, lse, delta, position, !sight.all);
            }
    }

    const long long first = bias_row * p.query_length + t.first_query + first_row;
    const int rows = min(WARP_ROWS * 16, p.query_length - t.first_query - first_row);
    BIAS_ELEMENT* target = static_cast<BIAS_ELEMENT*>(p.dbias_rows);
#if SUM_KEYS
#pragma unroll
    for (int m = 0; m < WARP_ROWS; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float total = 0.0f;
#pragma unroll
            for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (fragment_row(i) == r) total += sum[m][n].x[i];
            total = row_sum(total);
            const int row = 16 * m + lane / 4 + 8 * r;
            if ((lane & 3) == 0 && row < rows) from_float(target[first + row], total);
        }
#else
    const int first_key = first_block * BLOCK_N, count = min(BLOCK_N, p.key_length - first_key);
#pragma unroll
    for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
        for (int i = 0; i < 8; i += 2)
#pragma unroll
            for (int m = 0; m < WARP_ROWS; ++m)
                set_bias_pair(shared.bias, first_row + lane / 4 + 16 * m + 8 * fragment_row(i),
                              16 * n + 2 * (lane & 3) + fragment_column(i), sum[m][n].x[i], sum[m][n].x[i + 1]);
    __syncwarp();  // the warp's rows of the gradient are complete
    store_bias(target + first * p.key_length, p.key_length, shared.bias, first_row, rows,
               count == BLOCK_N ? first_key : -1, [&](int column) { return column < count ? first_key + column : -1; });
#endif
}
