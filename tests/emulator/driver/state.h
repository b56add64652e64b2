// The state of the emulated machine, source locations, and the end of a faulty launch.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <setjmp.h>
#include <stdexcept>
#include <string>
#include <vector>

#include "../include/machine.h"
#include "fiber.h"
#include "shadow.h"

extern "C" {
Index3 threadIdx, blockIdx, blockDim, gridDim;
}

namespace {

enum State { READY, AT_BARRIER, AT_MEETING, AT_EVENT, DONE };
const char* const MEETING_NAMES[] = {"__syncwarp", "a shuffle", "a vote", "a warp reduction", "load_matrix_sync",
                                     "store_matrix_sync", "mma_sync", "mma", "mma", "wgmma.wait_group"};
const char* const BARRIER_NAMES[] = {"__syncthreads", "__syncthreads_or", "__syncthreads_and", "__syncthreads_count"};

struct Copy {
    char* to;
    const char* from;
    int bytes, valid;
    Where where;
};

struct BulkReduction {
    float* to;
    const float* from;
    int bytes;
    Where where;
};

// For every thread of the block, the time on its clock up to which its actions have been seen.
using Clocks = std::vector<uint32_t>;

// A named barrier, or a barrier in shared memory.
struct Event {
    unsigned count = 0, pending = 0, phase = 0;  // arrivals per phase, arrivals still missing, completed phases
    long long bytes = 0;                         // bytes that the phase still waits for
    std::vector<unsigned> waiting;
    Clocks arriving, opened;  // knowledge of the threads that arrived in this phase, and in the last completed one
};

// A tensor of 16-bit elements as copy_engine.py describes it.
struct TensorDescription {
    uint64_t axes, pointer, shape[5], stride[4], tile[5];  // strides in bytes, of all axes but the first
};
static_assert(sizeof(TensorDescription) == 128, "as large as the hardware's");

// A tile of a tensor on its way to shared memory, and from there.
struct TmaLoad {
    int thread;
    void* shared;
    TensorDescription tensor;
    int at[5];
    Event* event;
    Where where;
};
struct TmaStore {
    const void* shared;
    TensorDescription tensor;
    int at[5];
    bool committed;
    Where where;
};

// A lane's part of a warpgroup MMA.
struct WarpMma {
    float* d;
    int fragments;
    const uint32_t* a;
    uint32_t a_before[4];  // when it was issued
    uint32_t a_descriptor, b_descriptor;
    bool a_by_rows, b_by_rows, add, bfloat16;
    Where where;
    std::vector<float> before;  // d when it was issued; empty: the result of earlier MMAs
};

// What later takers of a ticket know of a block: everything before its barrier `barrier`, and everything that its
// thread `thread` did.
struct Handover {
    uint32_t barrier;
    uint16_t thread;
};
using Handovers = std::map<uint32_t, Handover>;  // by block
// What a block learned of another one by a ticket: known to its thread `to`, and to threads that waited at a barrier
// after `at`.
struct Known {
    uint32_t block, at;
    uint16_t to;
    Handover handover;
};

struct OpenMeeting {
    Meeting meeting;  // first member: a lane gets its address
    MeetingKind kind;
    Where where;
    unsigned arrived, left;
    bool complete;
};

struct Thread {
    Stack stack;
    void* context;
    State state;
    Where where;                           // it waits at
    const char* what;                      // it waits for
    OpenMeeting* last;                     // the meeting whose results it may still read
    uint32_t barrier, warp_sync;           // passed so far
    uint32_t syncs;                        // barriers of the whole block it has passed
    bool waited;                           // whether it has waited for earlier kernels
    uint32_t cluster_arrivals, cluster_waits;
    bool released;  // by the last of its arrivals at the cluster's barrier
    Clocks clocks;                         // its own clock, and what it has seen of the others
    std::vector<std::deque<Copy>> groups;  // asynchronous copies under way, the youngest group last
    std::vector<std::deque<BulkReduction>> bulk;  // bulk reductions under way, youngest group last
    std::vector<std::deque<WarpMma>> mmas;  // warpgroup MMAs under way, youngest group last
    std::deque<TmaStore> stores;                    // tma_loads that have not been waited for
};

struct Warp {
    unsigned alive;
    uint32_t sync;
    std::deque<OpenMeeting> meetings;  // an entry is reused when all lanes have left
};

struct Library {
    std::string path;
    void* handle;
    uintptr_t base, tls_begin, tls_end, dynamic;  // tls: static and dynamic shared memory
    size_t dynamic_size;
    unsigned cluster;  // blocks of a cluster
    std::vector<std::pair<uintptr_t, uintptr_t>> image;  // mapped segments
};

struct Fault : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Machine {
    std::vector<std::unique_ptr<Thread>> threads;
    std::vector<Warp> warps;
    std::vector<std::unique_ptr<Region>> regions;
    std::vector<SharedCell> shared_cells;
    std::vector<std::vector<Access>> shared_reads;             // by warp, and cell
    std::map<size_t, std::vector<Access>> shared_atomics;      // by cell, and warp; where the last change was atomic
    std::vector<std::unique_ptr<Library>> libraries;
    int next_region = 0;

    // of the launch
    Library* library = nullptr;
    std::string kernel, error;
    void (*enter)(const void*) = nullptr;
    alignas(64) char params[4096];  // the maximum size, with the alignment that a tensor map needs
    bool watched = false, alone = false;  // alone: no kernel precedes this one, so threads need not wait
    bool abandoned = false;  // a launch ended while fibers were running
    size_t dynamic_bytes = 0;
    uint32_t launches = 0, blocks = 0;  // serial numbers, over all launches
    uint64_t accesses = 0;
    std::map<const void*, Handovers> tickets;                // per counter: who has taken a ticket, and what they knew
    std::map<const Moment*, std::vector<Moment>> others;     // accesses of other blocks than the Moment's own

    // of the cluster: what other blocks write to its first one's dynamic shared memory
    std::vector<unsigned char> first_memory;
    std::unique_ptr<Region> first;
    std::map<uint32_t, uint32_t> released;  // by block: its last arrival that releases what it did

    // of the block
    unsigned size = 0, alive = 0, arrived = 0;
    uint32_t barriers = 0, syncs = 0;  // barriers of any kind that have opened; those of the whole block
    bool has_events = false;  // barriers of some threads
    Event named[16];
    std::map<uintptr_t, Event> events;  // barriers in shared memory, by address
    std::deque<TmaLoad> tma_loads;              // on their way
    int barrier_result[2];
    Where barrier_where;
    BarrierKind barrier_kind;
    std::vector<Known> known;    // what it has learned by tickets

    int current = -1;  // the running thread
    void* scheduler = nullptr;
    sigjmp_buf signalled;
};
Machine m;

Thread& self() { return *m.threads[m.current]; }

std::string format(const char* text, ...) {
    char buffer[1024];
    va_list arguments;
    va_start(arguments, text);
    vsnprintf(buffer, sizeof buffer, text, arguments);
    va_end(arguments);
    return buffer;
}

// A place in the source in one word: that of an intrinsic's call (file and line), or a code address, which runtime.py
// turns into file and line.
using Site = uint64_t;

Site site_of(Where where) {
    return 1ull << 63 | static_cast<uint64_t>(where.line) << 47 | reinterpret_cast<uintptr_t>(where.file);
}
Site site_of(const void* code) { return reinterpret_cast<uintptr_t>(code); }

std::string at(Where where) {
    const char* slash = std::strrchr(where.file, '/');
    return format("%s:%d", slash ? slash + 1 : where.file, where.line);
}

std::string at(Site site) {
    const char* file = reinterpret_cast<const char*>(site & ((1ull << 47) - 1));
    if (site >> 63) return at(Where{file, static_cast<int>(site >> 47 & 0xffff)});
    return format("<+0x%zx>", static_cast<size_t>(site - m.library->base - 1));
}

// A second place for dynamic shared memory, aligned as the first.
uintptr_t place_of_first() {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(m.first_memory.data());
    return begin + (1024 - begin % 1024) % 1024;
}

std::string place() {
    return format("kernel %s, block %u, thread %d", m.kernel.c_str(), blockIdx.x, m.current);
}

// Ends the launch and abandons its fibers.
[[noreturn]] void fault(const std::string& what) {
    m.error = what + "\n  in " + place();
    void* unused;
    fiber_switch(&unused, m.scheduler);
    __builtin_unreachable();
}

void yield() { fiber_switch(&self().context, m.scheduler); }

}  // namespace
