// The mask of packed sequences, from key positions to query rows: key j of sequence b is seen by the rows
//     max(start_j - shift_b, query_first_b) <= i < min(stop_j - shift_b, query_end_b),  shift_b = key_end_b - query_end_b,
// and by none if j is no key in use. With CAUSAL a key is hidden from positions before its own as well.
//
// start, stop         // (1, 1|Hkv|H, Lk) int32, last axis contiguous, in packed key positions
// row_start, row_stop // (mask heads, Lk) int32
// A thread owns a key.
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

constexpr int THREADS = 256;

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
