// Gradients of keys, values and key bias on Hopper, key-stationary; what sm80/backward_dkv.cu computes, with warpgroup
// MMAs (docs/hopper-backward.md).
//
// A persistent CTA takes tiles of BLOCK_N keys of one kv head by tickets: a block of a super-tile's list, or consecutive
// keys. Each of two consumer warpgroups owns 64 keys, whose dk, dv and dbias stay in its registers, and walks over the
// queries of all heads of the group, BLOCK_Q at a time, which TMA brings. S^T = K Q^T and dP^T = V dO^T have both operands
// in shared memory; P^T and dS^T are the left operands of dV and dK in registers. While a tile is worked on, the producer
// gathers the keys of the next one.
// Above HEAD_DIM 128 the accumulators are too large for that (WIDE): BLOCK_N is 64, and both warpgroups have the same keys;
// the first makes S, P and dV, the second dP, dS and dK, for which it gets P through shared memory.
//   KEYS_CONTIGUOUS  dkey, dvalue, dbias are written directly
//   KEYS_SHARED      likewise; keys are in the order of their lifetimes (lists/lifetimes.cu)
//   KEYS_LISTED      sums over a super-tile's queries are written as rows of float32 (sm80/backward_reduce.cu adds them).
//                    BITS: the lists are those of lists/dense_macro_tiles.cu, steps in which no pair is visible are left
//                    out, and sums over all queries (one super-tile) are written directly
//   DQUERY           dq, too, in one pass instead of two: dS K of each step is added to float32 sums in memory, in any
//                    order (sm90/backward_dq_postprocess.cu makes dquery of them)
//   STORED           dS of each step is stored, for sm90/backward_dq_stored.cu (sm90/stored_ds.cuh)
// All other results have one writer and a fixed order of additions, whoever takes which ticket: the same bits on every run.
//
// Prelude: ELEMENT, HEAD_DIM (at most 256), BLOCK_Q, STAGES (of queries), KEY_STAGES (1 or 2), KEYS (KEYS_SHARED without
// SEQUENCES), INTERVALS, CAUSAL, BIAS (BIAS_NONE or BIAS_OF_KEYS), SOFTCAP, SEQUENCES, DQUERY (HEAD_DIM to 128), BITS
// (KEYS_LISTED with at most MAX_STEPS steps; with none of INTERVALS, CAUSAL, SEQUENCES and DQUERY), STORED (KEYS_LISTED,
// HEAD_DIM to 128, BLOCK_Q 64; with none of SEQUENCES, DQUERY and BITS).
#include "sm90/backward_dkv_consumer.cuh"
#include "sm90/backward_dkv_producer.cuh"
#if WIDE
#include "sm90/backward_dkv_wide.cuh"
#else
#include "sm90/backward_dkv_narrow.cuh"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_dkv(const __grid_constant__ BackwardDkvParams launch) {
    wait_for_earlier_kernels();
    static_assert(sizeof(Shared) + 1024 <= SHARED_BYTES, "the launch has less shared memory");
    extern __shared__ unsigned char shared_memory[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory + (0u - shared_address(shared_memory)) % 1024);
    if (threadIdx.x == 0) {
        for (int i = 0; i < KEY_STAGES; ++i) {
            barrier_init(&shared.key_full[i], 32);
            barrier_init(&shared.key_empty[i], CONSUMER_THREADS + 32 + 1);  // who reads the tile's metadata
        }
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&shared.query_landed[i], 1);
            barrier_init(&shared.dout_landed[i], 1);
            barrier_init(&shared.ready[i], 32);
            barrier_init(&shared.query_empty[i], CONSUMER_THREADS);
        }
#if WIDE
        barrier_init(&shared.probability_full, 128);
        barrier_init(&shared.probability_empty, 128);
#endif
#if DQUERY
        for (int i = 0; i < 2; ++i) barrier_init(&shared.ds_full[i], CONSUMER_THREADS);
#endif
        barrier_init_fence();
    }
    __syncthreads();
    const int warp = threadIdx.x / 32;
    if (warp >= 4) {
        grow_registers<CONSUMER_REGISTERS>();
        Consumer consumer(shared, launch);
        consumer.run();
        return;
    }
    shrink_registers<PRODUCER_REGISTERS>();
    if (warp >= KEY_WARP && warp < KEY_WARP + KEY_STAGES) produce_keys(shared, launch, warp - KEY_WARP);
    else if (warp == STATISTICS_WARP) produce_statistics(shared, launch);
    else if (warp == QUERY_WARP && threadIdx.x % 32 == 0) produce_queries(shared, launch);
}
