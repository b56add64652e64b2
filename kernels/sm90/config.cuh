// The Hopper forward's compile-time configuration: the tile's shape in warps, fragments and registers, named barriers, and
// the switches that the prelude's choices turn on.
//
// Prelude: as sm90/forward.cu.
#pragma once
#include "common/arch.cuh"
#include "common/bias.cuh"
#include "common/mask.cuh"
#include "common/params.cuh"
#include "common/query_tile.cuh"
#include "common/softmax.cuh"
#include "sm90/ptx.cuh"

constexpr int CONSUMERS = BLOCK_M / 64;  // warpgroups that multiply
constexpr int CONSUMER_THREADS = CONSUMERS * 128;
constexpr int PRODUCER_WARPS = 4;
constexpr int PRODUCER_THREADS = PRODUCER_WARPS * 32;
constexpr int THREADS = PRODUCER_THREADS + CONSUMER_THREADS;
constexpr int HEAD_DIM_PADDED = (HEAD_DIM + 15) / 16 * 16;
constexpr int CHUNKS = (HEAD_DIM + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS;
constexpr int ROW_PIECES = HEAD_DIM_PADDED / 8;  // 16-byte pieces of a row
constexpr int ROW_LANES = ROW_PIECES <= 8 ? 8 : ROW_PIECES <= 16 ? 16 : 32;  // lanes that share a row
constexpr int KEY_FRAGMENTS = BLOCK_N / 16;
constexpr int DIM_FRAGMENTS = HEAD_DIM_PADDED / 16;
// A launch gives every lane of a warpgroup 504 registers in total with two consumers and 512 with three. They are
// redistributed: consumers get the minimum for their accumulators and operands; the producer, which holds the addresses
// of a run of rows, gets the rest.
constexpr int ACCUMULATOR_REGISTERS = KEY_FRAGMENTS * 12 + DIM_FRAGMENTS * 8;  // including the probabilities
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2                ? (BIAS == BIAS_DENSE ? 216 : 208)
                                   : ACCUMULATOR_REGISTERS > 112 ? 160
                                   : SOFTCAP                     ? 152
                                                                 : 144;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 504 - 2 * CONSUMER_REGISTERS : 512 - 3 * CONSUMER_REGISTERS;
// Whether a consumer keeps its queries in registers, if there are enough: QK then reads half as much shared memory,
// whose bandwidth it would otherwise exhaust.
constexpr bool QUERIES_KEPT =
    BIAS != BIAS_DENSE && ACCUMULATOR_REGISTERS + DIM_FRAGMENTS * 4 <= (CONSUMERS == 2 ? 144 : 96);
constexpr int WARP_KEYS = BLOCK_N / PRODUCER_WARPS;  // keys of a block that a producer warp gathers
constexpr bool BY_EIGHTS = WARP_KEYS == 24;  // not consecutive keys, but eight of every 32
// Named barriers; the ping-pong has one for each consumer warpgroup.
constexpr int ALL_BARRIER = 0, CONSUMER_BARRIER = 1, PING_PONG_BARRIER = 2;
constexpr int LISTS = 4;  // key lists of blocks that the producer holds at a time
// Whether blocks of at most SHORT_BLOCK_KEYS keys, the end of most lists, have a cheaper path.
#define SHORT_BLOCK (KEYS == KEYS_LISTED && !BITS && BLOCK_N > SHORT_BLOCK_KEYS)
constexpr int SHORT_BLOCK_KEYS = 32;
constexpr int SHORT_BLOCK_FRAGMENTS = SHORT_BLOCK_KEYS / 16;
// Whether the consumers have a separate path for full blocks, whose keys all queries of the tile see. Masks as bits
// leave few such blocks.
#define FULL_BLOCK_PATH (!BITS)
// Whether consecutive full blocks have a tight loop with contiguous code: after a jump a warp waits for instructions.
// Measured; lists gain nothing.
#define FULL_BLOCK_LOOP (FULL_BLOCK_PATH && KEYS == KEYS_CONTIGUOUS && (CONSUMERS == 2 || SOFTCAP || BIAS == BIAS_NONE))
// Whether the slots of a block beyond its last key need no visibility test: they get a bias of -inf and the row of
// another key.
#define PAD_BY_BIAS (KEYS == KEYS_LISTED && BIAS == BIAS_OF_KEYS)
// Whether it matters that the keys of a block are consecutive: TMA can then load their rows, and their dense bias is
// read in vectors.
#define ORDERED (RUNS || BIAS == BIAS_DENSE)
constexpr int RUN_STEP = 8;  // such a block begins at a multiple of this key
constexpr int RUN_KEYS = 32;  // of a TMA tile
// Whether to cut the tiles of the last wave by rows, 64 per consumer warpgroup, if they are fewer than CTAs. With a
// dense mask a tile must begin at a word of bits; under causality the last tiles are the cheap ones anyway.
#define ROW_CUT (64 % HEADS == 0 && !BITS && !(CAUSAL && KEYS == KEYS_CONTIGUOUS) && !SPLIT)
constexpr int CUT_QUERIES = 64 / HEADS;
static_assert(!SPLIT || (!SEQUENCES && !BITS), "such tiles are not split along their keys");
// Whether a CTA may get an index without a tile: packed sequences leave gaps, cut tiles leave slices without queries.
#define GAPS (SEQUENCES || ROW_CUT)
// Whether the producer has a loop of its own that gathers full blocks.
#define FULL_BLOCKS (KEYS == KEYS_LISTED && !ORDERED)
static_assert(WARP_KEYS <= 32 && WARP_KEYS * ROW_LANES % 32 == 0, "a producer lane knows one key");

// A bias per key initialises the accumulators of QK, unless there is a softcap in between; with DELAY, where it
// applies.
#define BIAS_FIRST (BIAS == BIAS_OF_KEYS && !SOFTCAP)
// Whether logits are exponents of 2 right after their softcap: its coefficients, and the bias, are in that unit.
#define POWERS_OF_2 (SOFTCAP && BIAS != BIAS_DENSE)

// Whether the consumers need the index of each key: to compare it with positions, or to find its bias.
#define KEYS_KNOWN ((CAUSAL && KEYS != KEYS_CONTIGUOUS) || BIAS == BIAS_DENSE)

// Whether TMA stores outputs, 16 rows of a warp at a time. Not with packed sequences: rows after a sequence's last tile
// belong to the next sequence.
#define OUT_TMA (QUERY_TMA && !SEQUENCES && 16 % HEADS == 0)
