// Codes and scales of a call's new rows (decode/quantized_rows.cuh), for decode/plan.cu and decode/step.cu.
//
//     key, value              // (n, L, Hkv, HEAD_DIM or VALUE_DIM) ELEMENT, the last axis contiguous
//     key_codes, value_codes  // the same shape, bytes, contiguous
//     key_scale, value_scale  // (n, L, Hkv) f32
//
// A warp takes a row: all keys, then all values. A number that is not finite makes the scale NaN, and all codes 0.
//
// Prelude: ELEMENT, HEAD_DIM, VALUE_DIM, STORAGE.
#include "decode/quantized_rows.cuh"

constexpr int WARPS = 4;
constexpr int OWN = ((HEAD_DIM > VALUE_DIM ? HEAD_DIM : VALUE_DIM) + 31) / 32;  // numbers of a lane

struct QuantizeParams {
    const ELEMENT* key;
    const ELEMENT* value;
    unsigned char* key_codes;
    unsigned char* value_codes;
    float* key_scale;
    float* value_scale;
    long long key_batch, key_row, key_head;  // strides, in elements
    long long value_batch, value_row, value_head;
    long long rows;  // n * L * Hkv
    int length, kv_heads;
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) quantize_rows(const QuantizeParams p) {
    wait_for_earlier_kernels();
    const long long number = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
    if (number >= 2 * p.rows) return;
    const bool is_key = number < p.rows;
    const long long row = is_key ? number : number - p.rows, token = row / p.kv_heads;
    const int lane = threadIdx.x & 31, dim = is_key ? HEAD_DIM : VALUE_DIM;
    const ELEMENT* x =
        (is_key ? p.key : p.value) + token / p.length * (is_key ? p.key_batch : p.value_batch) +
        token % p.length * (is_key ? p.key_row : p.value_row) + row % p.kv_heads * (is_key ? p.key_head : p.value_head);
    float own[OWN];
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        own[i] = lane + 32 * i < dim ? to_float(x[lane + 32 * i]) : 0.0f;
        most = max(most, __float_as_uint(fabsf(own[i])));  // NaN is above infinity
    }
    const float largest = __uint_as_float(__reduce_max_sync(ALL_LANES, most));
    const float scale = isfinite(largest) ? scale_of(largest) : __uint_as_float(0x7fc00000u);
    unsigned char* codes = (is_key ? p.key_codes : p.value_codes) + row * dim;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const float y = scale > 0.0f ? fminf(fmaxf(own[i] / scale, -LARGEST), LARGEST) : 0.0f;
        if (lane + 32 * i < dim) codes[lane + 32 * i] = code_of(y);
    }
    if (lane == 0) (is_key ? p.key_scale : p.value_scale)[row] = scale;
}
