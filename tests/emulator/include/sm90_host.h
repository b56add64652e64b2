// Host twins of the functions of kernels/sm90/ptx.cuh that are written in PTX there. build.py replaces them by this
// file, after the types that they need.
#pragma once

struct TensorMap;
constexpr bool IS_BFLOAT16 = std::is_same_v<ELEMENT, __nv_bfloat16>;

template <typename T>
inline T* shared_pointer(unsigned address) {
    return reinterpret_cast<T*>(shared_memory + address);
}

// ---- copies ----
inline const void* row_address(const void* base, int row, int stride) {
    return static_cast<const char*>(base) + static_cast<long long>(row) * stride;
}

inline void copy_async_16(unsigned shared, const void* global, int valid, Where w = caller()) {
    machine_copy_async(shared_pointer<void>(shared), global, 16, valid, w);
}

inline uint4 load_shared_16(unsigned shared) { return *shared_pointer<uint4>(shared); }

inline void load_shared_pair(float& x, float& y, unsigned shared) {
    const float2 pair = *shared_pointer<float2>(shared);
    x = pair.x;
    y = pair.y;
}

inline void raise(int& flag, Where w = caller()) { atomicExch(&flag, 1, w); }

// Lane l passes the address of row l % 8 of matrix l / 8; a lane receives two neighbours of row lane/4.
inline unsigned* own_word(const Meeting* rows, int matrix) {
    return shared_pointer<unsigned>(static_cast<unsigned>(rows->values[8 * matrix + own_lane() / 4])) + own_lane() % 4;
}
inline const Meeting* meet_with_rows(unsigned row, Where w) {
    if (row % 16 != 0) machine_trap("a row of a matrix that is not on 16 bytes", w);
    return machine_meet(ALL_LANES, SHUFFLE, row, w);
}

// Rows of these matrices need not have been written, as with warpgroup MMAs.
__attribute__((no_sanitize("thread"), noinline)) inline unsigned look_at(const unsigned* word, Where w) {
    machine_access(word, sizeof *word, LOOK, w);
    return *word;
}

inline void load_matrices(unsigned (&words)[4], unsigned row, Where w = caller()) {
    const Meeting* rows = meet_with_rows(row, w);
    for (int i = 0; i < 4; ++i) words[i] = look_at(own_word(rows, i), w);
}

inline void store_matrices(unsigned row, const unsigned (&words)[4], Where w = caller()) {
    const Meeting* rows = meet_with_rows(row, w);
    for (int i = 0; i < 4; ++i) *own_word(rows, i) = words[i];
}

inline uint4 load_once(const void* global) { return *static_cast<const uint4*>(global); }

inline uint64_t* as_word(Barrier* barrier) { return reinterpret_cast<uint64_t*>(barrier); }

inline void tma_load(void* shared, const TensorMap* map, Barrier* barrier, int x0, int x1, int x2, int x3, Where w = caller()) {
    const int at[] = {x0, x1, x2, x3};
    machine_tma_load(shared, map, as_word(barrier), at, 4, w);
}
inline void tma_load(void* shared, const TensorMap* map, Barrier* barrier, int x0, int x1, int x2, int x3, int x4,
                     Where w = caller()) {
    const int at[] = {x0, x1, x2, x3, x4};
    machine_tma_load(shared, map, as_word(barrier), at, 5, w);
}
inline void tma_store(const TensorMap* map, const void* shared, int x0, int x1, int x2, int x3, Where w = caller()) {
    const int at[] = {x0, x1, x2, x3};
    machine_tma_store(map, shared, at, 4, w);
}
inline void bulk_reduce_add(float* global, const float* shared, int bytes, Where w = caller()) {
    machine_bulk_reduce(global, shared, bytes, w);
}
inline void bulk_commit() {
    machine_tma_store_commit();
    machine_bulk_commit();
}
inline void bulk_wait() {
    machine_tma_store_wait();
    machine_bulk_wait(0);
}
inline void bulk_wait_read() { bulk_wait(); }

// ---- barriers ----
inline void barrier_init(Barrier* barrier, int count, Where w = caller()) {
    machine_mbarrier_init(as_word(barrier), count, w);
}
inline void barrier_end(Barrier* barrier, Where w = caller()) { machine_mbarrier_end(as_word(barrier), w); }
inline void barrier_init_fence() {}
inline void barrier_arrive(Barrier* barrier, Where w = caller()) { machine_mbarrier_arrive(as_word(barrier), w); }
inline void barrier_expect(Barrier* barrier, int bytes, Where w = caller()) {
    machine_mbarrier_expect(as_word(barrier), bytes, w);
}
inline void barrier_arrive_after_copies(Barrier* barrier, Where w = caller()) {
    machine_copy_wait(-1);
    machine_mbarrier_arrive(as_word(barrier), w);
}
inline void barrier_wait(Barrier* barrier, unsigned parity, Where w = caller()) {
    machine_mbarrier_wait(as_word(barrier), parity, w);
}
inline bool barrier_test(Barrier* barrier, unsigned parity, Where w = caller()) {
    return machine_mbarrier_test(as_word(barrier), parity, w);
}
inline void named_barrier(int id, int threads, Where w = caller()) { machine_named_barrier(id, threads, true, w); }
inline void named_barrier_arrive(int id, int threads, Where w = caller()) { machine_named_barrier(id, threads, false, w); }
inline void shared_write_fence() {}

// ---- no-ops here: they only matter to compilers and registers ----
template <int registers>
inline void shrink_registers() {}
template <int registers>
inline void grow_registers() {}
inline int lane_now() { return static_cast<int>(own_lane()); }
inline int thread_now() { return static_cast<int>(threadIdx.x); }
inline int zero_now() { return 0; }
inline void code_anchor() {}
inline unsigned kept(unsigned value) { return value; }
template <typename Registers>
inline void pin(Registers&) {}

// ---- products ----
inline void wgmma_fence() {}
inline void wgmma_commit() { machine_wgmma_commit(); }
template <int pending>
inline void wgmma_wait(Where w = caller()) {
    machine_wgmma_wait(pending, w);
}

template <int fragments>
struct Wgmma {
    template <Major a_major, Major b_major>
    static void multiply(Fragment* d, unsigned a, unsigned b, int add, Where w = caller()) {
        machine_wgmma(d->x, fragments, nullptr, a, a_major == Major::MN, b, b_major == Major::MN, add != 0, IS_BFLOAT16, w);
    }
    template <Major b_major>
    static void multiply(Fragment* d, const unsigned (&a)[4], unsigned b, int add, Where w = caller()) {
        machine_wgmma(d->x, fragments, a, 0, false, b, b_major == Major::MN, add != 0, IS_BFLOAT16, w);
    }
};

inline void multiply_warp(Fragment& d, const unsigned (&a)[4], const unsigned (&b)[4], Where w = caller()) {
    for (int half = 0; half < 2; ++half) machine_mma_half(d.x + 4 * half, a, b + 2 * half, IS_BFLOAT16, w);
}

// ---- arithmetic ----
inline float inverse_fast(float x) { return 1.0f / x; }
inline float log2_fast(float x) { return std::log2(x); }

// NaN for a non-finite half, since 0 times it is NaN.
inline unsigned add_zero_times(unsigned sum, unsigned pair) {
    const unsigned found = nonfinite(pair, static_cast<const ELEMENT*>(nullptr));
    return sum | (found & 0x8000u ? 0x7fffu : 0u) | (found & 0x80000000u ? 0x7fff0000u : 0u);
}
