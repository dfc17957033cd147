// The arguments that Python passes: cpu/native.py reads them here.
#pragma once
#include <cstdint>

// A few tokens next to each other of one row.
struct Tile {
    int32_t token, count;  // the first, and how many
    int32_t position;  // of the first
    int32_t table;  // first index in `tables`
    int32_t seen;  // keys that each of its queries sees at least: up to the end of a picture seen as one
    int32_t part, parts;  // with more than one part, `part` is the segment of keys that is attended to
};

// The matrices of one adapter for one linear layer.
struct LowRank {
    const void* down;  // [rank][inputs]
    const void* up;  // [panels][rank][PANEL], with the adapter's scaling
    int32_t rank;  // 0: the adapter leaves this layer as it is
};

// Tokens of one adapter, next to each other in `order`.
struct Run {
    int32_t slot, first, count;
};

// Which tokens of a step have an adapter.
struct Adapters {
    const LowRank* matrices;  // [slots][linear layers]
    int32_t num_linears, max_rank, num_runs;
    const Run* runs;
    const int32_t* order;  // the tokens that have one
    const int32_t* slots;  // [tokens]; -1: none
    const uint8_t* used;  // [linear layers] whether an adapter of the step changes it
};

// What all layers share in a step.
struct Step {
    int32_t threads, num_tokens, num_tiles, block_size;
    int32_t num_parts;  // tiles that are parts, which follow each other
    const int64_t* slots;  // [tokens] block * block_size + offset: where K and V go
    const Tile* tiles;
    const int32_t* tables;
    const Adapters* adapters;  // null: no token has one
};

// K pages are [blocks][kv_heads][key_dim / P][block_size][P],
// V pages are [blocks][kv_heads][block_size][value_dim].
struct Pages {
    void *keys, *values;
    int32_t stored;  // 8-bit floats in place of the model's numbers: 1 e4m3, 2 e5m2 (floats8.h); else 0
    float key_scale, value_scale;  // what 8-bit floats are multiplied with; else 1
};

struct Cache {
    Pages pages;
    int32_t kv_heads, group, key_dim, value_dim;
    int32_t window;  // keys that a query sees; 0 is all
    float scaling, softcap;  // 0 is none
    const float* sinks;  // [heads] or null
};

// [tokens][heads][dim], numbers from one to the next token or head.
struct Heads {
    const void* data;
    int64_t token, head;
};

// Quants as in blocks.h. Scales, and offsets where there are any, are [panels][inputs / size][PANEL] numbers
// of float16 or float32. Codes are 16 numbers, what quants of 4 bits stand for; null where for themselves.
struct Blocks {
    const void *quants, *scales, *offsets;
    const float* codes;  // then there are no offsets
    int32_t bits;  // of a quant: 4 or 8; 0 where weights are not in blocks
    int32_t size, half_scales;
    int32_t rounds;  // whether rows are rounded to 8 bits (rounded.h)
};

struct Linear {
    const void* packed;  // null where they are in blocks only
    const float* bias;  // [outputs, rounded up to whole panels] or null
    int32_t inputs, outputs;
    Blocks blocks;
    int32_t number;  // among those that adapters change
};

struct Norm {
    const float* weight;  // null: there is none
    float epsilon;
};

// A layer of the shape that Llama made common: norm, attention, norm, gated feed-forward, each half with a
// residual connection.
struct Layer {
    const Cache* cache;
    const Linear *q, *k, *v, *o, *gate, *up, *down;
    Norm before_attention, before_mlp, of_query, of_key;  // the latter two are of each head
    int32_t rotary;  // numbers of a head that are rotated, half against half
};

// How n rows sample, in the order in which sampling/sampler.py makes them, also for the kernel on CUDA.
// All are [n] but for the last five.
struct SamplingArguments {
    const uint64_t* seed;
    const double* typical_p;
    const float *temperature, *repetition;  // a temperature of 0: the likeliest token
    const float* lowest;  // the logarithm of min_p
    const int32_t *choice, *top_k;  // a top_k of 0: all tokens
    const int32_t* raw_logprobs;  // whether the log-probability is the model's own
    const int32_t* num_tops;  // how many of the likeliest tokens are reported
    const double* top_p;
    const int32_t* place;  // the row of the logits
    const int32_t* index;  // of the next token
    const int32_t* parts;  // [n][1 + PARTS] where the row's parts of `ids` and `values` begin, and where the
                           // last one ends: logit bias, watermark, bans, and what penalties subtract
    const int32_t* mask;  // [n][2] where the row's mask begins in `masks`, and how many tokens it covers
    const int32_t* ids;
    const float* values;
    const int32_t* masks;
};
constexpr int PARTS = 4;  // of a row's ids and values

// Where sampled tokens go, [rows]; the likeliest beside them [tops][rows], of which a row fills its num_tops.
struct SamplerOutput {
    int64_t* ids;
    float* logprobs;
    int64_t* top_ids;
    float* top_logprobs;
    int32_t tops;
};
