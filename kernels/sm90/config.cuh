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
// What a launch has, 504 for a lane of each warpgroup where there are two consumers and 512 where there are three, is dealt
// out anew: as few to the consumers as their products do with. The producer keeps a run of row addresses.
constexpr int ACCUMULATOR_REGISTERS = KEY_FRAGMENTS * 12 + DIM_FRAGMENTS * 8;  // and probabilities
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? (BIAS == BIAS_DENSE ? 216 : 208) : ACCUMULATOR_REGISTERS > 112 ? 160 : SOFTCAP ? 152 : 144;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 504 - 2 * CONSUMER_REGISTERS : 512 - 3 * CONSUMER_REGISTERS;
// Whether a consumer keeps its queries in registers, where there are enough: then QK reads half as much of shared memory, all
// of whose width it needs otherwise.
constexpr bool QUERIES_KEPT = BIAS != BIAS_DENSE && ACCUMULATOR_REGISTERS + DIM_FRAGMENTS * 4 <= (CONSUMERS == 2 ? 144 : 96);
constexpr int WARP_KEYS = BLOCK_N / PRODUCER_WARPS;  // keys of a block that a producer warp gathers
constexpr bool BY_EIGHTS = WARP_KEYS == 24;          // not those that follow each other, but eight of every 32
constexpr int ALL_BARRIER = 0, CONSUMER_BARRIER = 1, PING_PONG_BARRIER = 2;  // named barriers; of turns one for each warpgroup
constexpr int LISTS = 4;  // of blocks, which the producer has at a time
// Whether a block of at most SHORT_BLOCK_KEYS keys, with which most lists end, is less work than others.
#define SHORT_BLOCK (KEYS == KEYS_LISTED && !BITS && BLOCK_N > SHORT_BLOCK_KEYS)
constexpr int SHORT_BLOCK_KEYS = 32;
constexpr int SHORT_BLOCK_FRAGMENTS = SHORT_BLOCK_KEYS / 16;
// Whether the consumers have a way of their own for whole blocks. Masks as bits leave few blocks whole.
#define PLAIN (!BITS)
// Whether whole blocks behind whole blocks have a loop of their own, whose code remains in one place: where a warp jumps it
// waits for instructions. By measurement; lists gain nothing.
#define FULL_BLOCK_LOOP (PLAIN && KEYS == KEYS_CONTIGUOUS && (CONSUMERS == 2 || SOFTCAP || BIAS == BIAS_NONE))
// Whether places of a block that have no key need no test for being seen: they have a bias of -inf, and another key's row.
#define PAD_BY_BIAS (KEYS == KEYS_LISTED && BIAS == BIAS_OF_KEYS)
// Whether it matters that a block's keys follow each other: their rows come through the TMA then, and their dense
// bias in vectors.
#define ORDERED (RUNS || BIAS == BIAS_DENSE)
constexpr int RUN_STEP = 8;   // such a block begins at a multiple of this key
constexpr int RUN_KEYS = 32;  // of a box
// Whether the last tiles, too few for all blocks of the grid, are cut up among them, 64 rows for each warpgroup that
// multiplies. Of a dense mask a tile's words must begin at a word; causality's last tiles are short ones.
#define ROW_CUT (64 % HEADS == 0 && !BITS && !(CAUSAL && KEYS == KEYS_CONTIGUOUS) && !SPLIT)
constexpr int CUT_QUERIES = 64 / HEADS;
static_assert(!SPLIT || (!SEQUENCES && !BITS), "such tiles are not split up");
// Whether some numbers of tiles, or of parts, have none.
#define GAPS (SEQUENCES || ROW_CUT)
// Whether the producer has a loop of its own for blocks full of keys that all queries see, which gathers them.
#define FULL_BLOCKS (KEYS == KEYS_LISTED && !ORDERED)
static_assert(WARP_KEYS <= 32 && WARP_KEYS * ROW_LANES % 32 == 0, "a producer lane knows one key");

// A bias of keys is where the sums of the products begin, unless a softcap comes between.
#define BIAS_FIRST (BIAS == BIAS_OF_KEYS && !SOFTCAP)
// Whether logits are powers of 2 as soon as they have their softcap, whose coefficients, and the bias, are in that unit.
#define POWERS_OF_2 (SOFTCAP && BIAS != BIAS_DENSE)

// Whether the consumers must know the rows of keys: to compare them with positions, or to find their bias.
#define KEYS_KNOWN ((CAUSAL && KEYS != KEYS_CONTIGUOUS) || BIAS == BIAS_DENSE)

// Whether outputs go to memory through the TMA, a warp's 16 rows at a time: those of a sequence's last tile may be
// another sequence's.
#define OUT_TMA (QUERY_TMA && !SEQUENCES && 16 % HEADS == 0)
