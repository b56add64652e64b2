// 8-bit rows (cupy_dma/cache/storage.py): STORAGE is 1 for INT8, 2 for FP8 (E4M3).
//
//     scale = max |x| / LARGEST, rounded to ELEMENT      code = x / scale, rounded, ties to even
//     read: code * scale, as ELEMENT
//
// Codes and scales are exact as ELEMENT, so 16-bit products are those of float32, rounded once.
#pragma once
#include "common/arch.cuh"

constexpr float LARGEST = STORAGE == 1 ? 127.0f : 448.0f;

// The smallest scale: a float16 below it would be too coarse.
__device__ __forceinline__ constexpr float smallest_scale(const __half*) { return 0x1p-17f; }
template <typename T>
__device__ __forceinline__ constexpr float smallest_scale(const T*) {
    return 0.0f;
}

// Of some neighboring numbers.
template <int count>
struct alignas(count) Codes {
    unsigned word[count / 4];
};

// The scale of a row whose numbers are at most `largest`, which is finite.
__device__ __forceinline__ float scale_of(float largest) {
    ELEMENT scale;
    from_float(scale, fmaxf(largest / LARGEST, smallest_scale(static_cast<const ELEMENT*>(nullptr))));
    return to_float(scale);
}

// The code of a number of at most LARGEST.
__device__ __forceinline__ unsigned char code_of(float y) {
    if (STORAGE == 1) return static_cast<unsigned char>(static_cast<int>(rintf(y)));
    const float size = fabsf(y);
    const unsigned bits = __float_as_uint(size);
    const unsigned normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - 960;  // 3 bits of the mantissa, and a bias of 7
    const unsigned small = static_cast<unsigned>(rintf(size * 512.0f));
    return static_cast<unsigned char>((size < 0x1p-6f ? small : normal) | (y < 0.0f ? 128 : 0));
}

// ---- two codes as numbers of a 16-bit type ----
// Code `i` of word `x` and code `k` of word `y`, each in one byte of 16 bits; the other byte is undefined.
__device__ __forceinline__ unsigned code_pair(unsigned x, int i, unsigned y, int k) {
    return STORAGE == 1 ? __byte_perm(x, y, i | (4 + k) << 8) : __byte_perm(x, y, i << 4 | (4 + k) << 12);
}

struct PairFormat {
    unsigned unit;   // INT8: a pair of powers of 2 whose last bit of the mantissa stands for 1
    int shift;       // FP8: how far a code's bits move to the right to become the type's
    unsigned power;  // FP8: a pair of factors that correct the bias of the exponent
};
__device__ __forceinline__ constexpr PairFormat pair_format(const __half*) { return {0x64006400u, 1, 0x5c005c00u}; }
__device__ __forceinline__ constexpr PairFormat pair_format(const __nv_bfloat16*) { return {0x43004300u, 4, 0x7b807b80u}; }

// The numbers of such a pair.
template <typename T>
__device__ __forceinline__ unsigned numbers_of_pair(unsigned codes, const T* type) {
    constexpr PairFormat format = pair_format(static_cast<const T*>(nullptr));
    if (STORAGE == 1)  // (unit + lower 7 bits) - (unit + 128 * sign bit)
        return subtract_pairs(and_or(codes, 0x007f007fu, format.unit), and_or(codes, 0x00800080u, format.unit), type);
    const unsigned bits = codes & 0x80008000u | codes >> format.shift & 0x7f007f00u >> format.shift;
    return multiply_pairs(bits, format.power, type);
}

// The numbers of the four codes of a word, which are exact as float16.
__device__ __forceinline__ void numbers_of(float (&x)[4], unsigned word) {
    constexpr const __half* HALF = nullptr;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const unsigned pair = numbers_of_pair(code_pair(word, i, word, i + 1), HALF);
        x[i] = half_of(pair, 0, HALF);
        x[i + 1] = half_of(pair, 1, HALF);
    }
}
