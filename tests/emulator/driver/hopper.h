// Features of Hopper: warpgroup MMAs and TMA (machine.h, include/sm90_host.h).
//
// All of these are asynchronous and run as late as allowed: MMAs when their warp waits for them, a tile of a tensor
// when some thread waits for its bytes, a tile of outputs when its thread waits for it.
#pragma once
#include "schedule.h"
#include "tensor.h"

namespace {

// ---- matrices in shared memory, rows of 128 bytes ("128-byte swizzle") ----
constexpr unsigned ROW_BYTES = 128, PIECE_BYTES = 16, ROWS_OF_SWIZZLE = 8;

uintptr_t in_shared(unsigned address) { return m.library->dynamic + address; }

// The 16-byte pieces of a row are permuted by the row's number modulo eight.
unsigned swizzled(unsigned address) { return address ^ (address / ROW_BYTES % ROWS_OF_SWIZZLE * PIECE_BYTES); }

// For these bytes of a row, in order: the number of the first element, and its address.
template <typename Take>
void for_each_piece(unsigned address, unsigned bytes, Where where, const Take& take) {
    for (unsigned i = 0; i < bytes; i += PIECE_BYTES) {
        const uintptr_t piece = in_shared(swizzled(address + i));
        if (m.watched) access(piece, PIECE_BYTES, LOOK, site_of(where));
        take(i / 2, reinterpret_cast<const uint16_t*>(piece));
    }
}

// ---- warpgroup MMAs ----
unsigned first_of(uint32_t descriptor) { return (descriptor & 0x3fff) * 16; }
unsigned chunk_bytes_of(uint32_t descriptor) { return (descriptor >> 16 & 0x3fff) * 16; }

// The lane's elements are poison until the MMAs are done; the accumulators' old values are kept meanwhile.
void begin(WarpMma& mma) {
    for (const auto& group : self().mmas)
        for (const WarpMma& other : group)
            if (other.d < mma.d + 8 * mma.fragments && mma.d < other.d + 8 * other.fragments) {
                if (other.d != mma.d || other.fragments != mma.fragments)
                    fault("wgmma at " + at(mma.where) + ": it overlaps with accumulators of another shape that are under way");
                return;
            }
    mma.before.assign(mma.d, mma.d + 8 * mma.fragments);
    std::memset(mma.d, 0xff, 8 * mma.fragments * sizeof(float));
}

// The warp's rows of the left factor, (row, k).
std::vector<float> left(const std::vector<WarpMma*>& lanes) {
    std::vector<float> a(16 * 16);
    const WarpMma& any = *lanes[0];
    const unsigned warp = m.current / 32 % 4;
    for (int k = 0; !any.a && any.a_by_rows && k < 16; ++k)
        for_each_piece(first_of(any.a_descriptor) + k * ROW_BYTES + 32 * warp, 32, any.where, [&](int row, const uint16_t* x) {
            for (int i = 0; i < 8; ++i) a[(row + i) * 16 + k] = widen(x[i], any.bfloat16);
        });
    for (int row = 0; !any.a && !any.a_by_rows && row < 16; ++row)
        for_each_piece(first_of(any.a_descriptor) + (16 * warp + row) * ROW_BYTES, 32, any.where, [&](int k, const uint16_t* x) {
            for (int i = 0; i < 8; ++i) a[row * 16 + k + i] = widen(x[i], any.bfloat16);
        });
    for (int lane = 0; any.a && lane < 32; ++lane) {
        const WarpMma& p = *lanes[lane];
        if (std::memcmp(p.a, p.a_before, sizeof p.a_before))
            fault(format("wgmma at %s: lane %d has changed a register that it reads", at(p.where).c_str(), lane));
        for (int i = 0; i < 8; ++i)
            a[row_of(lane, i) * 16 + column_of(lane, i)] = widen(static_cast<uint16_t>(p.a[i / 2] >> 16 * (i % 2)), p.bfloat16);
    }
    return a;
}

// The right factor, (k, column).
std::vector<float> right(const WarpMma& p) {
    const int columns = 16 * p.fragments;
    std::vector<float> b(16 * columns);
    const unsigned first = first_of(p.b_descriptor);
    if (!p.b_by_rows) {
        for (int n = 0; n < columns; ++n)
            for_each_piece(first + n * ROW_BYTES, 32, p.where, [&](int k, const uint16_t* x) {
                for (int i = 0; i < 8; ++i) b[(k + i) * columns + n] = widen(x[i], p.bfloat16);
            });
        return b;
    }
    const unsigned within = first % ROW_BYTES, chunk = chunk_bytes_of(p.b_descriptor);
    if (within + std::min(columns, 64) * 2 > ROW_BYTES)
        fault("wgmma at " + at(p.where) + ": its columns go beyond a row of 128 bytes");
    for (int k = 0; k < 16; ++k)
        for (int n = 0; n < columns; n += 64)
            for_each_piece(first + n / 64 * chunk + k * ROW_BYTES, std::min(columns - n, 64) * 2, p.where,
                           [&](int column, const uint16_t* x) {
                               for (int i = 0; i < 8; ++i) b[k * columns + n + column + i] = widen(x[i], p.bfloat16);
                           });
    return b;
}

// One MMA of a warp's 16 rows, each element summed in order of k, every step rounded to float32.
void multiply_rows(const std::vector<WarpMma*>& lanes) {
    const WarpMma& any = *lanes[0];
    for (const WarpMma* p : lanes)
        if (p->fragments != any.fragments || p->b_descriptor != any.b_descriptor || p->add != any.add || !p->a != !any.a ||
            p->a_descriptor != any.a_descriptor || p->a_by_rows != any.a_by_rows || p->where.line != any.where.line)
            fault("wgmma at " + at(any.where) + ": the lanes of a warp ask for different MMAs");
    const int columns = 16 * any.fragments;
    const auto place = [&](int lane, int i) {
        return row_of(lane, i % 8) * columns + i / 8 * 16 + column_of(lane, i % 8);
    };
    const std::vector<float> a = left(lanes), b = right(any);
    std::vector<float> accumulators(16 * columns);
    for (int lane = 0; lane < 32; ++lane) {
        const WarpMma& p = *lanes[lane];
        const float* before = p.before.empty() ? p.d : p.before.data();
        for (int i = 0; any.add && i < 8 * any.fragments; ++i)
            accumulators[place(lane, i)] = before[i];
    }
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < columns; ++n) accumulators[row * columns + n] += a[row * 16 + k] * b[k * columns + n];
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 8 * any.fragments; ++i) lanes[lane]->d[i] = accumulators[place(lane, i)];
}

// All lanes of a warp have reached the wait: completes its oldest groups, except for those that may stay pending.
void finish_mmas(OpenMeeting& o) {
    const unsigned warp = m.current / 32;
    const auto mmas = [&](unsigned lane) -> auto& { return m.threads[warp * 32 + lane]->mmas; };
    const auto same = [&](bool so) {
        if (!so) fault("wgmma.wait_group at " + at(o.where) + ": the lanes of a warp have issued different MMAs");
    };
    const size_t keep = o.meeting.values[0] + 1;  // the last one is still open
    for (unsigned lane = 0; lane < 32; ++lane)
        same(mmas(lane).size() == mmas(0).size() && o.meeting.values[lane] == o.meeting.values[0]);
    while (mmas(0).size() > keep) {
        for (size_t i = 0; i < mmas(0).front().size(); ++i) {
            std::vector<WarpMma*> lanes;
            for (unsigned lane = 0; lane < 32; ++lane) {
                same(mmas(lane).front().size() == mmas(0).front().size());
                lanes.push_back(&mmas(lane).front()[i]);
            }
            multiply_rows(lanes);
        }
        for (unsigned lane = 0; lane < 32; ++lane) mmas(lane).erase(mmas(lane).begin());
    }
}

// ---- TMA ----
// The rows of a tile, in order: their place in memory (0: none of it is in the tensor), how many of their bytes are in the
// tensor, and their number.
template <typename Act>
void for_each_row(const TensorDescription& t, const int* at, const Act& act) {
    unsigned rows = 1;
    for (unsigned axis = 1; axis < t.axes; ++axis) rows *= t.tile[axis];
    for (unsigned row = 0; row < rows; ++row) {
        uintptr_t from = t.pointer + 2 * static_cast<int64_t>(at[0]);
        bool inside = at[0] >= 0 && static_cast<uint64_t>(at[0]) < t.shape[0];
        for (unsigned axis = 1, rest = row; axis < t.axes; rest /= t.tile[axis], ++axis) {
            const int64_t i = at[axis] + static_cast<int64_t>(rest % t.tile[axis]);
            inside = inside && i >= 0 && static_cast<uint64_t>(i) < t.shape[axis];
            from += i * t.stride[axis - 1];
        }
        const uint64_t left = inside ? t.shape[0] - at[0] : 0;
        act(row, inside ? from : 0, static_cast<unsigned>(std::min(left, t.tile[0])) * 2);
    }
}

void check_tma(const TensorDescription& t, const void* shared, int axes, const char* what, Where where) {
    if (!self().waited) fault(format("%s at ", what) + at(where) + TOO_EARLY);
    if (t.axes != static_cast<uint64_t>(axes) || t.tile[0] * 2 != ROW_BYTES)
        fault(format("%s at %s: the map is one of %zu axes, with tiles of %zu columns", what, at(where).c_str(),
                     static_cast<size_t>(t.axes), static_cast<size_t>(t.tile[0])));
    const uintptr_t address = reinterpret_cast<uintptr_t>(shared) - m.library->dynamic;
    if (address >= m.dynamic_bytes || address % ROW_BYTES)
        fault(format("%s at %s: its place in dynamic shared memory must be a multiple of 128 bytes", what, at(where).c_str()));
}

// The 16-byte pieces of a tile's row in shared memory.
template <typename Act>
void for_each_shared_piece(const void* shared, unsigned row, const Act& act) {
    const unsigned first = static_cast<unsigned>(reinterpret_cast<uintptr_t>(shared) - m.library->dynamic) + row * ROW_BYTES;
    for (unsigned i = 0; i < ROW_BYTES; i += PIECE_BYTES) act(i, in_shared(swizzled(first + i)));
}

void land(const TmaLoad& tile) {
    const int running = m.current;
    m.current = tile.thread;
    for_each_row(tile.tensor, tile.at, [&](unsigned row, uintptr_t from, unsigned bytes) {
        if (m.watched && bytes > 0) access(from, bytes, READ, site_of(tile.where));
        for_each_shared_piece(tile.shared, row, [&](unsigned i, uintptr_t to) {
            if (m.watched) {
                mark_in_flight(to, PIECE_BYTES, false);
                access(to, PIECE_BYTES, WRITE, site_of(tile.where));
            }
            std::memset(reinterpret_cast<void*>(to), 0, PIECE_BYTES);
            if (i < bytes)
                std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from + i), std::min(PIECE_BYTES, bytes - i));
        });
        tile.event->bytes -= ROW_BYTES;
    });
    tell(*tile.event);
    m.current = running;
}

// Tiles whose bytes are all that is missing at a barrier with a waiting thread.
void land_tiles(Event& e) {
    for (auto tile = m.tma_loads.begin(); tile != m.tma_loads.end();) {
        if (tile->event != &e) {
            ++tile;
            continue;
        }
        land(*tile);
        tile = m.tma_loads.erase(tile);
    }
}

void store(const TmaStore& tile) {
    for_each_row(tile.tensor, tile.at, [&](unsigned row, uintptr_t to, unsigned bytes) {
        for_each_shared_piece(tile.shared, row, [&](unsigned i, uintptr_t from) {
            if (i >= bytes) return;
            const unsigned size = std::min(PIECE_BYTES, bytes - i);
            if (m.watched) {
                access(from, size, READ, site_of(tile.where));
                access(to + i, size, WRITE, site_of(tile.where));
            }
            std::memcpy(reinterpret_cast<void*>(to + i), reinterpret_cast<const void*>(from), size);
        });
    });
}

}  // namespace

extern "C" {
void machine_wgmma(float* d, int fragments, const uint32_t* a, uint32_t a_descriptor, bool a_by_rows, uint32_t b_descriptor,
                   bool b_by_rows, bool add, bool bfloat16, Where where) {
    WarpMma mma{d, fragments, a, {}, a_descriptor, b_descriptor, a_by_rows, b_by_rows, add, bfloat16, where, {}};
    if (a) std::memcpy(mma.a_before, a, sizeof mma.a_before);
    begin(mma);
    if (self().mmas.empty()) self().mmas.emplace_back();
    self().mmas.back().push_back(std::move(mma));
}

void machine_wgmma_commit() {
    if (self().mmas.empty()) self().mmas.emplace_back();
    self().mmas.emplace_back();
}

void machine_wgmma_wait(int pending, Where where) {
    if (self().mmas.empty()) self().mmas.emplace_back();
    meet(~0u, WGMMA, pending, where, finish_mmas);
}

void machine_tma_load(void* shared, const void* map, uint64_t* barrier, const int* at, int axes, Where where) {
    TmaLoad tile{m.current, shared, *static_cast<const TensorDescription*>(map), {}, &event_at(barrier, where), where};
    std::copy(at, at + axes, tile.at);
    check_tma(tile.tensor, shared, axes, "cp.async.bulk.tensor", where);
    for_each_row(tile.tensor, tile.at, [&](unsigned row, uintptr_t, unsigned) {
        for_each_shared_piece(shared, row, [&](unsigned, uintptr_t to) {
            if (m.watched) {
                access(to, PIECE_BYTES, WRITE, site_of(where));
                mark_in_flight(to, PIECE_BYTES, true);
            }
            std::memset(reinterpret_cast<void*>(to), 0xff, PIECE_BYTES);
        });
    });
    m.tma_loads.push_back(tile);
    if (!tile.event->waiting.empty() && tile.event->pending == 0) settle(*tile.event, false, false);
}

void machine_tma_store(const void* map, const void* shared, const int* at, int axes, Where where) {
    TmaStore tile{shared, *static_cast<const TensorDescription*>(map), {}, false, where};
    std::copy(at, at + axes, tile.at);
    check_tma(tile.tensor, shared, axes, "cp.async.bulk.tensor", where);
    for_each_row(tile.tensor, tile.at, [&](unsigned row, uintptr_t, unsigned bytes) {
        for_each_shared_piece(shared, row, [&](unsigned i, uintptr_t from) {
            if (m.watched && i < bytes) access(from, std::min(PIECE_BYTES, bytes - i), READ, site_of(where));
        });
    });
    self().stores.push_back(tile);
}

void machine_tma_store_commit() {
    for (TmaStore& tile : self().stores) tile.committed = true;
}

void machine_tma_store_wait() {
    auto& stores = self().stores;
    while (!stores.empty() && stores.front().committed) {
        store(stores.front());
        stores.pop_front();
    }
}
}
