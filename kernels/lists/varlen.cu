// sequence_bounds: where packed sequences begin and end (common/varlen.cuh), from cumulative lengths.
//
// mask_of_rows: the mask of packed sequences, from key positions to query rows. Key j of sequence b is seen by the rows
//     max(start_j - shift_b, query_first_b) <= i < min(stop_j - shift_b, query_end_b),  shift_b = key_end_b - query_end_b,
// and by none if j is not a key in use. CAUSAL also hides a key from positions before its own.
//
// start, stop         // (1, 1|Hkv|H, Lk) int32, last axis contiguous, in packed key positions
// row_start, row_stop // (mask heads, Lk) int32
// A thread owns a sequence or a key.
//
// Prelude: CAUSAL.
#include "common/arch.cuh"
#include "common/varlen.cuh"

struct SequenceParams {
    const int* start;
    const int* stop;
    const int* bounds;  // (4, sequences)
    int* row_start;
    int* row_stop;
    long long start_head, stop_head;
    int heads, key_length, sequences;
};

struct BoundsParams {
    const void* query_lengths;  // (B + 1) cumulative
    const void* key_lengths;    // (B + 1) cumulative; not read with pages and used
    const void* used;           // (B) keys in use; null: all
    int* bounds;                // (4, B + 1)
    int sequences;              // B + 1
    int query_length;
    int page_keys;              // keys that the pages of a sequence hold; 0: not paged
    int query_int64, key_int64, used_int64;
};

constexpr int THREADS = 256;

__device__ __forceinline__ int integer_at(const void* array, int is_int64, int index) {
    return is_int64 ? static_cast<int>(static_cast<const long long*>(array)[index]) : static_cast<const int*>(array)[index];
}

// The last of the sequences has no keys, and the query rows after all others.
extern "C" __global__ void __launch_bounds__(THREADS) sequence_bounds(const BoundsParams p) {
    wait_for_earlier_kernels();
    const int b = blockIdx.x * THREADS + threadIdx.x, n = p.sequences, last = n - 1;
    if (b >= n) return;
    auto keys_before = [&](int i) { return integer_at(p.key_lengths, p.key_int64, i); };
    const int first = p.page_keys ? b * p.page_keys : keys_before(b);
    int length = 0;
    if (b < last) {
        length = p.used ? integer_at(p.used, p.used_int64, b) : keys_before(b + 1) - keys_before(b);
    }
    p.bounds[b] = integer_at(p.query_lengths, p.query_int64, b);
    p.bounds[n + b] = b < last ? integer_at(p.query_lengths, p.query_int64, b + 1) : p.query_length;
    p.bounds[2 * n + b] = first;
    p.bounds[3 * n + b] = first + length;
}

extern "C" __global__ void __launch_bounds__(THREADS) mask_of_rows(const SequenceParams p) {
    wait_for_earlier_kernels();
    const long long thread = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (thread >= p.key_length) return;
    const int key = static_cast<int>(thread), n = p.sequences;
    const int b = sequence_of_row(p.bounds + 2 * n, n, key);
    const long long first = p.bounds[b], end = p.bounds[n + b], key_end = p.bounds[3 * n + b], shift = key_end - end;
    auto row_at = [&](long long position) { return static_cast<int>(min(max(position - shift, first), end)); };
    for (int h = 0; h < p.heads; ++h) {
        int start = p.start[h * p.start_head + key];
        if (CAUSAL) start = max(start, key);
        const bool used = key < key_end;
        p.row_start[(long long)h * p.key_length + key] = used ? row_at(start) : 0;
        p.row_stop[(long long)h * p.key_length + key] = used ? row_at(p.stop[h * p.stop_head + key]) : 0;
    }
}
