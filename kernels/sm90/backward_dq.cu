// Gradient of the queries on Hopper, query-major; what sm80/backward_dq.cu computes, with warpgroup MMAs:
//     p = exp(s - lse), ds = p * (dout . v - delta), dx = ds * (slope of the softcap), dq = scale * sum over j of dx k_j.
// It also makes delta = dout . out - dlse (0 for a row that sees nothing), which it writes for the other gradients; nothing
// else without dquery. Above HEAD_DIM 128 (WIDE) it reads delta.
//
// A persistent CTA takes, by tickets, tiles of BLOCK_M rows (BLOCK_M / HEADS queries times HEADS heads of a GQA group). Each
// consumer warpgroup has 64 rows, whose query and dout stay in its registers; the producer gathers their keys and values,
// BLOCK_N at a time (common/mask.cuh says which), into STAGES stages. S = Q K^T and dP = dO V^T have their left operands in
// registers (WIDE: shared memory, for as long as the tile lasts), dS is the left operand of dQ += dS K. Every row has one
// writer and a fixed order of additions.
//
// Prelude: ELEMENT, HEAD_DIM (at most 256), HEADS (divides BLOCK_M), BLOCK_M, BLOCK_N, STAGES, KEYS, CAUSAL, BIAS (BIAS_NONE
// or BIAS_OF_KEYS), SOFTCAP, SEQUENCES, BITS (KEYS_LISTED, with neither CAUSAL nor SEQUENCES).
#include "sm90/backward_dq_consumer.cuh"
#include "sm90/backward_dq_producer.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_dq(const __grid_constant__ BackwardDqParams launch) {
    wait_for_earlier_kernels();
    static_assert(sizeof(Shared) + 1024 <= SHARED_BYTES, "the launch has less shared memory");
    extern __shared__ unsigned char shared_memory[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory + (0u - shared_address(shared_memory)) % 1024);
    if (threadIdx.x == 0) {
        barrier_init(&shared.query_full, PRODUCER_THREADS + 1);
        barrier_init(&shared.query_empty, CONSUMER_THREADS);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&shared.key_full[i], 2 * PRODUCER_THREADS);
            barrier_init(&shared.key_empty[i], CONSUMER_THREADS);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < PRODUCER_THREADS) {
        shrink_registers<PRODUCER_REGISTERS>();
        produce(shared, launch);
    } else {
        grow_registers<CONSUMER_REGISTERS>();
        Consumer consumer(shared, launch.attention);
        consumer.run();
    }
}
