"""Faults in key lists: kernels/lists, kernels/common/varlen.cuh."""
from __future__ import annotations

from tests.emulator.mutations import Fault

FAULTS = [
    # ---- values and edges ----
    Fault("short tiles have the lists of full ones", "lists/intervals.cu",
          " - min(tile, p.short_tiles) * p.missing_queries", "", "sm90[short tiles]"),
    # ---- barriers and asynchronous copies ----
    Fault("all warps of a tile list its keys", "lists/intervals.cu", "any && lane == tile_lane &&", "any &&",
          "test_forward_grid[lengths-300x300-top_w]"),
    Fault("no barrier before found keys are sorted", "lists/intervals.cu",
          "        __syncthreads();  // all keys of this step", "        //",
          "test_forward_grid[lengths-300x300-top_w]"),
    # ---- edges ----
    Fault("a chunk is searched short", "lists/intervals.cu", "        last_chunk = c;",
          "        last_chunk = max(c - 1, 0);", "lists_over_chunks"),
    Fault("the first chunk of a tile is missed", "lists/intervals.cu", "info.z <= first) continue",
          "info.z - 1000 <= first) continue", "lists_over_chunks"),
    # ---- masks ----
    Fault("partial keys count as full", "lists/intervals.cu", "own[k].x <= group_first && own[k].y > group_last ? 1",
          "own[k].x <= group_first && own[k].y > group_first ? 1", "lists_over_chunks"),
    Fault("keys that die within the tile count as full", "lists/intervals.cu",
          "v.x <= first_position && v.y > last_position", "v.x <= first_position && v.y > first_position",
          "lists_over_chunks"),
    Fault("a chunk that begins at a tile's last position is left out", "lists/intervals.cu", "info.y > last ||",
          "info.y >= last ||", "test_a_last_position_that_begins_a_chunk"),
    Fault("keys that no query sees are listed", "lists/intervals.cu",
          "SEQUENCES ? own : make_int2(max(own.x, first_position), min(own.y, key_length))", "own",
          "test_keys_behind[Hopper, lists]"),
    # ---- dense masks ----
    Fault("bits of a word in the wrong order", "lists/dense_mask.cu",
          "__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632)",
          "__byte_perm(b, a, 0x5410), __byte_perm(a, b, 0x7632)", "test_forward_grid[mask-dense]"),
    Fault("one byte of four is taken for all", "lists/dense_mask.cu", "row[(key + k) * p.dense_key]",
          "row[key * p.dense_key]", "test_forward_grid[mask-dense]"),
    Fault("keys that some see count as full", "lists/dense_mask.cu", "(own[k] & existing[w]) == existing[w]",
          "(own[k] & existing[w]) != 0", "test_forward_grid[mask-dense]"),
    Fault("causality is not packed", "lists/dense_mask.cu", "seen &= bits_between(first_position, key, NEVER)",
          "seen &= ALL_LANES", "test_forward_grid[causal-and-dense]"),
    Fault("the words of another query head", "lists/dense_mask.cu", "head / p.dense_share * p.dense_head",
          "0 * p.dense_head", "test_forward_grid[dense-mask-1hqk]"),
    Fault("steps that some pairs see count as full", "lists/dense_mask.cu", "all == existing ? 3 : 1", "3",
          "test_backward_grid[dense-both-11qk-1gqk]"),
    Fault("steps of listed keys that some pairs see count as full", "lists/dense_macro_tiles.cu",
          "(whole & existing) == existing ? 3 : 1", "3", "test_backward_grid[mask-dense]"),
    Fault("a list of a super-tile begins in the one before", "lists/dense_macro_tiles.cu", "if (s < super) own_first",
          "if (s < super - 1) own_first", "test_super_tiles_of_dense_masks"),
    Fault("keys of other query heads are not listed", "lists/dense_macro_tiles.cu", "head < p.share; ++head",
          "head < 1; ++head", "test_super_tiles_of_dense_masks"),
    Fault("the last word of a super-tile's queries is not looked at", "lists/dense_macro_tiles.cu",
          "p.query_words - first_word);", "p.query_words - first_word - 1);", "test_a_key_of_the_last_word"),
    Fault("states of the last words are not written", "lists/dense_macro_tiles.cu", "(found.y + 63) / 64 * 2",
          "found.y / 64 * 2", "test_a_key_of_the_last_word"),
    # ---- gradients ----
    Fault("keys that come late are left out of a super-tile", "lists/intervals.cu",
          "return v.y <= last ? 0 : v.x <= first ? 1 : 2;", "return v.y <= last ? 0 : v.x <= first ? 1 : 3;",
          "test_super_tiles"),
    Fault("a key's slots begin where those of its neighbour do", "lists/intervals.cu", "span += own_spans[k];",
          "span += own_spans[0] * (k == 0);", "test_super_tiles"),
    Fault("super-tiles are counted from position 0", "lists/intervals.cu", "super = (interval.x - first_position) /",
          "super = interval.x /", "test_super_tiles, more keys"),
    # ---- programmatic dependent launch ----
    Fault("a kernel does not wait for the one ahead", "lists/varlen.cu", "    wait_for_earlier_kernels();\n", "",
          "varlen[mask-window]"),
    # ---- packed sequences ----
    Fault("a tile runs on into the next sequence", "common/varlen.cuh", "min(row + size, end[b])", "row + size",
          "varlen[bfloat16-none]"),
    Fault("the search for a sequence leaves some out", "common/varlen.cuh", "high = min(high, low + step);",
          "high = min(high, low + step - 1);", "varlen[sixty-none]"),
    Fault("sequences are aligned at their first keys", "lists/varlen.cu", "shift = key_end - end;",
          "shift = p.bounds[2 * n + b] - first;", "varlen[mask-window]"),
    Fault("keys that are not in use count", "lists/varlen.cu", "const bool used = key < key_end;",
          "const bool used = true;", "varlen[used-per_head]"),
    Fault("further super-tiles lie on each other", "common/varlen.cuh", "(bounds[b] / queries + k - 1) * capacity",
          "(bounds[b] / queries) * capacity", "varlen backward[supers]"),
]
