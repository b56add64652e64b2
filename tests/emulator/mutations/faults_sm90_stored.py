"""Faults in the Hopper query gradient from stored dS: kernels/sm90/backward_dq_stored.cu, and the key pass."""
from tests.emulator.mutations import fault

STORED, NARROW, PRODUCER = "sm90/stored_ds.cuh", "sm90/backward_dkv_narrow.cuh", "sm90/backward_dkv_producer.cuh"
KERNEL = "sm90/backward_dq_stored.cu"
PLAIN, THREE, CHUNKS, MANY = "sm90 stored", "sm90 stored[3 heads]", "sm90 stored[chunks]", "sm90 stored[40 blocks]"
UNSEEN, BAD_KEY = "sm90 stored[unseen]", "sm90 stored[a bad key]"

FAULTS = [
    # ---- what the key pass stores ----
    fault("queries of a step are taken to be in order", STORED,
          "return «(column & 33) | (column & 24) >> 2 | (column & 2) << 2 | (column & 4) << 2→column»;", PLAIN),
    fault("both rows of a lane are stored in one", STORED, "row« + 8 * r * STEP_QUERIES»", PLAIN),
    fault("both halves of a row are stored in one", STORED, "STEP_QUERIES« + half * 32»),", PLAIN),
    fault("the last step of a head is stored as its first", NARROW, "h * steps + (step == 0 ? «steps→1» : step) - 1);",
          PLAIN),
    fault("dS of all heads is stored in one place", NARROW, "store(gradient, «h * steps + »", PLAIN),
    fault("dS of all tiles is stored in one place", NARROW,
          "«shared.meta[key_stage].stored_tile * stored.tile_steps + »", PLAIN),
    fault("a tile's steps begin with any query", PRODUCER, "if (DQUERY« || STORED») queries.begin -=", PLAIN),
    fault("every chunk takes the first tiles", PRODUCER, "«        number += launch.stored.first_tile;\n»", CHUNKS),
    fault("a chunk's tiles are stored where those of all lists would be", PRODUCER,
          "(t.partial / BLOCK_N«) - stored.first_tile,→),»", CHUNKS),
    fault("rows of keys that nobody sees are multiplied", PRODUCER,
          "«has_row(meta, i) ? meta.index[i] : -1;→meta.index[i];»", UNSEEN),
    fault("a tile's steps are counted from the first query of all", PRODUCER,
          "«(meta.queries.begin - t.first_query)→meta.queries.begin» / STEP_QUERIES;", PLAIN),
    # ---- the query pass: what is asynchronous ----
    fault("the kernel of stored dS does not wait for the kernels ahead", KERNEL,
          "BackwardDqStoredParams launch) {«\n    wait_for_earlier_kernels();»\n", PLAIN),
    fault("keys and dS are fetched before their stage is empty", KERNEL,
          "«        barrier_wait(&shared.empty[stage], state.phase ^ 1);\n»", PLAIN),
    fault("keys and dS are multiplied before they are there", KERNEL,
          "«            barrier_wait(&shared.full[state.stage], state.phase);\n»", PLAIN),
    fault("a block is full before its keys are there", KERNEL,
          "        «barrier_arrive_after_copies→barrier_arrive»(&shared.full[stage]);\n", PLAIN),
    fault("bytes of steps that a block does not have are waited for", KERNEL, "«__popc(units) * HEADS→ROW_UNITS»",
          THREE),
    fault("bytes of one head are waited for", KERNEL, "__popc(units)« * HEADS»", PLAIN),
    fault("the full barrier of stored dS counts a thread less", KERNEL, "full[i], PRODUCER_THREADS« + 1»);", PLAIN),
    fault("a stage of stored dS is empty when one warpgroup is done", KERNEL,
          "shared.empty[i], CONSUMER_THREADS«→ / 2»);", PLAIN),
    fault("warps take the next tile of stored dS before it is known", KERNEL,
          "«        named_barrier(PRODUCER_BARRIER, PRODUCER_THREADS);\n»", PLAIN),
    fault("the next tile of stored dS has one place", KERNEL, "turn ^= «1→0»", PLAIN),
    fault("tickets of stored dS begin with 0", KERNEL, "static_cast<int>(«gridDim.x + »ticket);", PLAIN),
    # ---- the query pass: which keys and queries ----
    fault("a list has no end", KERNEL,
          "«mine < tiles ? stored.steps[first_tile + mine] : make_int2(0, 0);→stored.steps[first_tile + mine];»",
          PLAIN),
    fault("a list has 32 blocks of 128 keys at most", KERNEL, "else «look(group + 32);→return;»", MANY),
    fault("the second 32 blocks of a list are the first", KERNEL, "at = «(group + lane)→lane» * TILE_KEYS;", MANY),
    fault("dS of a tile's first keys serves the others, too", KERNEL, " * TILE_KEYS« + blocks.at % TILE_KEYS», 0, 0);",
          PLAIN),
    fault("steps that a block does not have are read", KERNEL,
          "found |= «(first_step + i >= steps.x && first_step + i < steps.y)→1» << i;", THREE),
    fault("dS of the first head serves the others, too", KERNEL, "head = t.first_head« + i / UNITS», step", PLAIN),
    fault("all warps gather the first keys of a block", KERNEL, "at + «threadIdx.x / 32 * WARP_KEYS + »lane];", PLAIN),
    fault("the second unit keeps the tile before", KERNEL, "«                clear(dq[1]);\n»", PLAIN),
    fault("queries behind the last are written", KERNEL, "«                if (query >= t.end_query) continue;\n»",
          THREE),
    fault("rows that see nothing get a gradient from stored dS", KERNEL, "«sees→true» ? make_uint4", BAD_KEY),
    fault("the gradient from stored dS has no scale", KERNEL,
          "pack_pair(pair[0«] * p.scale, pair[1] * p.scale);→], pair[1]);»", PLAIN),
    fault("lanes keep their words of a piece", KERNEL, "distance > «0→1»; distance /= 2", PLAIN),
    fault("a tile without keys is passed over", KERNEL,
          "        «→if (!blocks.more()) return;\n        »const int stage = state.stage, units", BAD_KEY),
]
