// What decides which slot the next token takes.
#pragma once
#include "common/arch.cuh"

// The lowest key of the top among some slots, and the first free slot.
struct Candidate {
    long long position;
    unsigned rank;
    int slot, free;  // NO_SLOT if there is none
};

constexpr int NO_SLOT = 2147483647;
constexpr Candidate NOTHING = {0, 0, NO_SLOT, NO_SLOT};

// Keeps the lower of two lowest keys, and the first of two free slots.
__device__ __forceinline__ void merge(Candidate& own, const Candidate& other) {
    const bool below = other.rank < own.rank || (other.rank == own.rank && other.position < own.position);
    const int free = min(own.free, other.free);
    if (other.slot != NO_SLOT && (own.slot == NO_SLOT || below)) own = other;
    own.free = free;
}

// The same, over a warp.
__device__ __forceinline__ Candidate merge_lanes(const Candidate& own) {
    const auto lowest = [](bool among, unsigned x) { return __reduce_min_sync(ALL_LANES, among ? x : ~0u); };
    bool among = own.slot != NO_SLOT;
    const unsigned rank = lowest(among, own.rank);
    among = among && own.rank == rank;
    const unsigned high = static_cast<unsigned>(own.position >> 32), highest = lowest(among, high);
    among = among && high == highest;
    const unsigned low = static_cast<unsigned>(own.position), lower = lowest(among, low);
    among = among && low == lower;
    const unsigned slot = lowest(among, own.slot);
    return {static_cast<long long>(static_cast<unsigned long long>(highest) << 32 | lower), rank,
            slot == ~0u ? NO_SLOT : static_cast<int>(slot),
            static_cast<int>(__reduce_min_sync(ALL_LANES, static_cast<unsigned>(own.free)))};
}
