// Adds up the partial sums of the super-tiles of queries (sm80/backward_dkv.cu), in the order of the super-tiles, one
// key per warp.
//
// dkey, dvalue // (B, Lk, Hkv, D) ELEMENT and dbias // (B, H, Lk) f32, zeros for keys that no query sees. With BITS and
// a single super-tile, sm80/backward_dkv.cu has already written the results.
//
// Prelude: ELEMENT, HEAD_DIM, CAUSAL, DKEY, DVALUE, DBIAS, SEQUENCES, BITS (a dense mask: lists/dense_macro_tiles.cu).
#include "common/arch.cuh"
#include "common/params.cuh"
#include "common/varlen.cuh"

constexpr int WARPS = 8;

extern "C" __global__ void __launch_bounds__(WARPS * 32) backward_reduce(const AttentionParams p) {
    wait_for_earlier_kernels();
    const int lane = threadIdx.x & 31, row_blocks = (p.key_length + WARPS - 1) / WARPS;
    const int index = blockIdx.x % row_blocks * WARPS + threadIdx.x / 32;
    const long long row = blockIdx.x / row_blocks;  // (b, kv head)
    const int group = static_cast<int>(row % p.kv_heads), group_heads = p.heads / p.kv_heads;
    const long long batch = row / p.kv_heads;
    if (index >= p.key_length) return;
#if BITS
    const int key = index;
    const long long list_row = batch * p.list_batch + group * p.list_group;
    const int* slots = p.slots + list_row * p.super_units * p.key_length + key;
    const int supers = p.super_counts[list_row];
    if (supers == 1 && slots[0] >= 0) return;  // backward_dkv has written its results
    auto partial_row = [&](int i) {
        const int slot = slots[static_cast<long long>(i) * p.key_length];
        return slot < 0 ? -1 : row * p.super_entries + slot;
    };
#else
    const long long mask_row = batch * p.mask_batch + group * p.mask_group;
    const bool is_seen = index < p.seen_count[mask_row];
    const int key = p.seen[mask_row * p.key_length + index];
    const int span = is_seen ? p.span_offset[mask_row * p.key_length + index] : 0;

    // Super-tiles whose queries see the key; the same arithmetic as in lists/intervals.cu.
    const long long head = mask_row % p.mask_heads, mask_batch = mask_row / p.mask_heads;
#if SEQUENCES
    const int b = is_seen ? sequence_of_row(p.bounds + 2 * p.sequences, p.sequences, key) : 0, first_row = p.bounds[b];
    const int start = p.start[head * p.start_head + key], stop = p.stop[head * p.stop_head + key];
    const int first = (start - first_row) / p.super_queries;
    const int supers = is_seen ? (stop - 1 - first_row) / p.super_queries - first + 1 : 0;
    const int* slots = p.slots + mask_row * p.super_entries + span;
    auto partial_row = [&](int i) {
        return row * p.super_entries + slots[i] +
               super_offset(p.bounds, p.sequences, p.key_length, p.super_queries, p.super_capacity, b, first + i);
    };
#else
    const int shift = p.key_length - p.query_length;
    int start = p.start[mask_batch * p.start_batch + head * p.start_head + key];
    if (CAUSAL) start = max(start, key);
    const int stop = p.stop[mask_batch * p.stop_batch + head * p.stop_head + key];
    const long long first_query = max(static_cast<long long>(start) - shift, 0ll);
    const long long last_query = min(static_cast<long long>(stop) - shift, static_cast<long long>(p.query_length)) - 1;
    const int first = static_cast<int>(first_query / p.super_queries);
    const int supers = is_seen ? static_cast<int>(last_query / p.super_queries) - first + 1 : 0;
    const int* slots = p.slots + mask_row * p.supers * p.super_capacity + span;

    auto partial_row = [&](int i) { return (row * p.supers + first + i) * p.super_capacity + slots[i]; };
#endif
#endif
    const long long target = ((batch * p.key_length + key) * p.kv_heads + group) * HEAD_DIM;
    for (int d = lane; d < HEAD_DIM; d += 32) {
        float dk = 0.0f, dv = 0.0f;
        for (int i = 0; i < supers; ++i) {
            const long long partial = partial_row(i);
            if (BITS && partial < 0) continue;
            if (DKEY) dk += p.partial_key[partial * HEAD_DIM + d];
            if (DVALUE) dv += p.partial_value[partial * HEAD_DIM + d];
        }
        if (DKEY) from_float(p.dkey[target + d], dk);
        if (DVALUE) from_float(p.dvalue[target + d], dv);
    }
    if (DBIAS)
        for (int h = lane; h < group_heads; h += 32) {
            float dbias = 0.0f;
            for (int i = 0; i < supers; ++i) {
                const long long partial = partial_row(i);
                if (!BITS || partial >= 0) dbias += p.partial_bias[partial * group_heads + h];
            }
            p.dbias[(batch * p.heads + group * group_heads + h) * p.key_length + key] = dbias;
        }
}
