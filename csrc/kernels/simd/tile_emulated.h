// Tiles in plain code: the same functions as tile_amx.h, with what the manual says about each instruction,
// for machines without AMX. Included by ISA-specific sources only, inside their namespace.
//
// The products of bf16 round in the manual's order of operations; denormal numbers, which AMX takes for zero,
// are kept.
struct TileShape {
    int rows, bytes;  // up to 16, up to 64
};

struct Tiles {
    TileShape shape[8];
    alignas(64) uint8_t data[8][16][64];
};
inline thread_local Tiles tiles;

// Where the CPU would raise an exception.
inline void tile_require(bool valid) {
    if (!valid) __builtin_trap();
}

inline void tile_configure(const TileShape (&shapes)[8]) {
    for (int i = 0; i < 8; ++i) {
        tile_require(shapes[i].rows > 0 && shapes[i].rows <= 16 && shapes[i].bytes > 0 &&
                     shapes[i].bytes <= 64);
        tiles.shape[i] = shapes[i];
    }
    std::memset(tiles.data, 0, sizeof tiles.data);
}

inline void tile_release() { tiles = {}; }

template <int kTile>
inline void tile_zero() {
    tile_require(tiles.shape[kTile].rows > 0);
    std::memset(tiles.data[kTile], 0, sizeof tiles.data[kTile]);
}

template <int kTile>
inline void tile_load(const void* p, int64_t stride) {
    tile_zero<kTile>();
    for (int m = 0; m < tiles.shape[kTile].rows; ++m)
        std::memcpy(tiles.data[kTile][m], static_cast<const uint8_t*>(p) + m * stride,
                    tiles.shape[kTile].bytes);
}
template <int kTile>
inline void tile_store(void* p, int64_t stride) {
    tile_require(tiles.shape[kTile].rows > 0);
    for (int m = 0; m < tiles.shape[kTile].rows; ++m)
        std::memcpy(static_cast<uint8_t*>(p) + m * stride, tiles.data[kTile][m], tiles.shape[kTile].bytes);
}

template <int kC, int kA, int kB>
inline void tile_check_shapes() {
    static_assert(kC != kA && kC != kB && kA != kB);
    const TileShape &c = tiles.shape[kC], &a = tiles.shape[kA], &b = tiles.shape[kB];
    tile_require(c.rows > 0 && c.rows == a.rows && c.bytes == b.bytes && a.bytes == 4 * b.rows &&
                 c.bytes % 4 == 0);
}

template <int kC, int kA, int kB>
inline void tile_dot_bytes() {
    tile_check_shapes<kC, kA, kB>();
    for (int m = 0; m < tiles.shape[kC].rows; ++m) {
        int32_t sums[16];
        std::memcpy(sums, tiles.data[kC][m], sizeof sums);
        for (int j = 0; j < tiles.shape[kB].rows; ++j) {
            const uint8_t *a = tiles.data[kA][m] + 4 * j, *b = tiles.data[kB][j];
            for (int n = 0; n < 16; ++n)
                for (int i = 0; i < 4; ++i)
                    sums[n] += static_cast<int8_t>(a[i]) * static_cast<int8_t>(b[4 * n + i]);
        }
        std::memcpy(tiles.data[kC][m], sums, sizeof sums);
    }
}

template <int kC, int kA, int kB>
inline void tile_dot_bf16() {
    tile_check_shapes<kC, kA, kB>();
    const auto value = [](const uint8_t* p) {
        uint32_t bits = static_cast<uint32_t>(p[0]) << 16 | static_cast<uint32_t>(p[1]) << 24;
        float f;
        std::memcpy(&f, &bits, sizeof f);
        return f;
    };
    for (int m = 0; m < tiles.shape[kC].rows; ++m) {
        float sums[16], even[16] = {}, odd[16] = {};
        std::memcpy(sums, tiles.data[kC][m], sizeof sums);
        for (int j = 0; j < tiles.shape[kB].rows; ++j) {
            const uint8_t *a = tiles.data[kA][m] + 4 * j, *b = tiles.data[kB][j];
            for (int n = 0; n < 16; ++n) {
                even[n] = __builtin_fmaf(value(a), value(b + 4 * n), even[n]);
                odd[n] = __builtin_fmaf(value(a + 2), value(b + 4 * n + 2), odd[n]);
            }
        }
        for (int n = 0; n < 16; ++n) sums[n] += even[n] + odd[n];
        std::memcpy(tiles.data[kC][m], sums, sizeof sums);
    }
}
