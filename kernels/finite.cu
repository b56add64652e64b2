// Which kv heads have a value that is not finite: the Hopper forward need not look for such values in the others' blocks.
//
// value // (B, Lk, Hkv, D) of 16-bit numbers, any batch, row and head strides, rows of whole 4-byte words
// found // (B, Hkv) i32, 0 beforehand; 1 where there is one
//
// A warp takes ROWS rows of a head. A thread reads whole words; an exponent of ones plus its lowest bit carries into the
// place of the sign.
//
// Prelude: HEAD_DIM (even), EXPONENT (the exponent bits of the two numbers in a word).
#include "arch.cuh"

struct FiniteParams {
    const unsigned* value;
    int* found;
    long long batch_stride, row_stride, head_stride;  // in words
    int key_length, kv_heads, parts;                  // parts: warps of a head
};

constexpr int WARPS = 8;
constexpr int ROWS = 64;

extern "C" __global__ void __launch_bounds__(WARPS * 32) find_nonfinite(const FiniteParams p) {
    constexpr unsigned UNIT = EXPONENT & ~(EXPONENT << 1);
    const int blocks = (p.parts + WARPS - 1) / WARPS, part = blockIdx.x % blocks * WARPS + threadIdx.x / 32;
    const int row = blockIdx.x / blocks, head = row % p.kv_heads, lane = threadIdx.x & 31;
    const unsigned* values = p.value + row / p.kv_heads * p.batch_stride + head * p.head_stride;
    const int end = min(p.key_length, (part + 1) * ROWS);
    unsigned found = 0;
#pragma unroll 8
    for (int key = part * ROWS; key < end; ++key)
        for (int i = lane; i < HEAD_DIM / 2; i += 32) found |= (values[key * p.row_stride + i] & EXPONENT) + UNIT;
    if ((found & 0x80008000u) != 0) p.found[row] = 1;  // whoever writes, writes the same
}
