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
constexpr int ROW_LANES = ROW_PIECES <= 2 ? 2 : ROW_PIECES <= 4 ? 4 : ROW_PIECES <= 8 ? 8 : ROW_PIECES <= 16 ? 16 : 32;

// Piece `piece` (8 numbers) of one row; zeros where it does not exist. With VECTOR the copy is asynchronous and complete
// after copy_async_wait, otherwise it is complete at once. `source` must be an address even if nothing is read there.
__device__ __forceinline__ void copy_piece(ELEMENT* row, const ELEMENT* source, int piece, bool exists) {
#if VECTOR
    if (HEAD_DIM < HEAD_DIM_PADDED) exists = exists && piece * 8 < HEAD_DIM;
    copy_async_16(row + piece * 8, source + piece * 8, exists ? 16 : 0);
#else
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int d = piece * 8 + i;
        ELEMENT x;
        from_float(x, 0.0f);
        if (exists && d < HEAD_DIM) x = source[d];
        row[d] = x;
    }
#endif
}

// Calls copy(row, piece) for every piece of `rows` rows, shared out among `threads` threads. A thread keeps to one piece
// and steps through rows at a fixed distance, so that its shared addresses are constants apart.
template <int rows, int threads, typename Copy>
__device__ __forceinline__ void for_each_piece(const Copy& copy) {
    constexpr int DISTANCE = threads / ROW_LANES;
    const int piece = threadIdx.x % ROW_LANES, first = threadIdx.x / ROW_LANES;
    if (ROW_PIECES < ROW_LANES && piece >= ROW_PIECES) return;
#pragma unroll
    for (int k = 0; k < (rows + DISTANCE - 1) / DISTANCE; ++k)
        if (rows % DISTANCE == 0 || first + k * DISTANCE < rows) copy(first + k * DISTANCE, piece);
}
