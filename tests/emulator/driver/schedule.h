// Fibers take turns: barriers, meetings of lanes, and the order in which threads and warps run.
#pragma once
#include <algorithm>
#include <iterator>
#include <random>

#include "state.h"
#include "watch.h"

namespace {

const OpenMeeting* meet(unsigned mask, MeetingKind kind, uint64_t value, Where where,
                        void (*finish)(OpenMeeting&) = nullptr);

// ---- clocks (shadow.h) ----
void learn(Clocks& clocks, const Clocks& more) {
    if (clocks.size() < more.size()) clocks.resize(more.size());
    for (size_t i = 0; i < more.size(); ++i) clocks[i] = std::max(clocks[i], more[i]);
}

// Passes everything that the running thread has done and seen to the thread that opens the barrier.
void tell(Event& e) {
    Thread& t = self();
    learn(e.arriving, t.clocks);
    ++t.clocks[m.current];
}

// From now on, each of these threads has seen what any of them has seen.
void exchange(const std::vector<unsigned>& threads) {
    Clocks all;
    for (unsigned i : threads) learn(all, m.threads[i]->clocks);
    for (unsigned i : threads) {
        m.threads[i]->clocks = all;
        ++m.threads[i]->clocks[i];
    }
}

// Lanes of a warp need to share what they know only once there are barriers for some threads.
void begin_events() {
    if (m.has_events) return;
    m.has_events = true;
    std::vector<unsigned> lanes;
    for (unsigned i = 0; i < m.size; ++i) {
        lanes.push_back(i);
        if (i % 32 < 31 && i + 1 < m.size) continue;
        exchange(lanes);
        lanes.clear();
    }
}

void wake(const OpenMeeting& o, unsigned warp) {
    for (unsigned lane = 0; lane < 32; ++lane)
        if (o.arrived >> lane & 1) m.threads[warp * 32 + lane]->state = READY;
}

bool everybody_is_there(const OpenMeeting& o, const Warp& w) { return (o.meeting.mask & w.alive & ~o.arrived) == 0; }

void complete(OpenMeeting& o, unsigned warp) {
    Warp& w = m.warps[warp];
    o.complete = true;
    o.meeting.present = o.arrived;
    const bool orders = o.kind == SYNC_WARP || o.kind == WGMMA;  // MMAs read for all lanes
    if (orders) {  // a wait by one lane counts for all lanes
        uint32_t barrier = 0;
        for (unsigned lane = 0; lane < 32; ++lane)
            if (o.arrived >> lane & 1) barrier = std::max(barrier, m.threads[warp * 32 + lane]->barrier);
        std::vector<unsigned> threads;
        for (unsigned lane = 0; lane < 32; ++lane)
            if (o.arrived >> lane & 1) {
                m.threads[warp * 32 + lane]->barrier = barrier;
                threads.push_back(warp * 32 + lane);
            }
        if (m.has_events || (w.alive & ~o.arrived) != 0) exchange(threads);
    }
    if (orders && (w.alive & ~o.arrived) == 0) {
        ++w.sync;
        for (unsigned lane = 0; lane < 32; ++lane)
            if (o.arrived >> lane & 1) m.threads[warp * 32 + lane]->warp_sync = w.sync;
    }
    wake(o, warp);
}

void leave_last_meeting() {
    Thread& t = self();
    if (t.last) t.last->left |= 1u << (m.current & 31);
    t.last = nullptr;
}

const OpenMeeting* meet(unsigned mask, MeetingKind kind, uint64_t value, Where where, void (*finish)(OpenMeeting&)) {
    Thread& t = self();
    const unsigned warp = m.current / 32, lane = m.current & 31;
    Warp& w = m.warps[warp];
    leave_last_meeting();
    if (!(mask >> lane & 1))
        fault(format("%s at %s: lane %u is not in its own mask 0x%08x", MEETING_NAMES[kind], at(where).c_str(), lane,
                     mask));
    OpenMeeting* o = nullptr;
    for (OpenMeeting& other : w.meetings)
        if (!other.complete && other.meeting.mask == mask) o = &other;
    if (o && (o->kind != kind || o->where.line != where.line || std::strcmp(o->where.file, where.file)))
        fault(format("lanes of warp %u diverge: lanes 0x%08x wait for %s at %s, lane %u comes to %s at %s", warp,
                     o->arrived, MEETING_NAMES[o->kind], at(o->where).c_str(), lane, MEETING_NAMES[kind],
                     at(where).c_str()));
    if (!o) {
        for (OpenMeeting& other : w.meetings)
            if (other.complete && other.left == other.arrived) o = &other;
        if (!o) o = &w.meetings.emplace_back();
        o->meeting.mask = mask;
        o->kind = kind;
        o->where = where;
        o->arrived = o->left = 0;
        o->complete = false;
    }
    o->meeting.values[lane] = value;
    o->arrived |= 1u << lane;
    t.last = o;
    if (everybody_is_there(*o, w)) {
        if (finish) finish(*o);
        complete(*o, warp);
    } else {
        t.state = AT_MEETING;
        t.where = where;
        t.what = MEETING_NAMES[kind];
        yield();
    }
    return o;
}

void open_barrier() {
    ++m.barriers;
    ++m.syncs;
    m.arrived = 0;
    for (unsigned i = 0; i < m.size; ++i)
        if (m.threads[i]->state == AT_BARRIER) {
            m.threads[i]->state = READY;
            m.threads[i]->barrier = m.barriers;
            m.threads[i]->syncs = m.syncs;
        }
}

// The running thread has waited for a phase that has ended.
void pass(const Event& e) {
    self().barrier = m.barriers;
    learn(self().clocks, e.opened);
}

void land_tiles(Event& e);

// Ends the phase if nothing is missing: waiting threads continue, ordered after everything before the arrivals
// (shadow.h). Bytes arrive when nothing else is missing and some thread waits for them (`asked`).
void settle(Event& e, bool waits, bool asked) {
    if (e.pending > 0) return;
    if (asked || !e.waiting.empty()) land_tiles(e);
    if (e.bytes > 0) return;
    if (e.bytes < 0) fault(format("%lld bytes more have come to an mbarrier than it was told to expect", -e.bytes));
    e.pending = e.count;
    ++e.phase;
    ++m.barriers;
    e.opened.swap(e.arriving);
    e.arriving.clear();
    if (waits) pass(e);
    for (unsigned i : e.waiting) {
        m.threads[i]->state = READY;
        m.threads[i]->barrier = m.barriers;
        learn(m.threads[i]->clocks, e.opened);
    }
    e.waiting.clear();
}

// Counts one arrival.
void arrive(Event& e, bool waits) {
    if (e.pending == 0) fault("an arrival at a barrier that has had all of its phase");
    --e.pending;
    tell(e);
    settle(e, waits, waits);
}

Event& event_at(uint64_t* barrier, Where where) {
    machine_access(barrier, 8, ATOMIC, where);
    const auto found = m.events.find(reinterpret_cast<uintptr_t>(barrier));
    if (found == m.events.end()) fault("mbarrier at " + at(where) + ": it has not been initialised");
    return found->second;
}

void wait_for(Event& e, const char* what, Where where) {
    Thread& t = self();
    e.waiting.push_back(m.current);
    t.state = AT_EVENT;
    t.where = where;
    t.what = what;
    yield();
}

void run_thread() {
    m.enter(m.params);
    Thread& t = self();
    machine_copy_wait(0);
    for (auto& group : t.bulk)
        if (!group.empty())
            fault("bulk reduction at " + at(group.front().where) + ": the thread exits without having waited for it");
    for (const auto& group : t.mmas)
        if (!group.empty()) fault("wgmma at " + at(group.front().where) + ": the thread exits without having waited for it");
    if (!t.stores.empty())
        fault("cp.async.bulk.tensor at " + at(t.stores.front().where) + ": the thread exits without having waited for it");
    if (!t.waited) fault("the thread exits without having waited for earlier kernels");
    leave_last_meeting();
    t.state = DONE;
    const unsigned warp = m.current / 32;
    Warp& w = m.warps[warp];
    w.alive &= ~(1u << (m.current & 31));
    --m.alive;
    for (OpenMeeting& o : w.meetings)
        if (!o.complete && everybody_is_there(o, w)) {
            if (o.kind >= WMMA_LOAD)
                fault(format("%s at %s: a lane of the warp has exited", MEETING_NAMES[o.kind], at(o.where).c_str()));
            complete(o, warp);
        }
    if (m.alive > 0 && m.arrived == m.alive) open_barrier();  // threads that have exited are not waited for
    void* unused;
    fiber_switch(&unused, m.scheduler);
}

// ---- blocks ----
std::string waiting_threads() {
    std::map<std::string, std::vector<int>> groups;
    for (unsigned i = 0; i < m.size; ++i) {
        const Thread& t = *m.threads[i];
        groups[t.state == DONE ? "have exited" : format("wait for %s at %s", t.what, at(t.where).c_str())].push_back(i);
    }
    std::string text;
    for (auto& [what, members] : groups) {
        text += format("\n  %zu threads %s:", members.size(), what.c_str());
        for (size_t i = 0; i < members.size(); ++i) {  // runs of consecutive numbers
            size_t last = i;
            while (last + 1 < members.size() && members[last + 1] == members[last] + 1) ++last;
            text += last > i ? format(" %d-%d", members[i], members[last]) : format(" %d", members[i]);
            i = last;
        }
    }
    return text;
}

struct Order {
    std::string name;
    std::mt19937* random;

    template <typename T>
    void arrange(std::vector<T>& items) const {  // items may come in any order
        if (name == "random") {
            std::shuffle(items.begin(), items.end(), *random);
            return;
        }
        std::sort(items.begin(), items.end());
        if (name == "backward") std::reverse(items.begin(), items.end());
    }
};

void run(unsigned i) {
    m.current = static_cast<int>(i);
    threadIdx.x = i;
    fiber_switch(&m.scheduler, m.threads[i]->context);
    m.current = -1;
}

// Runs one warp until none of its lanes can continue, or for `patience` rounds over its lanes.
bool run_warp(unsigned warp, const Order& order, std::vector<unsigned>& lanes, unsigned patience) {
    bool any = false, again = true;
    for (unsigned round = 0; again && round < patience; ++round) {
        again = false;
        order.arrange(lanes);
        for (unsigned lane : lanes) {
            const unsigned i = warp * 32 + lane;
            if (i >= m.size || m.threads[i]->state != READY) continue;
            run(i);
            again = any = true;
            if (!m.error.empty()) return true;
        }
    }
    return any;
}

void poison_shared() {
    Library& l = *m.library;
    const auto fill = [](uintptr_t begin, uintptr_t end) {
        std::memset(reinterpret_cast<void*>(begin), 0xff, end - begin);
    };
    fill(l.tls_begin, l.dynamic);
    fill(l.dynamic, l.dynamic + m.dynamic_bytes);
    fill(l.dynamic + l.dynamic_size, l.tls_end);
}

// The first block of the cluster starts after the others have ended: gives it what they wrote to its shared memory.
void receive() {
    Library& l = *m.library;
    std::memcpy(reinterpret_cast<void*>(l.dynamic), reinterpret_cast<void*>(m.first->begin), m.dynamic_bytes);
    for (size_t i = 0; i < m.first->cells.size(); ++i) {
        const Cell& cell = m.first->cells[i];
        if (!cell.initialised) continue;
        SharedCell& own = m.shared_cells[(l.dynamic - l.tls_begin) / CELL_BYTES + i];
        own.write = {m.blocks, 0, 0, 0, 0, false, cell.write.site};
        const auto released = m.released.find(cell.write.block);
        own.awaited = released == m.released.end() ? ~0u : released->second;
        own.readers = own.in_flight = 0;
    }
}

void run_block(const Order& order) {
    ++m.blocks;
    m.alive = m.size;
    m.arrived = 0;
    m.barriers = m.syncs = 0;
    std::fill(std::begin(m.named), std::end(m.named), Event());
    m.events.clear();
    m.has_events = false;
    m.tma_loads.clear();
    m.known.clear();
    m.shared_atomics.clear();
    poison_shared();
    if (m.first && blockIdx.x % m.library->cluster == 0) receive();
    const unsigned warp_count = (m.size + 31) / 32;
    m.warps.resize(warp_count);
    for (unsigned w = 0; w < warp_count; ++w) {
        m.warps[w].alive = m.size - w * 32 >= 32 ? ~0u : (1u << (m.size - w * 32)) - 1;
        m.warps[w].sync = 0;
        m.warps[w].meetings.clear();
    }
    for (unsigned i = 0; i < m.size; ++i) {
        Thread& t = *m.threads[i];
        t.context = t.stack.start(run_thread);
        t.state = READY;
        t.last = nullptr;
        t.barrier = t.warp_sync = t.syncs = 0;
        t.waited = m.alone;
        t.cluster_arrivals = t.cluster_waits = 0;
        t.released = false;
        t.clocks.assign(m.size, 0);
        t.clocks[i] = 1;
        t.groups.clear();
        t.bulk.clear();
        t.mmas.clear();
        t.stores.clear();
    }
    std::vector<unsigned> warps(warp_count), lanes(32);
    for (unsigned w = 0; w < warp_count; ++w) warps[w] = w;
    for (unsigned lane = 0; lane < 32; ++lane) lanes[lane] = lane;
    while (m.alive > 0) {
        bool any = false;
        order.arrange(warps);
        for (unsigned w : warps) {
            const unsigned patience = order.name == "random" ? 1 + (*order.random)() % 8 : ~0u;
            any = run_warp(w, order, lanes, patience) || any;
            if (!m.error.empty()) return;
        }
        if (!any) {
            m.error = "deadlock: nobody can go on\n  in kernel " + m.kernel + format(", block %u", blockIdx.x) +
                      waiting_threads();
            return;
        }
    }
    if (!m.tma_loads.empty())
        m.error = "cp.async.bulk.tensor at " + at(m.tma_loads.front().where) + ": the block ends before its bytes have come\n  in kernel " +
                  m.kernel + format(", block %u", blockIdx.x);
}

// Blocks in their order of execution: cluster by cluster, and the first block of a cluster last.
std::vector<unsigned> arranged(unsigned grid, unsigned cluster, const Order& order) {
    std::vector<unsigned> clusters(grid / cluster), others(cluster - 1), blocks;
    for (unsigned i = 0; i < clusters.size(); ++i) clusters[i] = i;
    for (unsigned i = 0; i < others.size(); ++i) others[i] = i + 1;
    order.arrange(clusters);
    for (unsigned i : clusters) {
        order.arrange(others);
        for (unsigned rank : others) blocks.push_back(i * cluster + rank);
        blocks.push_back(i * cluster);
    }
    return blocks;
}

// Called before the first executed block of a cluster.
void begin_cluster() {
    const size_t bytes = m.dynamic_bytes;
    m.first_memory.assign(bytes + 1024, 0xff);
    m.first = std::make_unique<Region>();
    m.first->name = "shared memory of the cluster's first block";
    m.first->begin = place_of_first();
    m.first->end = m.first->begin + bytes;
    m.first->cells.resize(bytes / CELL_BYTES + 1);
    m.released.clear();
}

}  // namespace
