// The emulated GPU: runs blocks one after another, with threads as fibers, and records every access to memory.
//
// Python (runtime.py) loads a compiled kernel, tells which memory it may touch, and launches it. Kernels compiled with
// g++ -fsanitize=thread report each of their loads and stores by calling the __tsan_* functions, which are defined here
// and not by the sanitizer's own library; kernels compiled without it run faster and unobserved.
#include <dlfcn.h>
#include <link.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "hopper.h"
#include "schedule.h"
#include "signals.h"
#include "state.h"
#include "tensor.h"
#include "watch.h"

namespace py = pybind11;

extern "C" {
// AddressSanitizer's, where its library is loaded.
__attribute__((weak)) void __asan_poison_memory_region(const volatile void* begin, size_t bytes);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void* begin, size_t bytes);
}

namespace {

int load(const std::string& path) {
    auto l = std::make_unique<Library>();
    l->path = path;
    l->handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!l->handle) throw std::runtime_error(dlerror());
    auto* dynamic = reinterpret_cast<unsigned char* (*)()>(dlsym(l->handle, "dynamic_shared_memory"));
    auto* size = static_cast<const size_t*>(dlsym(l->handle, "dynamic_shared_size"));
    auto* cluster = static_cast<const unsigned*>(dlsym(l->handle, "cluster_size"));
    if (!dynamic || !size || !cluster) throw std::runtime_error(path + " is no emulated kernel");
    l->dynamic = reinterpret_cast<uintptr_t>(dynamic());  // the thread-local storage exists from here on
    l->dynamic_size = *size;
    l->cluster = *cluster;
    Dl_info info;
    dladdr(reinterpret_cast<void*>(dynamic), &info);
    l->base = reinterpret_cast<uintptr_t>(info.dli_fbase);
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
            Library& l = *static_cast<Library*>(data);
            if (info->dlpi_addr != l.base) return 0;
            for (int i = 0; i < info->dlpi_phnum; ++i) {
                const auto& header = info->dlpi_phdr[i];
                if (header.p_type == PT_LOAD)
                    l.image.emplace_back(l.base + header.p_vaddr, l.base + header.p_vaddr + header.p_memsz);
                if (header.p_type != PT_TLS) continue;
                l.tls_begin = reinterpret_cast<uintptr_t>(info->dlpi_tls_data);
                l.tls_end = l.tls_begin + header.p_memsz;
            }
            return 1;
        },
        l.get());
    if (l->dynamic - l->tls_begin >= l->tls_end - l->tls_begin) throw std::runtime_error("shared memory was not found");
    m.libraries.push_back(std::move(l));
    return static_cast<int>(m.libraries.size()) - 1;
}

// Tells AddressSanitizer the size of dynamic shared memory, and clears what abandoned fibers left on stacks.
void tell_address_sanitizer() {
    if (!__asan_poison_memory_region) return;
    const Library& l = *m.library;
    __asan_unpoison_memory_region(reinterpret_cast<void*>(l.dynamic), l.dynamic_size);
    const size_t unused = l.dynamic_size - m.dynamic_bytes;
    __asan_poison_memory_region(reinterpret_cast<void*>(l.dynamic + m.dynamic_bytes), unused);
    if (m.abandoned)
        for (auto& t : m.threads) __asan_unpoison_memory_region(t->stack.base(), Stack::BYTES);
    m.abandoned = false;
}

void launch(int library, const std::string& kernel, unsigned grid, unsigned threads, py::bytes params,
            size_t shared_bytes, bool watched, const std::string& thread_order, const std::string& block_order,
            unsigned seed, bool alone) {
    m.library = m.libraries.at(library).get();
    m.kernel = kernel;
    const std::string_view given = params;
    m.enter = reinterpret_cast<void (*)(const void*)>(dlsym(m.library->handle, ("enter_" + kernel).c_str()));
    auto* size = static_cast<const size_t*>(dlsym(m.library->handle, ("params_of_" + kernel).c_str()));
    if (!m.enter || !size) throw std::runtime_error(m.library->path + " has no kernel " + kernel);
    if (*size != given.size() || *size > sizeof m.params)
        throw Fault(format("kernel %s takes %zu bytes of parameters, the launch passes %zu", kernel.c_str(), *size,
                           given.size()));
    std::copy(given.begin(), given.end(), m.params);
    if (threads < 1 || threads > 1024) throw Fault(format("kernel %s: %u threads in a block", kernel.c_str(), threads));
    if (shared_bytes > m.library->dynamic_size)
        throw Fault(format("kernel %s: %zu bytes of shared memory", kernel.c_str(), shared_bytes));
    m.watched = watched;
    m.alone = alone;
    m.dynamic_bytes = shared_bytes;
    m.size = threads;
    m.error.clear();
    ++m.launches;
    m.tickets.clear();
    m.others.clear();
    blockDim = {threads, 1, 1};
    gridDim = {grid, 1, 1};
    while (m.threads.size() < threads) m.threads.push_back(std::make_unique<Thread>());
    tell_address_sanitizer();
    const size_t cells = (m.library->tls_end - m.library->tls_begin) / CELL_BYTES + 1;
    if (m.shared_cells.size() < cells) m.shared_cells.resize(cells);
    m.shared_reads.resize(std::max<size_t>(m.shared_reads.size(), (threads + 31) / 32));
    for (auto& reads : m.shared_reads)
        if (reads.size() < cells) reads.resize(cells);

    std::mt19937 random(seed);
    const unsigned cluster = m.library->cluster;
    if (grid % cluster)
        throw Fault(format("kernel %s: %u blocks, in clusters of %u", kernel.c_str(), grid, cluster));
    const std::vector<unsigned> blocks = arranged(grid, cluster, Order{block_order, &random});
    const Order order{thread_order, &random};
    unsigned number = 0;
    {
        const Signals signals;
        if (sigsetjmp(m.signalled, 0) == 0)
            for (unsigned block : blocks) {
                blockIdx = {block, 0, 0};
                if (cluster > 1 && number++ % cluster == 0) begin_cluster();
                run_block(order);
                if (!m.error.empty()) break;
            }
    }
    m.current = -1;
    m.first.reset();
    m.abandoned = m.abandoned || !m.error.empty();
    if (!m.error.empty()) throw Fault(m.error);
}

// `item`: bytes of an element; one-byte elements are watched one by one.
int add_region(uintptr_t pointer, size_t bytes, const std::string& name, bool writable, py::object valid, unsigned item) {
    auto r = std::make_unique<Region>();
    r->id = m.next_region++;
    r->begin = pointer;
    r->end = pointer + bytes;
    r->name = name;
    r->writable = writable;
    r->cell = std::min(item, CELL_BYTES);
    if (writable) r->cells.resize(bytes / r->cell + 2);
    if (!valid.is_none()) {
        py::array_t<uint8_t, py::array::c_style> array = valid;
        r->valid.assign(array.data(), array.data() + array.size());
    }
    m.regions.push_back(std::move(r));
    return m.regions.back()->id;
}

std::vector<std::unique_ptr<Region>>::iterator find_region(int id) {
    return std::find_if(m.regions.begin(), m.regions.end(), [&](auto& r) { return r->id == id; });
}

void remove_region(int id) {
    const auto r = find_region(id);
    if (r != m.regions.end()) m.regions.erase(r);
}

// Marks all of it as written by the host.
void initialise_region(int id) {
    const auto r = find_region(id);
    if (r != m.regions.end())
        for (Cell& cell : (*r)->cells) cell.initialised = true;
}

// Sets memory in one region to zero, as the host does between launches.
void clear(uintptr_t pointer, size_t bytes) {
    for (auto& r : m.regions)
        if (r->writable && r->begin <= pointer && pointer + bytes <= r->end) {
            std::memset(reinterpret_cast<void*>(pointer), 0, bytes);
            for (size_t i = (pointer - r->begin) / r->cell; i * r->cell < pointer - r->begin + bytes; ++i)
                r->cells[i].initialised = true;
            return;
        }
    throw Fault("memory is set to zero that the call has not made");
}

// Makes memory read-only from now on: written bytes can be read.
void freeze_region(int id) {
    const auto found = find_region(id);
    if (found == m.regions.end()) return;
    Region& r = **found;
    r.valid.resize(r.end - r.begin);
    for (size_t i = 0; i < r.valid.size(); ++i) r.valid[i] = r.cells[i / r.cell].initialised;
    r.cells.clear();
    r.writable = false;
}

// (offset of the first byte never written, offset of the first byte written more than `most` times in a launch); -1:
// none.
py::tuple written(int id, int most) {
    const auto found = find_region(id);
    if (found == m.regions.end()) throw std::runtime_error("no such region");
    long long never = -1, often = -1;
    const Region& r = **found;
    for (size_t i = 0; i < (r.end - r.begin) / r.cell; ++i) {
        if (never < 0 && !r.cells[i].initialised) never = i * r.cell;
        if (often < 0 && r.cells[i].most_writes > most) often = i * r.cell;
    }
    return py::make_tuple(never, often);
}

}  // namespace

// ---- functions called by kernels (machine.h) ----
extern "C" {
int machine_barrier(BarrierKind kind, int value, Where where) {
    Thread& t = self();
    leave_last_meeting();
    if (m.arrived > 0 && (m.barrier_where.line != where.line || std::strcmp(m.barrier_where.file, where.file)))
        fault(format("threads diverge: some wait for %s at %s, this one comes to %s at %s",
                     BARRIER_NAMES[m.barrier_kind], at(m.barrier_where).c_str(), BARRIER_NAMES[kind],
                     at(where).c_str()));
    int& result = m.barrier_result[m.syncs & 1];
    if (m.arrived == 0) result = kind == BARRIER_AND;
    m.barrier_where = where;
    m.barrier_kind = kind;
    result = kind == BARRIER_OR ? result || value : kind == BARRIER_AND ? result && value : result + (value != 0);
    t.state = AT_BARRIER;
    t.where = where;
    t.what = BARRIER_NAMES[kind];
    if (++m.arrived == m.alive)
        open_barrier();
    else
        yield();
    return result;
}

void machine_named_barrier(int id, int threads, bool wait, Where where) {
    leave_last_meeting();
    if (id < 0 || id > 15 || threads <= 0 || threads % 32)
        fault(format("named barrier %d of %d threads at %s: there are barriers 0 to 15, of whole warps", id, threads,
                     at(where).c_str()));
    begin_events();
    Event& e = m.named[id];
    if (e.pending == e.count) e.count = e.pending = threads;  // a new phase
    if (e.count != static_cast<unsigned>(threads))
        fault(format("named barrier %d at %s: of %d threads here, of %u where others came to it", id, at(where).c_str(),
                     threads, e.count));
    const bool last = e.pending == 1;
    if (wait && !last) {
        --e.pending;
        tell(e);
        wait_for(e, "a named barrier", where);
    } else {
        arrive(e, wait);
    }
}

void machine_cluster_arrive(bool releases) {
    Thread& t = self();
    ++t.cluster_arrivals;
    t.released = releases;
    if (releases) m.released[blockIdx.x] = t.cluster_arrivals;
}

void machine_cluster_wait(Where where) {
    Thread& t = self();
    if (++t.cluster_waits > t.cluster_arrivals) fault("the thread waits for the cluster without having arrived, at " + at(where));
    if (!t.released) return;
    if (m.arrived == 0)  // the first thread of the own block, for which this is a barrier, too
        for (const auto& [block, number] : m.released)
            if (number <= t.cluster_waits && block != blockIdx.x)
                m.known.push_back({block, m.barriers, static_cast<uint16_t>(m.current), {~0u, 0}});
    machine_barrier(BARRIER, 0, where);
}

void* machine_first_of_cluster(void* shared) {
    if (!m.first || blockIdx.x % m.library->cluster == 0) return shared;
    return reinterpret_cast<void*>(m.first->begin + (reinterpret_cast<uintptr_t>(shared) - m.library->dynamic));
}

void machine_mbarrier_init(uint64_t* barrier, unsigned count, Where where) {
    if (count == 0) fault("mbarrier of no arrivals at " + at(where));
    begin_events();
    machine_access(barrier, 8, WRITE, where);
    Event& e = m.events[reinterpret_cast<uintptr_t>(barrier)] = Event();
    e.count = e.pending = count;
}

void machine_mbarrier_end(uint64_t* barrier, Where where) {
    if (!event_at(barrier, where).waiting.empty()) fault("mbarrier at " + at(where) + ": somebody waits at it");
    m.events.erase(reinterpret_cast<uintptr_t>(barrier));
}

void machine_mbarrier_arrive(uint64_t* barrier, Where where) { arrive(event_at(barrier, where), false); }

void machine_mbarrier_expect(uint64_t* barrier, int bytes, Where where) { event_at(barrier, where).bytes += bytes; }

bool machine_mbarrier_test(uint64_t* barrier, int parity, Where where) {
    const Event& e = event_at(barrier, where);
    if ((e.phase & 1) == static_cast<unsigned>(parity & 1)) return false;
    pass(e);
    return true;
}

void machine_mbarrier_wait(uint64_t* barrier, int parity, Where where) {
    leave_last_meeting();
    Event& e = event_at(barrier, where);
    const auto has_ended = [&] { return (e.phase & 1) != static_cast<unsigned>(parity & 1); };
    if (!has_ended()) settle(e, false, true);
    if (!has_ended()) return wait_for(e, "an mbarrier", where);
    pass(e);
}

const Meeting* machine_meet(unsigned mask, MeetingKind kind, uint64_t value, Where where) {
    return &meet(mask, kind, value, where)->meeting;
}

void machine_copy_async(void* shared, const void* global, int bytes, int valid, Where where) {
    const Copy copy{static_cast<char*>(shared), static_cast<const char*>(global), bytes, valid, where};
    const uintptr_t to = reinterpret_cast<uintptr_t>(shared), from = reinterpret_cast<uintptr_t>(global);
    if (to - m.library->tls_begin >= m.library->tls_end - m.library->tls_begin)
        fault("asynchronous copy at " + at(where) + ": the destination is not in shared memory");
    if (to % bytes || from % bytes)
        fault(format("asynchronous copy of %d bytes at %s: addresses must be multiples of that", bytes,
                     at(where).c_str()));
    if (valid < 0 || valid > bytes) fault("asynchronous copy at " + at(where) + ": more bytes to read than to write");
    if (m.watched) {
        if (valid > 0) access(from, valid, READ, site_of(where));
        access(to, bytes, WRITE, site_of(where));
        mark_in_flight(to, bytes, true);
    }
    std::memset(shared, 0xff, bytes);
    if (self().groups.empty()) self().groups.emplace_back();
    self().groups.back().push_back(copy);
}

void machine_copy_commit() {
    if (self().groups.empty()) self().groups.emplace_back();
    self().groups.emplace_back();
}

void machine_copy_wait(int pending) {
    auto& groups = self().groups;  // the last one is still open
    const size_t keep = pending + 1;  // -1: the open group too
    while (groups.size() > keep) {
        for (const Copy& copy : groups.front()) perform(copy);
        groups.erase(groups.begin());
    }
}

void machine_bulk_reduce(float* global, const float* shared, int bytes, Where where) {
    if (bytes % 16 || reinterpret_cast<uintptr_t>(global) % 16 || reinterpret_cast<uintptr_t>(shared) % 16)
        fault("bulk reduction at " + at(where) + ": addresses and size must be multiples of 16 bytes");
    if (!self().waited) fault("bulk reduction at " + at(where) + TOO_EARLY);
    for (int i = 0; i < bytes / 4; ++i) machine_access(shared + i, 4, READ, where);  // the hardware may read it now or at the wait
    if (self().bulk.empty()) self().bulk.emplace_back();
    self().bulk.back().push_back({global, shared, bytes, where});
}

void machine_bulk_commit() {
    if (self().bulk.empty()) self().bulk.emplace_back();
    self().bulk.emplace_back();
}

void machine_bulk_wait(int pending) {
    auto& groups = self().bulk;
    const size_t keep = pending + 1;
    while (groups.size() > keep) {
        for (const BulkReduction& r : groups.front())
            for (int i = 0; i < r.bytes / 4; ++i) {
                machine_access(r.from + i, 4, READ, r.where);
                machine_access(r.to + i, 4, ATOMIC, r.where);
                r.to[i] += r.from[i];
            }
        groups.erase(groups.begin());
    }
}

void machine_access(const void* address, size_t bytes, AccessKind kind, Where where) {
    if (reinterpret_cast<uintptr_t>(address) % bytes)
        fault(format("%s of %zu bytes at %s: the address is not a multiple of that", access_name(kind), bytes,
                     at(where).c_str()));
    if (m.watched) access(reinterpret_cast<uintptr_t>(address), bytes, kind, site_of(where));
}

void machine_wait_for_earlier_kernels() { self().waited = true; }

void machine_ticket(const void* counter) {
    Handovers& taken = m.tickets[counter];
    for (const auto& [block, handover] : taken)
        m.known.push_back({block, m.barriers, static_cast<uint16_t>(m.current), handover});
    for (const Known& known : m.known) {  // passes on what this block knows
        Handover& last = taken.try_emplace(known.block, known.handover).first->second;
        if (known.handover.barrier > last.barrier) last = known.handover;
    }
    taken[blockIdx.x] = {self().barrier, static_cast<uint16_t>(m.current)};
}

void machine_trap(const char* what, Where where) { fault(std::string(what) + " at " + at(where)); }

// ---- functions called by kernels built with g++ -fsanitize=thread ----
#define CODE __builtin_return_address(0)
#define REPORT(bytes)                                                                                                  \
    void __tsan_read##bytes(void* p) { report(p, bytes, READ, CODE); }                                                 \
    void __tsan_write##bytes(void* p) { report(p, bytes, WRITE, CODE); }                                               \
    void __tsan_unaligned_read##bytes(void* p) { report(p, bytes, READ, CODE); }                                       \
    void __tsan_unaligned_write##bytes(void* p) { report(p, bytes, WRITE, CODE); }                                     \
    void __tsan_volatile_read##bytes(void* p) { report(p, bytes, READ, CODE); }                                        \
    void __tsan_volatile_write##bytes(void* p) { report(p, bytes, WRITE, CODE); }
REPORT(1)
REPORT(2)
REPORT(4)
REPORT(8)
REPORT(16)
void __tsan_read_range(void* p, unsigned long bytes) { report(p, bytes, READ, CODE); }
void __tsan_write_range(void* p, unsigned long bytes) { report(p, bytes, WRITE, CODE); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void*) {}
void __tsan_init() {}
}

PYBIND11_MODULE(DRIVER_NAME, module) {
    // Kernels find the functions above by name: this library's symbols become global.
    Dl_info info;
    dladdr(reinterpret_cast<void*>(&machine_barrier), &info);
    if (!dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL)) throw std::runtime_error(dlerror());
    py::register_exception<Fault>(module, "Fault", PyExc_RuntimeError);
    module.def("load", &load);
    module.def("launch", &launch);
    module.def("add_region", &add_region, py::arg("pointer"), py::arg("bytes"), py::arg("name"), py::arg("writable"),
               py::arg("valid"), py::arg("item") = CELL_BYTES);
    module.def("remove_region", &remove_region);
    module.def("initialise_region", &initialise_region);
    module.def("clear", &clear);
    module.def("freeze_region", &freeze_region);
    module.def("written", &written);
    module.def("accesses", [] { return m.accesses; });
}
