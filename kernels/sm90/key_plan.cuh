// The tickets of sm90/backward_dkv.cu with KEYS_SHARED, which sm90/backward_dkv_plan.cu makes: a ticket is a tile, or one
// split of a tile that has more steps than an SM's share of all steps.
#pragma once

struct alignas(16) Ticket {
    int tile;               // find_key_tile
    int first_step, steps;  // of all heads: no more than these
    int slot;               // of the sums of a split: partial rows from slot * BLOCK_N on; -1: a whole tile
};

struct alignas(16) SplitTile {
    int tile, first_slot, splits;
};

struct KeyPlan {
    Ticket* tickets;         // (tiles + slots): the longest first
    SplitTile* split_tiles;  // (slots / 2)
    int* counts;             // tickets, split tiles
    int split_steps;         // steps of a split; 0: the share
    int sms;
};
