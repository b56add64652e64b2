// Checks, once per device, the register layout of the tensor cores that the attention kernels assume (common/arch.cuh).
//
// With S the shift S[i][i+1] = 1 (modulo 16) one warp computes P = X * S^T for a 16x16 X, reads P where the accumulator
// layout says it stands, hands it on as a left operand (round_to_operand) and computes P * S, which is X again.
//
// x  // (16, 16) ELEMENT      ok // (1) int32: the number of lanes that found both as expected, 32 when all is well
#include "common/arch.cuh"

struct LayoutParams {
    const ELEMENT* x;
    int* ok;
};

extern "C" __global__ void fragment_layout(const LayoutParams p) {
    wait_for_earlier_kernels();
    __shared__ __align__(32) ELEMENT x[256], shift[256];
    for (int i = threadIdx.x; i < 256; i += 32) {
        x[i] = p.x[i];
        from_float(shift[i], (i / 16 + 1) % 16 == i % 16 ? 1.0f : 0.0f);
    }
    __syncthreads();  // both matrices are in place
    FragmentA a;
    FragmentBT transposed;
    FragmentB b;
    Accumulator first, second;
    load_fragment(a, x, 16);
    load_fragment(transposed, shift, 16);
    load_fragment(b, shift, 16);
    clear(first);
    multiply_add(first, a, transposed);
    round_to_operand(a, first);
    clear(second);
    multiply_add(second, a, b);
    const int lane = threadIdx.x;
    bool good = true;
    for (int i = 0; i < 8; ++i) {
        const int row = lane / 4 + 8 * fragment_row(i), column = 2 * (lane % 4) + fragment_column(i);
        good = good && first.x[i] == to_float(x[row * 16 + (column + 1) % 16]) &&
               second.x[i] == to_float(x[row * 16 + column]);
    }
    const int lanes = __popc(__ballot_sync(ALL_LANES, good));
    if (lane == 0) *p.ok = lanes;
}
