// Tiles: eight matrices of up to 16 rows x 64 bytes, in the registers of AMX. Included by ISA-specific
// sources only, inside their namespace. tile_emulated.h has the same functions in plain code.
//
// Not the compiler's intrinsics: their tile numbers must be literals, and GCC's _tile_loadd does not say that
// it reads memory. Instructions: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2.
struct TileShape {
    int rows, bytes;  // up to 16, up to 64
};

// Gives this thread's tiles their shapes and zeroes them.
inline void tile_configure(const TileShape (&shapes)[8]) {
    alignas(64) uint8_t config[64] = {1};  // palette 1: tiles of 1 KiB
    for (int i = 0; i < 8; ++i) {
        config[16 + 2 * i] = static_cast<uint8_t>(shapes[i].bytes);
        config[48 + i] = static_cast<uint8_t>(shapes[i].rows);
    }
    asm volatile("ldtilecfg %0" : : "m"(config));
}

// Back to the initial state, which the kernel need not save when it switches threads or calls a signal
// handler.
inline void tile_release() { asm volatile("tilerelease"); }

template <int kTile>
inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

// Rows `stride` bytes apart.
template <int kTile>
inline void tile_load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(p), "r"(stride) : "memory");
}
template <int kTile>
inline void tile_store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(kTile), "r"(p), "r"(stride) : "memory");
}

// c[m][n] += sum over j, b of i8 a[m][j][b] * i8 b[j][n][b], b = 0..3, exactly
template <int kC, int kA, int kB>
inline void tile_dot_bytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

// c[m][n] += sum over j, b of bf16 a[m][j][b] * bf16 b[j][n][b], b = 0..1
template <int kC, int kA, int kB>
inline void tile_dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}
