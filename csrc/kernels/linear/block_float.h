// The BF16 block kernel: any number of rows times one panel, in a tile unit. Included by ISA-specific sources
// inside their namespace, after a SIMD header, a tile header and block_int.h.
//
// A step is 32 k: 16 rows of activations [rows][32] = tile A, and 1 KiB of the panel, which is laid out as
// tile B is: [16 pairs of k][16 outputs][2]. The float sums stay in tiles over the whole range of k.

struct Bf16Block {
    static constexpr int64_t kStep = 32;  // k
    static constexpr int kBlocks = 4;  // of rows that share a load of weights, and whose sums are independent

    // Tiles: 0 to 3 sums, 4 and 5 activations, 6 and 7 weights.
    static void configure(int64_t rows) {
        const int height = static_cast<int>(RowBlocks(rows).height);
        const TileShape own{height, 64}, weights{16, 64};
        tile_configure({own, own, own, own, own, own, weights, weights});
    }

    // Up to 16 rows: where they begin, and where their sums go.
    struct Rows {
        int64_t first;
        float* out;
        int64_t out_stride;
    };

    // out = start + x W for kCount blocks of `height` rows.
    template <int kCount>
    static void multiply(const LinearTile& t, const Rows (&rows)[kBlocks], int64_t height) {
        const auto each = [&](auto use) {
            [&]<int... i>(std::integer_sequence<int, i...>) {
                (use(std::integral_constant<int, i>{}), ...);
            }(std::make_integer_sequence<int, kCount>{});
        };
        const auto step = [&]<int kSlot>(int64_t k, std::integral_constant<int, kSlot>) {
            tile_load<6 + kSlot>(t.panel + k * kPanel * 2, 64);
            each([&](auto i) {
                constexpr int kTile = 4 + (kSlot + i) % 2;
                tile_load<kTile>(t.x_bf16 + rows[i].first * t.x_stride + k, t.x_stride * 2);
                tile_dot_bf16<i, kTile, 6 + kSlot>();
            });
        };
        each([&](auto i) { tile_load<i>(t.start + rows[i].first * t.start_stride, t.start_stride * 4); });
        int64_t k = t.k_begin;
        for (; k + 2 * kStep <= t.k_end; k += 2 * kStep) {
            step(k, std::integral_constant<int, 0>{});
            step(k + kStep, std::integral_constant<int, 1>{});
        }
        if (k + kStep <= t.k_end) {
            step(k, std::integral_constant<int, 0>{});
            k += kStep;
        }
        if (k < t.k_end) {  // the rest of the last step, filled up with zeros
            alignas(64) uint8_t weights[kStep * kPanel * 2] = {};
            __builtin_memcpy(weights, t.panel + k * kPanel * 2, (t.k_end - k) * kPanel * 2);
            tile_load<6>(weights, 64);
            each([&](auto i) {
                alignas(64) uint16_t x[kTileRows][kStep] = {};
                for (int64_t r = 0; r < height; ++r)
                    __builtin_memcpy(x[r], t.x_bf16 + (rows[i].first + r) * t.x_stride + k,
                                     (t.k_end - k) * 2);
                tile_load<4>(x, 64);
                tile_dot_bf16<i, 4, 6>();
            });
        }
        each([&](auto i) { tile_store<i>(rows[i].out, rows[i].out_stride * 4); });
    }

    static void run(const LinearTile& t) {
        const RowBlocks all(t.rows);
        alignas(64) float last[kTileRows * kPanel];  // of a last block that overlaps the one before
        for (int64_t begin = 0; begin < all.count; begin += kBlocks) {
            const int64_t count = all.count - begin < kBlocks ? all.count - begin : kBlocks;
            Rows rows[kBlocks] = {};
            for (int64_t i = 0; i < count; ++i) {
                const int64_t first = all.first(begin + i, t.rows);
                rows[i] = {first, t.out + first * t.out_stride, t.out_stride};
                if (all.skip(begin + i, t.rows) > 0) rows[i] = {first, last, kPanel};
            }
            switch (count) {
            case 1: multiply<1>(t, rows, all.height); break;
            case 2: multiply<2>(t, rows, all.height); break;
            case 3: multiply<3>(t, rows, all.height); break;
            default: multiply<4>(t, rows, all.height);
            }
        }
        const int64_t skip = all.skip(all.count - 1, t.rows);
        if (skip == 0) return;
        for (int64_t r = skip; r < all.height; ++r)
            float_store(t.out + (t.rows - all.height + r) * t.out_stride, float_load(last + r * kPanel));
    }
};
