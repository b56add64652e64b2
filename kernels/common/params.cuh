// The parameters of every attention kernel, one struct by value. Fields that a kernel does not use are 0.
#pragma once

struct AttentionParams {
    const ELEMENT* query;
    const ELEMENT* key;
    const ELEMENT* value;
    ELEMENT* out;
    float* lse;
    const float* bias;        // per key
    const void* bias_rows;    // per query and key, BIAS_ELEMENT
    const int* start;         // (1|B, 1|Hkv|H, key_length)
    const int* stop;
    const int* list;          // KEYS_LISTED (mask rows, tiles, capacity), KEYS_SHARED (mask rows, key_length)
    const int* list_lengths;  // KEYS_LISTED (mask rows, tiles, 2): full, all; KEYS_SHARED (mask rows)
    const unsigned* columns;        // lists/dense_mask.cu, with BITS: (mask rows, query_words, key_stride)
    const unsigned short* states;   // (mask rows, query_words, key_stride / 64)
    const int4* summaries;    // KEYS_SHARED (mask rows, key_length / BLOCK_N, rounded up)
    const int4* chunk_info;   // KEYS_SHARED of sequences (mask rows, key_length / chunk, rounded up): see lists/intervals.cu
    const int* bounds;        // (4, sequences): see common/varlen.cuh
    const int* page_table;  // PAGE_SIZE: (key_length / PAGE_SIZE) page in the KV cache of every PAGE_SIZE keys
    const ELEMENT* dout;      // the backward pass from here on
    const float* dlse;
    float* delta;
    ELEMENT* dquery;
    ELEMENT* dkey;
    ELEMENT* dvalue;
    float* dbias;             // (B, H, key_length)
    void* dbias_rows;         // of a dense bias: its shape, contiguous, BIAS_ELEMENT
    float* partial_key;       // (B * Hkv, supers, super_capacity, HEAD_DIM)
    float* partial_value;
    float* partial_bias;      // (B * Hkv, supers, super_capacity, H / Hkv)
    const int* super_list;    // (mask rows, supers, super_capacity); BITS: (list rows, super_entries)
    const int* super_lengths;  // (mask rows, supers)
    const int* seen;          // (mask rows, key_length): keys that some query sees, in order
    const int* seen_count;    // (mask rows)
    const int* span_offset;   // (mask rows, key_length): where the slots of a seen key begin in `slots`
    const int* slots;        // (mask rows, supers * super_capacity): a key's slot in each super-tile that sees it
                              // with BITS: (list rows, super_units, key_length), see lists/dense_macro_tiles.cu
    const int4* super_blocks;             // BITS, like the next two (list rows, super_entries / 64)
    const unsigned short* super_states;   // (mask rows, super_entries / 64, query_words)
    const int* super_counts;              // (list rows)
    long long query_batch, query_row, query_head;  // strides, in elements
    long long key_batch, key_head, value_batch, value_head;
    long long bias_batch, bias_group, bias_head, bias_query, bias_key;
    long long start_batch, start_head, stop_batch, stop_head;
    long long out_batch, out_row, out_head;  // of out, where it is an input
    long long dout_batch, dout_row, dout_head;
    int key_row, value_row;
    int mask_batch, mask_group, mask_head;  // mask row = batch * . + kv head * . + query head * .
    int mask_heads;                         // 1, Hkv or H: mask head = mask row % mask_heads
    int batch, query_length, key_length, heads, kv_heads;
    int tiles, capacity;
    int swizzle_group, tail_tiles, rotation;  // sm90/scheduler.cuh: the order of tiles
    int short_tiles;  // tiles of a set, the first ones, that have 64 fewer rows
    int query_words, key_stride;
    int dbias_batch, dbias_heads;  // axes of a dense bias
    int bias_aligned;  // whether rows of bias_rows may be read 16 bytes at a time
    int supers, super_capacity, super_queries, super_units;
    int list_batch, list_group;  // BITS: list row = batch * . + kv head * .
    int sequences, chunk;
    long long super_entries;        // of sequences and BITS: entries of all super-tiles' lists of a row
    long long key_page, value_page;  // strides of pages of the KV cache; key_row and value_row are strides within a page
    float scale, softcap;
    int bias_delay;  // DELAY: a key's bias applies from this many positions after the key
};
