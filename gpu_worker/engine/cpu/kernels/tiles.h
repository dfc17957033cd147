// Intel's matrix unit (AMX): one instruction multiplies 16 rows of 32 bfloat16 with 16 outputs. Packed panels
// have its layout. Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
#pragma once
#include <cstdint>
#include "vector.h"

constexpr int AHEAD = 4096;  // bytes of weights prefetched in advance

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && !defined(SPLIT_PAIRS) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

constexpr int TILE = 16, TILE_INPUTS = 32;

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64};  // of 8 tiles, as their rows; the others stay zero
    uint8_t rows[16] = {};
};

// Whether the system permits this process to use it: permission is requested once.
inline bool has_tiles() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return granted;
}

// Older compilers do not know what these instructions read: everything must be in memory before.
inline void keep_in_memory(const void* what) { asm volatile("" : : "r"(what) : "memory"); }

// 0 to 2 are sums, 3 is rows, 4 to 6 are weights. Others use the unit, too, so its shapes are configured
// by everyone who begins.
struct Tiles {
    int shaped = 0;  // rows

    void shape(int rows) {
        if (shaped == rows) return;
        TileShapes shapes;
        for (int tile = 0; tile < 7; tile++) shapes.rows[tile] = tile < 4 ? rows : TILE;
        keep_in_memory(&shapes);
        _tile_loadconfig(&shapes);
        shaped = rows;
    }

    // count rows, up to TILE, and a panel of three times 16 outputs → sums [count][48]; false where this
    // unit cannot multiply them
    bool multiply(const bfloat16* rows, int count, int inputs, const bfloat16* panel, float* sums) {
        // bytes from one pair of inputs to the next, or from one row's sums
        constexpr int STRIDE = 3 * TILE * 4;
        if (inputs % TILE_INPUTS || !has_tiles()) return false;
        shape(count);
        keep_in_memory(rows);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        for (int k = 0; k < inputs; k += TILE_INPUTS, panel += TILE_INPUTS * 3 * TILE) {
            for (int line = 0; line < TILE_INPUTS / 2 * STRIDE; line += 64)
                __builtin_prefetch((const char*)panel + AHEAD + line);
            _tile_loadd(3, rows + k, inputs * 2);
            _tile_loadd(4, panel, STRIDE);
            _tile_dpbf16ps(0, 3, 4);
            _tile_loadd(5, panel + 2 * TILE, STRIDE);
            _tile_dpbf16ps(1, 3, 5);
            _tile_loadd(6, panel + 4 * TILE, STRIDE);
            _tile_dpbf16ps(2, 3, 6);
        }
        _tile_stored(0, sums, STRIDE);
        _tile_stored(1, sums + TILE, STRIDE);
        _tile_stored(2, sums + 2 * TILE, STRIDE);
        return true;
    }
    bool multiply(const void*, int, int, const void*, float*) { return false; }
};
#else
constexpr int TILE = 1;
struct Tiles {
    bool multiply(const void*, int, int, const void*, float*) { return false; }
};
#endif
