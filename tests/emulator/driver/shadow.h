// The emulator's record of every two bytes of memory: who read and wrote them last, and whether they were ever written.
//
// Two accesses by different threads are a race if one of them writes (and not both are atomic) and nothing orders them:
//   shared memory          a barrier of the block, or for lanes of a warp a __syncwarp or the wait for their MMAs. Beyond
//                          that each thread has a clock, and knows up to which time of each other thread's it has seen what
//                          that did: from a barrier of some threads that both came to, or from others that knew.
//   global memory, in a    a barrier of the block, or one of some threads that the later one has waited at. Barriers are
//   block                  numbered as they open. An access carries the number opened last, a thread that of the last one
//                          it waited at: if that is higher, the barrier opened after the access. For barriers of the whole
//                          block this is exact; others also order threads that did not come to them, so that races can be
//                          missed, but none is reported wrongly. Lanes of a warp: a __syncwarp, too.
//   different blocks       the end of the launch, or a ticket (take_ticket in arch.cuh): who takes one is ordered behind all
//                          that came before those that were taken from the same counter earlier, and what these saw (watch.h)
// Of reads, and of atomic changes, the last one of each warp counts. Shuffles and votes order nothing, as in CUDA's own rules.
// Neighbouring single bytes of shared memory share a cell; arrays of single bytes have a cell for each.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

constexpr unsigned CELL_BYTES = 2;

// An access to shared memory.
struct Access {
    uint32_t epoch = 0;                           // serial number of the block; 0: never
    uint32_t clock = 0, syncs = 0, warp_sync = 0;  // of the thread
    uint16_t thread = 0;
    bool atomic = false;
    uint64_t site = 0;  // where in the source: see driver.cpp
};

struct SharedCell {
    Access write;
    uint32_t in_flight = 0;  // epoch of an asynchronous copy to here that no thread has waited for
    uint32_t readers = 0;    // warps that have read it since `write`
    uint32_t awaited = 0;    // another block of the cluster wrote it: threads see it from this wait for the cluster on
};

// The same for global memory: when and by whom it was accessed, as needed for ordering.
struct Moment {
    uint32_t epoch = 0;  // serial number of the launch; 0: never
    uint32_t block = 0, barrier = 0, opened = 0, warp_sync = 0;  // barrier: waited at; opened: by anybody
    uint16_t thread = 0;
    bool many_lanes = false, many_warps = false;  // more threads of the block than `thread` did so
    bool many_blocks = false;                     // threads of other blocks did too: see `others` in state.h
    bool atomic = false;
    uint64_t site = 0;  // where in the source: see driver.cpp

    bool same_warp(const Moment& other) const { return thread / 32 == other.thread / 32; }

    // Whether an access `now` of the same block is not ordered after this.
    bool unordered(const Moment& now) const {
        if (now.barrier > opened) return false;
        if (many_warps || !same_warp(now)) return true;
        return warp_sync == now.warp_sync && (many_lanes || thread != now.thread);
    }

    // Records one more access, of the same block or a later epoch; drops accesses that all relevant later ones are
    // ordered after.
    void add(const Moment& now) {
        if (epoch != now.epoch || now.barrier > opened) {
            const bool blocks = epoch == now.epoch && many_blocks;
            *this = now;
            many_blocks = blocks;
        } else if (!same_warp(now)) {
            many_warps = true;
            opened = now.opened;
        } else if (warp_sync != now.warp_sync) {
            const bool blocks = many_blocks, warps = many_warps;
            *this = now;
            many_blocks = blocks;
            many_warps = warps;
        } else {
            many_lanes = many_lanes || thread != now.thread;
            opened = now.opened;
        }
    }
};

struct Cell {
    Moment read, write;
    uint16_t writes = 0;        // in the launch of `write`
    uint16_t most_writes = 0;   // in any launch
    bool initialised = false;
};

// A piece of global memory that a kernel may touch.
struct Region {
    int id;
    uintptr_t begin, end;
    std::string name;
    bool writable;
    unsigned cell;                // bytes of a cell
    std::vector<Cell> cells;      // of writable memory
    std::vector<uint8_t> valid;   // for read-only memory, one per byte; empty: all valid
};
