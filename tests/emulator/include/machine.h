// The interface of compiled kernels to the emulated machine. The driver (driver/driver.cpp) implements it.
//
// A thread of the emulated GPU is a fiber: it runs until it must wait for others, which it does inside one of these
// functions only. Each that can wait, or can find the kernel at fault, takes the place in the source it is called from.
// A fault ends the launch: the function does not return.
#pragma once
#include <cstddef>
#include <cstdint>

struct Where {
    const char* file;
    int line;
};
// As a default argument of an intrinsic: the location of its call.
inline Where caller(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }

struct Index3 {
    unsigned x, y, z;
};

enum MeetingKind { SYNC_WARP, SHUFFLE, VOTE, REDUCE, WMMA_LOAD, WMMA_STORE, WMMA_MULTIPLY, MMA_TF32, MMA_HALF, WGMMA };
enum BarrierKind { BARRIER, BARRIER_OR, BARRIER_AND, BARRIER_COUNT };
enum AccessKind { READ = 0, WRITE = 1, ATOMIC = 2, LOOK = 3 };  // LOOK: a read of memory that need not have been written

// Lanes of a warp that have met, with the data of each. `present` lacks lanes that have exited.
struct Meeting {
    uint64_t values[32];
    unsigned mask, present;
};

extern "C" {
extern Index3 threadIdx, blockIdx, blockDim, gridDim;

// All threads of the block that have not exited (as on hardware) wait for each other.
int machine_barrier(BarrierKind kind, int value, Where where);

// Named barriers (bar.sync, bar.arrive): opens when `threads` threads have come to barrier `id`; not all need to wait.
void machine_named_barrier(int id, int threads, bool wait, Where where);

// Barriers in shared memory (mbarrier): a phase ends when `count` arrivals have come, and all bytes that it was told to
// expect. A thread waits until the phase with the given parity has ended; the first phase has parity 0.
void machine_mbarrier_init(uint64_t* barrier, unsigned count, Where where);
void machine_mbarrier_end(uint64_t* barrier, Where where);
void machine_mbarrier_arrive(uint64_t* barrier, Where where);
void machine_mbarrier_expect(uint64_t* barrier, int bytes, Where where);
bool machine_mbarrier_test(uint64_t* barrier, int parity, Where where);
void machine_mbarrier_wait(uint64_t* barrier, int parity, Where where);

// The lanes of `mask` that have not exited wait for each other. Valid until the lane's next meeting.
const Meeting* machine_meet(unsigned mask, MeetingKind kind, uint64_t value, Where where);

// Fragments of 16 x 16 16-bit elements (elements 8 to 15 repeat 0 to 7), and of 16 x 16 floats (8 elements a lane).
// `by_column`: element (row, column) of the tile stands at column * ld + row.
void machine_wmma_load(uint16_t* x, bool is_b, bool by_column, const uint16_t* tile, unsigned ld, Where where);
void machine_wmma_multiply(float* d, const uint16_t* a, const uint16_t* b, const float* c, bool bfloat16, Where where);
void machine_wmma_load_float(float* x, bool by_column, const float* tile, unsigned ld, Where where);
void machine_wmma_store_float(float* tile, bool by_column, const float* x, unsigned ld, Where where);

// mma m16n8k8 with TF32 operands, which must have been rounded: c (4 elements a lane) += a (4) * b (2).
void machine_mma_tf32(float* c, const float* a, const float* b, Where where);

// mma m16n8k16 with 16-bit operands, two in a word: c (4 elements a lane) += a (4 words) * b (2 words).
void machine_mma_half(float* c, const uint32_t* a, const uint32_t* b, bool bfloat16, Where where);

// Warpgroup MMAs (wgmma m64nNk16), N = 16 * fragments: d (8 * fragments elements a lane) = or += a * b. Operands are
// read, and d is written, at the wait for their group; until then d is poison. Descriptors are the lower words of the
// hardware's, with addresses from the beginning of dynamic shared memory on, for rows of 128 swizzled bytes.
// a: four words of the lane, or 0 and a descriptor. `a_by_rows`, `b_by_rows`: k counts the rows of the matrix in memory,
// not its columns.
void machine_wgmma(float* d, int fragments, const uint32_t* a, uint32_t a_descriptor, bool a_by_rows, uint32_t b_descriptor,
                   bool b_by_rows, bool add, bool bfloat16, Where where);
void machine_wgmma_commit();
void machine_wgmma_wait(int pending, Where where);

// The running thread has waited for earlier kernels in the stream: it may now access global memory, and exit.
void machine_wait_for_earlier_kernels();

// The running thread learns everything that earlier takers of a ticket from this counter knew and had done.
void machine_ticket(const void* counter);

// Clusters of blocks. The blocks of a cluster run one after another, the first one last: it finds what the others wrote
// to its shared memory. A thread may touch another block's memory after its first wait. The first block's threads see
// what a block did after their wait for that block's last arrival that `releases`.
void machine_cluster_arrive(bool releases);
void machine_cluster_wait(Where where);
void* machine_first_of_cluster(void* shared);

// cp.async: the bytes arrive at the wait for their group, and are poison until then.
void machine_copy_async(void* shared, const void* global, int bytes, int valid, Where where);
void machine_copy_commit();
void machine_copy_wait(int pending);

// cp.async.bulk.tensor: a tile of a tensor from these coordinates on, to shared memory, which is poison until somebody waits
// at the barrier for its bytes; or from shared memory, which is read at the thread's wait for what it has committed.
// `map` is what the emulator's own driver function made (copy_engine.py).
void machine_tma_load(void* shared, const void* map, uint64_t* barrier, const int* at, int axes, Where where);
void machine_tma_store(const void* map, const void* shared, const int* at, int axes, Where where);
void machine_tma_store_commit();
void machine_tma_store_wait();

// cp.reduce.async.bulk: shared memory is read, and added to global memory, at the wait for the group; it must have been
// written before.
void machine_bulk_reduce(float* global, const float* shared, int bytes, Where where);
void machine_bulk_commit();
void machine_bulk_wait(int pending);

// An access that the compiler does not report, such as an atomic.
void machine_access(const void* address, size_t bytes, AccessKind kind, Where where);

// __trap(), a failed assert.
[[noreturn]] void machine_trap(const char* what, Where where);
}
