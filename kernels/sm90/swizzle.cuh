// Where 16 bytes of a matrix lie in shared memory: chunks of 64 columns in the 128-byte swizzle (sm90/ptx.cuh).
//
// Prelude: ELEMENT.
#pragma once
#include "sm90/ptx.cuh"

// Address of piece `piece` of row `row` in a matrix of `rows` rows.
template <int rows>
__device__ __forceinline__ ELEMENT* piece_of(ELEMENT* matrix, int row, int piece) {
    return matrix + (piece / 8 * rows + row) * CHUNK_COLUMNS + ((piece ^ row) & 7) * 8;
}
