// Rows of 16-bit numbers from global to shared memory: contiguous or gathered, one row each HEAD_DIM numbers.
//
// In shared memory a row takes ROW_STRIDE numbers: HEAD_DIM rounded up to 16 (the tensor cores' step, zero-filled) plus
// 8, so that the eight rows one ldmatrix phase reads lie in different banks.
//
// Prelude: ELEMENT, HEAD_DIM, VECTOR (1: HEAD_DIM, all strides and pointers are multiples of 16 bytes).
#pragma once
#include "arch.cuh"

constexpr int HEAD_DIM_PADDED = (HEAD_DIM + 15) / 16 * 16;
constexpr int ROW_STRIDE = HEAD_DIM_PADDED + 8;
constexpr int ROW_PIECES = HEAD_DIM_PADDED / 8;  // 16-byte pieces of a row

// Piece `piece` (8 numbers) of one row; zeros when `source` is null and past HEAD_DIM. With VECTOR the copy is
// asynchronous and complete after copy_async_wait, otherwise it is complete at once.
__device__ __forceinline__ void copy_piece(ELEMENT* row, const ELEMENT* source, int piece, const ELEMENT* anywhere) {
#if VECTOR
    const bool exists = source != nullptr && piece * 8 < HEAD_DIM;
    copy_async_16(row + piece * 8, exists ? source + piece * 8 : anywhere, exists ? 16 : 0);
#else
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int d = piece * 8 + i;
        ELEMENT x;
        from_float(x, 0.0f);
        if (source != nullptr && d < HEAD_DIM) x = source[d];
        row[d] = x;
    }
#endif
}
