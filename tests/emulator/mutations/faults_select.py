"""Faults in key scores and selection: kernels/select."""
from __future__ import annotations

from tests.emulator.mutations import Fault

FAULTS = [
    # ---- barriers and asynchronous copies ----
    Fault("no barrier before warp sums are read", "common/block_select.cuh",
          "    __syncthreads();  // every warp's sum is", "    //", "test_selection[iid]"),
    Fault("no barrier before the histogram is counted", "common/block_select.cuh",
          "    __syncthreads();  // every warp's range and number are in place", "    //", "test_selection[iid]"),
    Fault("no barrier before the part of the answer is read", "common/block_select.cuh",
          "        __syncthreads();  // the part of the answer", "        //", "test_selection[iid]"),
    Fault("no barrier after weights are loaded", "select/key_scores.cu", "    __syncthreads();  // the weights are",
          "    //", "test_key_scores[heads 3, D 33]"),
    Fault("no barrier before weights are replaced", "select/key_scores.cu",
          "    __syncthreads();  // all threads are done with", "    //", "test_key_scores[heads 20]"),
    # ---- edges ----
    Fault("one key too many is scored", "select/key_scores.cu", "if (key < p.key_length && head",
          "if (key <= p.key_length && head", "test_key_scores[heads 3, D 33]"),
    Fault("one key too many is multiplied", "select/key_scores.cu", "HEADS && key < p.key_length",
          "HEADS && key <= p.key_length", "test_key_scores[products]"),
    Fault("channels behind the last one are multiplied", "select/key_scores.cu", "|| piece < PIECES",
          "|| piece <= PIECES", "test_key_scores[products]"),
    Fault("a key behind the last one is read", "select/key_scores.cu", "8 * r, p.key_length - 1)",
          "8 * r, p.key_length)", "test_key_scores[products]"),
    # ---- selection ----
    Fault("the oldest of equals is kept", "select/prefix_top_w.cu", "            mark([&](int) { return rank - 1; });",
          "            mark([&](int) { return rank; });", "test_selection[ties]"),
    Fault("-0 ranks below +0", "common/rank.cuh", "__float_as_uint(score + 0.0f)", "__float_as_uint(score)",
          "test_selection[special]"),
    Fault("NaN of either sign ranks by its bits", "common/rank.cuh", "    if (isnan(score)) return 0xffffffffu;\n", "",
          "test_selection[special]"),
    Fault("bins keep what was counted", "common/block_select.cuh", "            bin = 0;\n", "", "test_selection[iid]"),
    Fault("what is no candidate counts beside NaN", "common/block_select.cuh",
          "min((1u << shift) - 1, range.low + range.span - low)", "(1u << shift) - 1",
          "test_selection[few of special]"),
    Fault("all keys of equal rank are taken", "common/block_select.cuh", "    if (missing > 0) {",
          "    if (missing < 0) {", "test_selection[ties]"),
    Fault("one kept key is forgotten", "select/prefix_top_w.cu", "p.kept_count[row.chunk(c)] = best.count;",
          "p.kept_count[row.chunk(c)] = max(best.count - 1, 0);", "test_selection[iid]"),
    Fault("one key that can die is held safe", "select/prefix_top_w.cu", "coming - (p.window - held.count))",
          "coming - (p.window - held.count) - 1)", "test_selection[increasing]"),
    Fault("padding is ignored", "select/prefix_top_w.cu", "p.padding[batch * p.padding_batch + j] == 0", "false",
          "test_selection[iid]"),
    # ---- gradients ----
    Fault("no barrier before ddt is read", "select/key_scores_backward.cu",
          "        __syncthreads();  // ddt is in place\n#pragma", "#pragma", "test_key_scores_backward"),
    Fault("the gradient to add to at the stride of values", "select/key_scores_backward.cu",
          "p.dvalue_in + batch * p.in_batch", "p.dvalue_in + batch * p.value_batch", "test_strided_scores"),
    Fault("no barrier before the sums of warps are added", "common/sums.cuh", "    __syncthreads();  // the sums",
          "    //", "test_key_scores_backward"),
    Fault("the first warp's sum is left out", "common/sums.cuh",
          "for (int i = 0; i < SUM_THREADS / 32", "for (int i = 1; i < SUM_THREADS / 32", "test_key_scores_backward"),
    Fault("a head of the group is added up twice", "common/sums.cuh", "a * first + b * second];",
          "a * first + b / 2 * second];", "test_backward_grid[mask-none]"),
    # ---- decoding ----
    Fault("no barrier before the ticket of a count", "select/last_queries_top_w.cu",
          "    __syncthreads();  // the block's counts", "    //", "last_queries[1]"),
    Fault("the last digit of the best is taken for one higher", "select/last_queries_top_w.cu",
          "const Ranked digit = DIGITS - 1 -", "const Ranked digit = DIGITS -", "last_queries[1]"),
    Fault("arrivals push out no key", "select/last_queries_top_w.cu", "&& --remaining == 0)", "&& --remaining < 0)",
          "last_queries[4]"),
    # ---- programmatic dependent launch ----
    Fault("values are read ahead of the wait", "select/key_scores.cu",
          "    wait_for_earlier_kernels();\n#if TENSOR_CORES\n    score_keys(p);\n",
          "#if TENSOR_CORES\n    score_keys(p);\n    wait_for_earlier_kernels();\n", "test_key_scores[products]"),
]
