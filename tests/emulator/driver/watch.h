// Checks every memory access: is it within bounds, has the memory been written, does it race?
#pragma once
#include <algorithm>

#include "state.h"

namespace {

Moment now(uint32_t epoch, bool atomic, Site site) {
    const Thread& t = self();
    Moment moment;
    moment.epoch = epoch;
    moment.block = blockIdx.x;
    moment.barrier = t.barrier;
    moment.opened = m.barriers;
    moment.warp_sync = t.warp_sync;
    moment.thread = static_cast<uint16_t>(m.current);
    moment.atomic = atomic;
    moment.site = site;
    return moment;
}

bool is_read(AccessKind kind) { return kind == READ || kind == LOOK; }

const char* const DOES[] = {"reads", "writes", "changes it atomically", "reads"};  // by AccessKind

// Names memory in a fault's message: "shared memory + 12", "out + 12".
struct Memory {
    const char* name;
    uintptr_t begin;
};

std::string describe(const Memory& memory, uintptr_t address) {
    return format("%s + %zu bytes", memory.name, static_cast<size_t>(address - memory.begin));
}

std::string by(const Moment& moment, const char* did) {
    return format("%s%u of block %u %s at ", moment.many_lanes || moment.many_warps || moment.many_blocks
                  ? "several threads, among them " : "thread ", moment.thread, moment.block, did) + at(moment.site);
}

// Whether `now` is ordered, by a ticket or the cluster, after another block's access `before`.
bool handed_over(const Moment& before, const Moment& now) {
    for (const Known& known : m.known) {
        if (known.block != before.block || (now.thread != known.to && now.barrier <= known.at)) continue;
        const bool own = before.thread == known.handover.thread && !before.many_lanes && !before.many_warps;
        if (own || before.opened < known.handover.barrier) return true;
    }
    return false;
}

bool unordered(const Moment& before, const Moment& now) {
    if (before.epoch != now.epoch) return false;
    const auto one = [&](const Moment& moment) {
        return moment.block == now.block ? moment.unordered(now) : !handed_over(moment, now);
    };
    if (one(before)) return true;
    return before.many_blocks && std::any_of(m.others[&before].begin(), m.others[&before].end(), one);
}

void note(Moment& moments, const Moment& now) {
    if (moments.epoch != now.epoch || moments.block == now.block) return moments.add(now);
    auto& others = m.others[&moments];
    moments.many_blocks = true;
    for (Moment& other : others)
        if (other.block == now.block) return other.add(now);
    others.push_back(now);
}

void check_race(const Moment& before, const char* did, const Moment& moment, const char* does, const Memory& memory,
                uintptr_t address) {
    if ((before.atomic && moment.atomic) || !unordered(before, moment)) return;
    fault("race on " + describe(memory, address) + ": " + by(before, did) + ", " + by(moment, does) +
          ", and no barrier is between them");
}

void touch(Cell& cell, const Memory& memory, uintptr_t address, AccessKind kind, const Moment& moment) {
    if ((kind == READ || kind == ATOMIC) && !cell.initialised)
        fault("read of uninitialised " + describe(memory, address) + " at " + at(moment.site));
    check_race(cell.write, cell.write.atomic ? "changed it atomically" : "wrote", moment, DOES[kind], memory, address);
    if (is_read(kind)) {
        note(cell.read, moment);
        return;
    }
    check_race(cell.read, "read", moment, DOES[kind], memory, address);
    cell.writes = cell.write.epoch == moment.epoch ? cell.writes + (cell.writes < 65535) : 1;
    cell.most_writes = std::max(cell.most_writes, cell.writes);
    if (kind == ATOMIC && cell.write.atomic)
        note(cell.write, moment);  // later accesses must be ordered after each of them
    else
        cell.write = moment;
    cell.initialised = true;
}

// ---- shared memory ----
void check_race(const Access& before, const char* did, AccessKind kind, const Memory& memory, uintptr_t address, Site site) {
    const Thread& t = self();
    if (before.epoch != m.blocks || before.thread == m.current || before.syncs < t.syncs) return;
    if (before.thread / 32 == m.current / 32 && before.warp_sync < t.warp_sync) return;
    if (before.clock <= t.clocks[before.thread]) return;
    fault("race on " + describe(memory, address) + format(": thread %u of block %u %s at ", before.thread, blockIdx.x, did) +
          at(before.site) + format(", thread %d %s at ", m.current, DOES[kind]) + at(site) + ", and no barrier is between them");
}

void touch_shared(size_t i, const Memory& memory, uintptr_t address, AccessKind kind, Site site) {
    SharedCell& cell = m.shared_cells[i];
    const unsigned warp = m.current / 32;
    const bool changed = cell.write.epoch == m.blocks, changed_atomically = changed && cell.write.atomic;
    const Thread& t = self();
    const Access now{m.blocks,       t.clocks[m.current],     t.syncs, t.warp_sync, static_cast<uint16_t>(m.current),
                     kind == ATOMIC, site};
    if (cell.in_flight == m.blocks)
        fault(format("%s of ", is_read(kind) ? "read" : "write") + describe(memory, address) + " at " + at(site) +
              ": an asynchronous copy to it has not been waited for");
    if ((kind == READ || kind == ATOMIC) && !changed)
        fault("read of uninitialised " + describe(memory, address) + " at " + at(site));
    if (changed && cell.awaited > t.cluster_waits)
        fault("race on " + describe(memory, address) + " at " + at(site) +
              ": another block of the cluster wrote it, and the thread has not waited for its arrival");
    if (!changed_atomically)
        check_race(cell.write, "wrote", kind, memory, address, site);
    else if (kind != ATOMIC)
        for (const Access& before : m.shared_atomics[i])
            check_race(before, "changed it atomically", kind, memory, address, site);
    if (is_read(kind)) {
        m.shared_reads[warp][i] = now;
        cell.readers |= 1u << warp;
        return;
    }
    for (; cell.readers != 0; cell.readers &= cell.readers - 1)
        check_race(m.shared_reads[__builtin_ctz(cell.readers)][i], "read", kind, memory, address, site);
    cell.write = now;
    cell.awaited = 0;
    if (kind != ATOMIC) return;
    auto& changes = m.shared_atomics[i];
    if (!changed_atomically) changes.assign(m.warps.size(), Access());
    changes[warp] = now;
}

template <typename Do>
void for_each_cell(uintptr_t begin, size_t bytes, uintptr_t base, unsigned cell, const Do& act) {
    for (uintptr_t a = begin & ~uintptr_t(cell - 1); a < begin + bytes; a += cell) act((a - base) / cell, a);
}

const char* access_name(AccessKind kind) { return is_read(kind) ? "read" : kind == WRITE ? "write" : "atomic change"; }

[[noreturn]] void out_of_bounds(uintptr_t address, size_t bytes, AccessKind kind, Site site) {
    std::string near = "no array is near";
    uintptr_t best = 1 << 20;
    auto consider = [&](const std::string& name, uintptr_t begin, uintptr_t end) {
        const bool inside = begin <= address && address < end;
        const uintptr_t distance = inside ? 0 : address < begin ? begin - address : address - end;
        if (distance >= best) return;
        best = distance;
        near = inside ? "it is in a gap of " + name
                      : format("%zu bytes %s ", static_cast<size_t>(distance),
                                      address < begin ? "ahead of" : "behind the end of") + name;
    };
    for (auto& r : m.regions) consider(r->name, r->begin, r->end);
    consider("dynamic shared memory", m.library->dynamic, m.library->dynamic + m.dynamic_bytes);
    fault(format("%s of %zu bytes out of bounds at ", access_name(kind), bytes) + at(site) + ": " + near);
}

bool is_readable(const Region& r, uintptr_t address, size_t bytes) {
    if (r.writable) return true;  // its cells record this
    if (r.valid.empty()) return true;
    for (size_t i = address - r.begin; i < address - r.begin + bytes; ++i)
        if (!r.valid[i]) return false;
    return true;
}

const char* const TOO_EARLY = ": the thread has not waited for earlier kernels";

// An access by the running thread to anything but its own stack.
void access(uintptr_t address, size_t bytes, AccessKind kind, Site site) {
    if (bytes == 0) return;
    ++m.accesses;
    Library& library = *m.library;
    if (address - library.tls_begin < library.tls_end - library.tls_begin) {
        if (address >= library.dynamic && address + bytes > library.dynamic + m.dynamic_bytes &&
            address < library.dynamic + library.dynamic_size)
            out_of_bounds(address, bytes, kind, site);
        const Memory memory{"shared memory", library.tls_begin};
        for_each_cell(address, bytes, library.tls_begin, CELL_BYTES, [&](size_t i, uintptr_t a) {
            touch_shared(i, memory, a, kind, site);
        });
        return;
    }
    if (m.first && address >= m.first->begin && address + bytes <= m.first->end) {
        const Memory memory{m.first->name.c_str(), m.first->begin};
        if (self().cluster_waits == 0)
            fault(format("%s of ", access_name(kind)) + describe(memory, address) + " at " + at(site) +
                  ": the thread has not waited until that block runs");
        const Moment moment = now(m.launches, kind == ATOMIC, site);
        for_each_cell(address, bytes, m.first->begin, CELL_BYTES, [&](size_t i, uintptr_t a) {
            touch(m.first->cells[i], memory, a, kind, moment);
        });
        return;
    }
    Region* refused = nullptr;
    for (auto& r : m.regions) {
        if (address < r->begin || address + bytes > r->end) continue;
        if ((kind != READ && !r->writable) || !is_readable(*r, address, bytes)) {
            refused = r.get();
            continue;
        }
        const Memory memory{r->name.c_str(), r->begin};
        if (!self().waited)
            fault(format("%s of ", access_name(kind)) + describe(memory, address) + " at " + at(site) + TOO_EARLY);
        if (!r->writable) return;
        const Moment moment = now(m.launches, kind == ATOMIC, site);
        for_each_cell(address, bytes, r->begin, r->cell, [&](size_t i, uintptr_t a) {
            touch(r->cells[i], memory, a, kind, moment);
        });
        return;
    }
    if (refused && kind != READ)
        fault(format("%s of read-only %s + %zu bytes at ", access_name(kind), refused->name.c_str(),
                     static_cast<size_t>(address - refused->begin)) + at(site));
    if (self().stack.holds(reinterpret_cast<void*>(address))) return;
    if (kind == READ) {  // constants, the thread's index, the results of a meeting
        for (auto [begin, end] : library.image)
            if (begin <= address && address + bytes <= end) return;
        const auto is_in = [&](const void* p, size_t size) { return address - reinterpret_cast<uintptr_t>(p) < size; };
        if (is_in(&threadIdx, sizeof threadIdx) || is_in(&blockIdx, sizeof blockIdx) ||
            is_in(&blockDim, sizeof blockDim) || is_in(&gridDim, sizeof gridDim))
            return;
        if (self().last && is_in(self().last, sizeof(OpenMeeting))) return;
    }
    out_of_bounds(address, bytes, kind, site);
}

inline void report(const void* address, size_t bytes, AccessKind kind, const void* code) {
    if (m.current < 0) return;
    if (self().stack.holds(address)) return;
    access(reinterpret_cast<uintptr_t>(address), bytes, kind, site_of(code));
}

// ---- asynchronous copies ----
void mark_in_flight(uintptr_t to, size_t bytes, bool begins) {
    Library& library = *m.library;
    if (to - library.tls_begin >= library.tls_end - library.tls_begin) return;
    for_each_cell(to, bytes, library.tls_begin, CELL_BYTES, [&](size_t i, uintptr_t) {
        m.shared_cells[i].in_flight = begins ? m.blocks : 0;
    });
}

void perform(const Copy& copy) {
    const uintptr_t to = reinterpret_cast<uintptr_t>(copy.to);
    if (m.watched) {
        mark_in_flight(to, copy.bytes, false);
        if (copy.valid > 0) access(reinterpret_cast<uintptr_t>(copy.from), copy.valid, READ, site_of(copy.where));
        access(to, copy.bytes, WRITE, site_of(copy.where));
    }
    std::memset(copy.to, 0, copy.bytes);
    std::memcpy(copy.to, copy.from, copy.valid);
}

}  // namespace
