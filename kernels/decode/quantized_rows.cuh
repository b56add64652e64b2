// 8-bit rows (cupy_dma/cache/storage.py): STORAGE is 1 for INT8, 2 for FP8 (E4M3).
//
//     scale = max |x| / LARGEST        code = x / scale, rounded, ties to even          read: code * scale, as ELEMENT
#pragma once
#include "common/arch.cuh"

constexpr float LARGEST = STORAGE == 1 ? 127.0f : 448.0f;

// Of some neighboring numbers.
template <int count>
struct alignas(count) Codes {
    unsigned word[count / 4];
};

// The code of a number of at most LARGEST.
__device__ __forceinline__ unsigned char code_of(float y) {
    if (STORAGE == 1) return static_cast<unsigned char>(static_cast<int>(rintf(y)));
    const float size = fabsf(y);
    const unsigned bits = __float_as_uint(size);
    const unsigned normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - 960;  // 3 bits of the mantissa, and a bias of 7
    const unsigned small = static_cast<unsigned>(rintf(size * 512.0f));
    return static_cast<unsigned char>((size < 0x1p-6f ? small : normal) | (y < 0.0f ? 128 : 0));
}

// The numbers of the four codes of a word.
__device__ __forceinline__ void numbers_of(float (&x)[4], unsigned word) {
    if (STORAGE == 1) {
        const unsigned biased = word ^ 0x80808080u;  // code + 128, which becomes the low byte of 2^23
#pragma unroll
        for (int i = 0; i < 4; ++i)
            x[i] = __uint_as_float(__byte_perm(biased, 0x4b000000u, 0x7540 + i)) - 8388736.0f;
        return;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // as float16, whose exponent has a bias of 15, not 7
        const unsigned pair = __byte_perm(word, 0, i == 0 ? 0x1404 : 0x3424);
        const unsigned halves = (pair & 0x80008000u) | (pair & 0x7f007f00u) >> 1;
#pragma unroll
        for (int k = 0; k < 2; ++k) x[2 * i + k] = half_of(halves, k, static_cast<const __half*>(nullptr)) * 256.0f;
    }
}
