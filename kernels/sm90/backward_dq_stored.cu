// Gradient of the queries on Hopper from stored dS: dq = scale * dS K, of the dS that sm90/backward_dkv.cu has left with
// STORED (sm90/stored_ds.cuh).
//
// A persistent CTA takes, by tickets, tiles of ROW_UNITS times 64 rows: UNITS consecutive steps of 64 queries of a
// super-tile, for each of HEADS heads of a GQA group. It goes through the super-tile's list, BLOCK_N keys at a time, but
// for tiles of keys that have none of its steps. The producer gathers rows of the keys by cp.async and brings dS by TMA;
// each of two consumer warpgroups has the accumulators of two of the units of 64 rows. Every row has one writer and a fixed
// order of additions; rows that see nothing become zeros.
//
// Prelude: ELEMENT, HEAD_DIM (at most 128), HEADS (1, 2 or 4), BLOCK_N (64 or 128), STAGES.
#define SOFTCAP 0
#include "common/arch.cuh"
#include "common/params.cuh"
#include "common/softmax.cuh"
#include "sm90/backward_mma.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/stored_ds.cuh"
#include "sm90/swizzle.cuh"

constexpr int ROW_UNITS = 4, UNITS = ROW_UNITS / HEADS;
constexpr int TILE_KEYS = 128;  // of a tile of the key pass
constexpr int PRODUCER_THREADS = 128, CONSUMER_THREADS = 256, THREADS = PRODUCER_THREADS + CONSUMER_THREADS;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
constexpr int PRODUCER_BARRIER = 1;
constexpr int WARP_KEYS = BLOCK_N / 4;
constexpr int UNIT_ELEMENTS = BLOCK_N * STEP_QUERIES;
static_assert(HEAD_DIM <= 128 && TILE_KEYS % BLOCK_N == 0 && WARP_KEYS <= 32, "what the kernel is made for");

struct BackwardDqStoredParams {
    TensorMap ds;  // rows of 64 elements, all tiles', of which TMA loads BLOCK_N
    AttentionParams attention;
    StoredDs stored;
    unsigned* tickets;  // one, 0 before
    int lists;          // of the launch
};

enum : int { NONE = -2, END = -1 };  // in place of a tile

struct Shared {
    ELEMENT key[STAGES][CHUNKS * BLOCK_N * CHUNK_COLUMNS];
    ELEMENT ds[STAGES][ROW_UNITS][UNIT_ELEMENTS];  // head by head
    int tile[STAGES];   // that a stage is for; END: there are no more
    int units[STAGES];  // a bit for each unit of queries whose dS there is
    int next[2];        // of the producer alone
    Barrier full[STAGES], empty[STAGES];
};

// A tile of rows.
struct QueryTile {
    int batch, group, first_head;  // first_head: in its group
    int list;                      // of the launch
    int first_step, first_query, end_query;

    __device__ __forceinline__ QueryTile(const BackwardDqStoredParams& launch, int index) {
        const AttentionParams& p = launch.attention;
        const int sets = p.heads / p.kv_heads / HEADS, rows = row_sets(launch.stored);
        first_step = index % rows * UNITS;
        first_head = index / rows % sets * HEADS;
        list = index / rows / sets;
        const int of_all = launch.stored.first_tile / (p.super_capacity / TILE_KEYS) + list;
        const int super = of_all % p.supers, row = of_all / p.supers;
        group = row % p.kv_heads;
        batch = row / p.kv_heads;
        first_query = super * p.super_queries + first_step * STEP_QUERIES;
        end_query = min((super + 1) * p.super_queries, p.query_length);
    }

    // Of a super-tile and a head.
    __device__ __forceinline__ static int row_sets(const StoredDs& stored) { return (stored.super_steps + UNITS - 1) / UNITS; }

    __device__ __forceinline__ int super(const AttentionParams& p) const { return first_query / p.super_queries; }
};

// ---- the producer ----
// The blocks of keys of a list that have any of a tile's steps, one after the other, by a warp together.
struct ListBlocks {
    const StoredDs& stored;
    const int first_tile, tiles, length, first_step;  // tiles of keys
    int group = 0, at = 0;                            // index of the first of 32 tiles; of the current block's first key
    unsigned pending = 0;                             // of the 32, those still to come, with the current one
    int2 own = {0, 0}, steps = {0, 0};                // of this lane's tile; of the current one

    __device__ __forceinline__ ListBlocks(const BackwardDqStoredParams& launch, const QueryTile& t)
        : stored(launch.stored), first_tile(t.list * (launch.attention.super_capacity / TILE_KEYS)),
          tiles((list_length(launch.attention, t) + TILE_KEYS - 1) / TILE_KEYS), length(list_length(launch.attention, t)),
          first_step(t.first_step) {
        look(0);
    }

    __device__ __forceinline__ static int list_length(const AttentionParams& p, const QueryTile& t) {
        const long long mask_row = (long long)t.batch * p.mask_batch + t.group * p.mask_group;
        return p.super_lengths[mask_row * p.supers + t.super(p)];
    }

    // Begins with the first tile from number `from` on.
    __device__ __forceinline__ void look(int from) {
        for (group = from; group < tiles; group += 32) {
            const int mine = group + static_cast<int>(threadIdx.x & 31);
            own = mine < tiles ? stored.steps[first_tile + mine] : make_int2(0, 0);
            pending = __ballot_sync(ALL_LANES, own.x < first_step + UNITS && own.y > first_step && own.x < own.y);
            if (pending != 0) return begin();
        }
    }

    __device__ __forceinline__ void begin() {
        const int lane = __ffs(pending) - 1;
        at = (group + lane) * TILE_KEYS;
        steps = make_int2(__shfl_sync(ALL_LANES, own.x, lane), __shfl_sync(ALL_LANES, own.y, lane));
    }

    // Whether there is a current block.
    __device__ __forceinline__ bool more() const { return pending != 0; }

    __device__ __forceinline__ int tile() const { return first_tile + at / TILE_KEYS; }

    __device__ __forceinline__ void advance() {
        at += BLOCK_N;
        if (at % TILE_KEYS != 0 && at < length) return;
        pending &= pending - 1;
        if (pending != 0) begin();
        else look(group + 32);
    }

    // A bit for each unit of the tile whose step the current block has.
    __device__ __forceinline__ int units() const {
        int found = 0;
#pragma unroll
        for (int i = 0; i < UNITS; ++i) found |= (first_step + i >= steps.x && first_step + i < steps.y) << i;
        return found;
    }

    // The key that this lane gathers for the current block: its row; -1 if there is none.
    __device__ __forceinline__ int key() const {
        const int lane = threadIdx.x & 31;
        if (!more() || lane >= WARP_KEYS) return -1;
        return stored.keys[(long long)first_tile * TILE_KEYS + at + threadIdx.x / 32 * WARP_KEYS + lane];
    }
};

// Rows of the keys of a block, of which this lane knows one; zeros for those that have none.
__device__ __forceinline__ void gather_keys(Shared& shared, int stage, const AttentionParams& p, const QueryTile& t, int key) {
    constexpr int PIECES = 2 * ROW_STEPS;  // of a row, 16 bytes each
    const int lane = threadIdx.x & 31, first = threadIdx.x / 32 * WARP_KEYS;
    const ELEMENT* keys = p.key + t.batch * p.key_batch + t.group * p.key_head;
#pragma unroll
    for (int i = 0; i < (WARP_KEYS * PIECES + 31) / 32; ++i) {
        const int at = 32 * i + lane, row = at / PIECES, piece = at % PIECES;
        const int from = __shfl_sync(ALL_LANES, key, row);
        if (WARP_KEYS * PIECES % 32 != 0 && at >= WARP_KEYS * PIECES) continue;
        const bool exists = from >= 0 && piece * 8 < HEAD_DIM;
        copy_async_16(piece_of<BLOCK_N>(shared.key[stage], first + row, piece),
                      keys + (exists ? (long long)from * p.key_row + piece * 8 : 0), exists ? 16 : 0);
    }
}

// dS of a block: of the units whose step it has.
__device__ __forceinline__ void load_ds(Shared& shared, int stage, const BackwardDqStoredParams& launch, const QueryTile& t,
                                        const ListBlocks& blocks, int units) {
    const int own_steps = blocks.steps.y - blocks.steps.x;
    barrier_expect(&shared.full[stage], __popc(units) * HEADS * UNIT_ELEMENTS * static_cast<int>(sizeof(ELEMENT)));
#pragma unroll
    for (int i = 0; i < ROW_UNITS; ++i) {
        if ((units >> i % UNITS & 1) == 0) continue;
        const int head = t.first_head + i / UNITS, step = t.first_step + i % UNITS - blocks.steps.x;
        const int tile_step = blocks.tile() * launch.stored.tile_steps + head * own_steps + step;
        tma_load(shared.ds[stage][i], &launch.ds, &shared.full[stage], 0, tile_step * TILE_KEYS + blocks.at % TILE_KEYS, 0, 0);
    }
}

// A tile's blocks; one without dS if there are none, so that its rows become zeros.
__device__ __forceinline__ void produce_tile(Shared& shared, const BackwardDqStoredParams& launch, const QueryTile& t,
                                             int index, PipelineState<STAGES>& state) {
    ListBlocks blocks(launch, t);
    int key = blocks.key();
    for (bool more = true; more; state.advance()) {
        const int stage = state.stage, units = blocks.more() ? blocks.units() : 0;
        barrier_wait(&shared.empty[stage], state.phase ^ 1);
        if (threadIdx.x == 0) {
            shared.tile[stage] = index;
            shared.units[stage] = units;
            if (units != 0) load_ds(shared, stage, launch, t, blocks, units);
            barrier_arrive(&shared.full[stage]);
        }
        if (units != 0) {
            gather_keys(shared, stage, launch.attention, t, key);
            blocks.advance();
        }
        barrier_arrive_after_copies(&shared.full[stage]);
        more = blocks.more();
        key = blocks.key();  // it arrives while the consumers release a stage
    }
}

// Tile after tile: the CTA's number is its first ticket, the others come from a counter, each taken while the tile before
// is worked on.
__device__ __forceinline__ void produce(Shared& shared, const BackwardDqStoredParams& launch) {
    const AttentionParams& p = launch.attention;
    const int tiles = launch.lists * (p.heads / p.kv_heads / HEADS) * QueryTile::row_sets(launch.stored);
    PipelineState<STAGES> state;
    int index = blockIdx.x;
    for (int turn = 0; index < tiles; turn ^= 1) {
        unsigned ticket = 0;
        if (threadIdx.x == 0) ticket = atomicAdd(launch.tickets, 1u);
        const QueryTile t(launch, index);
        if (t.first_query < t.end_query) produce_tile(shared, launch, t, index, state);
        if (threadIdx.x == 0) shared.next[turn] = static_cast<int>(gridDim.x + ticket);
        named_barrier(PRODUCER_BARRIER, PRODUCER_THREADS);
        index = shared.next[turn];
    }
    barrier_wait(&shared.empty[state.stage], state.phase ^ 1);
    if (threadIdx.x == 0) {
        shared.tile[state.stage] = END;
        barrier_arrive(&shared.full[state.stage]);
    }
    barrier_arrive(&shared.full[state.stage]);
}

// ---- a consumer: two units of 64 rows ----
constexpr int PIECE_GROUPS = (2 * OUT_FRAGMENTS + 3) / 4;  // of four pieces of 16 bytes each in a row

// Four lanes have a word each of four pieces of a row; afterwards lane j has the four words of piece j.
__device__ __forceinline__ void gather_piece(unsigned (&x)[4]) {
    const int lane = threadIdx.x & 3;
#pragma unroll
    for (int distance = 2; distance > 0; distance /= 2) {
        const bool upper = (lane & distance) != 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if ((i & distance) != 0) continue;
            const unsigned found = __shfl_xor_sync(ALL_LANES, upper ? x[i] : x[i + distance], distance);
            if (upper) x[i] = found;
            else x[i + distance] = found;
        }
    }
}

struct Consumer {
    Shared& shared;
    const BackwardDqStoredParams& launch;
    const int first_unit;  // of this warpgroup, in a tile
    PipelineState<STAGES> state;
    Fragment dq[2][OUT_FRAGMENTS];

    __device__ __forceinline__ Consumer(Shared& shared, const BackwardDqStoredParams& launch)
        : shared(shared), launch(launch), first_unit(2 * uniform(threadIdx.x / 128 - 1)) {}

    // Adds the products of the current block for the units first to last - 1, and waits for them.
    template <int first, int last>
    __device__ __forceinline__ void multiply() {
        const unsigned keys = matrix_descriptor(shared.key[state.stage], BLOCK_N * CHUNK_ROW_BYTES);
        const unsigned ds = matrix_descriptor(shared.ds[state.stage][first_unit], 0);
#pragma unroll
        for (int i = first; i < last; ++i) pin(dq[i]);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BLOCK_N / 16; ++k)
#pragma unroll
            for (int i = first; i < last; ++i)
                Wgmma<OUT_FRAGMENTS>::template multiply<Major::MN, Major::MN>(
                    dq[i], moved(ds, (i * BLOCK_N + k * 16) * CHUNK_ROW_BYTES), moved(keys, k * 16 * CHUNK_ROW_BYTES), true);
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int i = first; i < last; ++i) pin(dq[i]);
    }

    __device__ __forceinline__ void write(int index) {
        const AttentionParams& p = launch.attention;
        const QueryTile t(launch, index);
        const int lane = threadIdx.x & 31, first_row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int head = t.group * (p.heads / p.kv_heads) + t.first_head + (first_unit + i) / UNITS;
            const int begin = t.first_query + (first_unit + i) % UNITS * STEP_QUERIES;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int query = begin + query_of_column(first_row + 8 * r);
                unsigned words[PIECE_GROUPS][4] = {};
#pragma unroll
                for (int d = 0; d < 2 * OUT_FRAGMENTS; ++d) {
                    const float* pair = dq[i][d / 2].x + d % 2 * 4 + 2 * r;
                    words[d / 4][d % 4] = pack_pair(pair[0] * p.scale, pair[1] * p.scale);
                }
#pragma unroll
                for (int g = 0; g < PIECE_GROUPS; ++g) gather_piece(words[g]);
                if (query >= t.end_query) continue;
                const bool sees = p.lse[((long long)t.batch * p.heads + head) * p.query_length + query] != -infinity();
                ELEMENT* result = p.dquery + (((long long)t.batch * p.query_length + query) * p.heads + head) * HEAD_DIM;
#pragma unroll
                for (int g = 0; g < PIECE_GROUPS; ++g) {
                    const int column = (4 * g + (lane & 3)) * 8;
                    const unsigned(&x)[4] = words[g];
                    if (column < HEAD_DIM)
                        *reinterpret_cast<uint4*>(result + column) =
                            sees ? make_uint4(x[0], x[1], x[2], x[3]) : make_uint4(0, 0, 0, 0);
                }
            }
        }
    }

    __device__ __forceinline__ void run() {
        for (int current = NONE;; state.advance()) {
            barrier_wait(&shared.full[state.stage], state.phase);
            const int tile = shared.tile[state.stage];
            if (tile != current) {
                if (current != NONE) write(current);
                if (tile == END) return;
                current = tile;
                clear(dq[0]);
                clear(dq[1]);
            }
            shared_write_fence();  // what cp.async wrote, before wgmma reads it
            const int units = shared.units[state.stage];
            const bool first = (units >> first_unit % UNITS & 1) != 0, second = (units >> (first_unit + 1) % UNITS & 1) != 0;
            if (first && second) multiply<0, 2>();
            else if (first) multiply<0, 1>();
            else if (second) multiply<1, 2>();
            barrier_arrive(&shared.empty[state.stage]);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_dq_stored(
    const __grid_constant__ BackwardDqStoredParams launch) {
    wait_for_earlier_kernels();
    static_assert(sizeof(Shared) + 1024 <= SHARED_BYTES, "the launch has less shared memory");
    extern __shared__ unsigned char shared_memory[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory + (0u - shared_address(shared_memory)) % 1024);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&shared.full[i], PRODUCER_THREADS + 1);
            barrier_init(&shared.empty[i], CONSUMER_THREADS);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < PRODUCER_THREADS) {
        shrink_registers<PRODUCER_REGISTERS>();
        produce(shared, launch);
    } else {
        grow_registers<CONSUMER_REGISTERS>();
        Consumer consumer(shared, launch);
        consumer.run();
    }
}
