"""Faults in decoding: kernels/decode."""
from __future__ import annotations

from tests.emulator.mutations import Fault

FAULTS = [
    # ---- decoding ----
    Fault("every block changes the state", "decode/step.cu", "        if (!shared.last) return;", "        //",
          "decoding[several splits]"),
    Fault("no barrier before the ticket of a split", "decode/step.cu",
          "        __syncthreads();  // the block's results are", "        //", "decoding[several splits]"),
    Fault("of equal scores the oldest wins", "decode/step.cu", "ordered(score) >= ordered(",
          "ordered(score) > ordered(", "decoding"),
    Fault("a recent key is dropped too early", "decode/step.cu", "position > now - p.recent);",
          "position > now - p.recent + 1);", "decoding[sinks and recent]"),
    Fault("the key that leaves the top stays in it", "decode/step.cu", "if (number == change.dropped || position < 0)",
          "if (position < 0)", "decoding[sinks and recent]"),
    Fault("a row of outputs is rescaled by another row's maximum", "decode/split_kv.cuh",
          "rescale[r], 8 * t);  // of row", "rescale[r], 8 * t + 4);  // of row", "flash_decode"),
    Fault("no barrier before the query is read", "decode/step.cu",
          "        __syncthreads();  // the query and the token", "        //", "decoding[several splits]"),
    Fault("the slot's old key is multiplied, not the token's", "decode/step.cu", "if (here) take_key(",
          "if (false) take_key(", "decoding[several splits]"),
    Fault("the slot's old value is added, not the token's", "decode/step.cu", "if (here) take_value(",
          "if (false) take_value(", "decoding[several splits]"),
    Fault("the score kept beside the lowest key is the token's", "decode/step.cu", "from_ordered(lowest.rank);",
          "change.score;", "decoding[sinks and recent]"),
    Fault("a token takes no room in the top", "decode/step.cu", "head.lowest + change.enters", "head.lowest",
          "decoding[windows]"),
    Fault("a closed gate takes a place in the top", "decode/step.cu", "!(score < p.threshold) && ", "",
          "decoding[gates]"),
    Fault("the bias begins one position late", "decode/step.cu", "DELAY && position > now - p.delay",
          "DELAY && position >= now - p.delay", "decoding[delay]"),
    Fault("a bias of -inf hides a key from near tokens", "decode/step.cu",
          "slot.bias(p, change.position) == -infinity()",
          "slot.score == -infinity()", "decoding[delay]"),
    Fault("a key is seen for one position too long", "decode/flash_decode.cu", "rows.last_position < stop;",
          "rows.last_position <= stop;", "flash_decode[window]"),
    Fault("a tile begins with the first head of a query", "decode/flash_decode.cu",
          "last_position = (first + count - 1) / p.group + shift;",
          "last_position = first_position + (count - 1) / p.group;", "test_tiles_inside_heads"),
]
