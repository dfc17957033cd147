// Products by Intel's matrix unit (AMX), of tiles: TILE rows of 64 bytes. A row of sums depends on its own
// row of factors only. Inputs are summed in runs of TILE_INPUTS, in which even ones are apart from odd ones.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AMX_BF16__) && !defined(NO_AMX)
constexpr bool HAS_TILES = true;
#else
constexpr bool HAS_TILES = false;
#endif

constexpr int TILE = 16;  // rows of a tile, and columns of a tile of sums
constexpr int TILE_INPUTS = 32;  // inputs of one product of tiles

struct bfloat16 {
    uint16_t bits;
};

// Rows of numbers: where they begin, and the numbers from one row to the next.
template <class N> struct Matrix {
    N* data;
    int64_t stride;
    Matrix from(int64_t row, int64_t column) const { return {data + row * stride + column, stride}; }
    int64_t row_bytes() const { return stride * sizeof(N); }
};

// While it lives, its thread may multiply tiles. Tiles that are kept longer make switches of threads slower.
struct Tiles {
    Tiles(const Tiles&) = delete;
#if defined(__AMX_BF16__) && !defined(NO_AMX)
    struct alignas(64) Shapes {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    };
    Tiles() {
        Shapes shapes;
        for (int tile = 0; tile < 8; tile++) shapes.row_bytes[tile] = 64, shapes.rows[tile] = TILE;
        asm volatile("ldtilecfg\t%0" ::"m"(shapes));
    }
    ~Tiles() { asm volatile("tilerelease"); }
#else
    Tiles() {}
#endif
};

// The compilers' intrinsics take no number of a template, and some do not say that they read memory.
template <int TO, class N> inline void load_tile(Matrix<N> from) {
    asm volatile(
        "tileloadd\t(%0,%1,1), %%tmm%c2" ::"r"(from.data), "r"(from.row_bytes()), "i"(TO) : "memory");
}
template <int FROM> inline void store_tile(Matrix<float> to) {
    asm volatile(
        "tilestored\t%%tmm%c2, (%0,%1,1)" ::"r"(to.data), "r"(to.row_bytes()), "i"(FROM) : "memory");
}
template <int TO> inline void zero_tile() { asm volatile("tilezero\t%%tmm%c0" ::"i"(TO)); }
template <int SUMS, int ROWS, int COLUMNS> inline void multiply_tiles() {
    asm volatile("tdpbf16ps\t%%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(COLUMNS));
}

// Adds TILE_INPUTS products of each row and column to sums in tiles 0 to 3. All loads come first: where two
// threads share a core, a load waits for the products before it.
template <int R, int C> inline void add_run(Matrix<const bfloat16> rows, Matrix<const bfloat16> columns) {
    load_tile<4>(rows);
    load_tile<6>(columns);
    if constexpr (R > 1) load_tile<5>(rows.from(TILE, 0));
    if constexpr (C > 1) load_tile<7>(columns.from(0, 2 * TILE));
    multiply_tiles<0, 4, 6>();
    if constexpr (C > 1) multiply_tiles<1, 4, 7>();
    if constexpr (R > 1) multiply_tiles<2, 5, 6>();
    if constexpr (R > 1 && C > 1) multiply_tiles<3, 5, 7>();
}

// The last inputs, too few for a run: copies that are filled up with zeros.
template <int R, int C>
void add_rest(Matrix<const bfloat16> rows, int inputs, Matrix<const bfloat16> columns) {
    alignas(64) bfloat16 some_rows[R * TILE][TILE_INPUTS] = {};
    alignas(64) bfloat16 some_columns[TILE_INPUTS / 2][2 * C * TILE] = {};
    for (int row = 0; row < R * TILE; row++)
        memcpy(some_rows[row], rows.from(row, 0).data, inputs * sizeof(bfloat16));
    for (int pair = 0; pair < inputs / 2; pair++)
        memcpy(some_columns[pair], columns.from(pair, 0).data, sizeof some_columns[0]);
    add_run<R, C>({some_rows[0], TILE_INPUTS}, {some_columns[0], 2 * C * TILE});
}

// sums [R * TILE][C * TILE] += rows [R * TILE][inputs] times columns [inputs / 2][C * TILE][2], of an even
// number of inputs. All R * TILE rows are read and written. `before(k)` is called before each run of inputs.
template <int R, int C, class F> void add_product(
    Matrix<const bfloat16> rows, int inputs, Matrix<const bfloat16> columns, Matrix<float> sums, F before) {
    static_assert(R <= 2 && C <= 2);
    load_tile<0>(sums);
    if constexpr (C > 1) load_tile<1>(sums.from(0, TILE));
    if constexpr (R > 1) load_tile<2>(sums.from(TILE, 0));
    if constexpr (R > 1 && C > 1) load_tile<3>(sums.from(TILE, TILE));
    int k = 0;
    for (; k + TILE_INPUTS <= inputs; k += TILE_INPUTS) {
        before(k);
        add_run<R, C>(rows.from(0, k), columns.from(k / 2, 0));
    }
    if (k < inputs) add_rest<R, C>(rows.from(0, k), inputs - k, columns.from(k / 2, 0));
    store_tile<0>(sums);
    if constexpr (C > 1) store_tile<1>(sums.from(0, TILE));
    if constexpr (R > 1) store_tile<2>(sums.from(TILE, 0));
    if constexpr (R > 1 && C > 1) store_tile<3>(sums.from(TILE, TILE));
}
