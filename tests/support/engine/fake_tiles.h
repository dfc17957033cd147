// Intel's matrix unit (AMX), computed one number after the other: included before the kernels, for processors that have none.
#pragma once
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <cstdint>
#include <cstring>
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define __AMX_BF16__ 1
#define syscall(...) 0

struct FakeTiles {
    uint16_t row_bytes[16];
    uint8_t rows[16];
    alignas(64) uint8_t data[8][16][64];
};
inline FakeTiles& fake() {
    static thread_local FakeTiles tiles;
    return tiles;
}
inline void fake_config(const void* shapes) {
    memcpy(fake().row_bytes, (const char*)shapes + 16, 32);
    memcpy(fake().rows, (const char*)shapes + 48, 16);
    memset(fake().data, 0, sizeof fake().data);
}
inline void fake_load(int tile, const void* from, int64_t stride) {
    memset(fake().data[tile], 0, sizeof fake().data[tile]);
    for (int row = 0; row < fake().rows[tile]; row++) memcpy(fake().data[tile][row], (const char*)from + row * stride, fake().row_bytes[tile]);
}
inline void fake_store(int tile, void* to, int64_t stride) {
    for (int row = 0; row < fake().rows[tile]; row++) memcpy((char*)to + row * stride, fake().data[tile][row], fake().row_bytes[tile]);
}
inline float fake_float(const uint8_t* bits) {
    uint32_t word = 0;
    memcpy((char*)&word + 2, bits, 2);
    float x;
    memcpy(&x, &word, 4);
    return x;
}
inline void fake_multiply(int to, int left, int right) {
    for (int row = 0; row < fake().rows[to]; row++)
        for (int pair = 0; pair < fake().row_bytes[left] / 4; pair++)
            for (int column = 0; column < fake().row_bytes[to] / 4; column++) {
                float sum;
                memcpy(&sum, &fake().data[to][row][4 * column], 4);
                for (int half = 0; half < 2; half++)
                    sum += fake_float(&fake().data[left][row][4 * pair + 2 * half]) * fake_float(&fake().data[right][pair][4 * column + 2 * half]);
                memcpy(&fake().data[to][row][4 * column], &sum, 4);
            }
}
#define _tile_loadconfig(shapes) fake_config(shapes)
#define _tile_zero(tile) memset(fake().data[tile], 0, sizeof fake().data[tile])
#define _tile_loadd(tile, from, stride) fake_load(tile, from, stride)
#define _tile_stored(tile, to, stride) fake_store(tile, to, stride)
#define _tile_dpbf16ps(to, left, right) fake_multiply(to, left, right)
