// The integer block kernel: any number of rows times one panel, in a tile unit. Included by ISA-specific
// sources inside their namespace, after a SIMD header, a tile header and tile_int.h.
//
// A product is one tile multiplication: 16 outputs x up to 16 rows x the 16 or 32 k that share an integer
// scale. Its sums must leave the tile unit, because a float operation per scale is part of the contract; so
//
//   weights (bit planes)  --unpacked once per panel and stretch-->  i8 [k/4][16][4]  = tile B
//   activations           --------------------------------------->  i8 [rows][k]     = tile A
//   A x B = i32 [rows][16]  --stored-->  dots [rows][products][16]  --per row, in vector registers-->  out
//
// The rows of dots are outermost because a load that agrees with an earlier store in the last 12 bits of its
// address may have to wait for it: here the stores of a product agree with one in eight of the loads, with
// products outermost it would be one in four.
//
// While the vector units work on the sums of one stage (8 products of up to 16 rows), the tile unit
// multiplies the next one: both are in one stream of instructions, a few rows of the one after every two
// products of the other.

// k that are unpacked at a time: their weights (8 KiB), the sums of two stages (16 KiB) and the activations
// of 16 rows (8 KiB) fit an L1 of 48 KiB.
constexpr int64_t kStretch = 512;
constexpr int64_t kTileRows = 16;

// `rows` as equal blocks of up to 16. The last one begins earlier where they do not come out even: its first
// rows are multiplied again and left alone.
struct RowBlocks {
    int64_t count, height;
    explicit RowBlocks(int64_t rows)
        : count((rows + kTileRows - 1) / kTileRows), height((rows + count - 1) / count) {}
    int64_t first(int64_t block, int64_t rows) const {
        return block + 1 < count ? block * height : rows - height;
    }
    int64_t skip(int64_t block, int64_t rows) const { return block * height - first(block, rows); }
};

template <Format kFormat, bool kTwoBytes>
struct IntBlock {
    static constexpr const FormatInfo& f = info(kFormat);
    static constexpr int kDepth = f.scale_k;  // k per product
    static constexpr int kBytes = kTwoBytes ? 2 : 1;
    // Products per stage; their scales, and minimums, stay in registers for all rows.
    static constexpr int kProducts = 8 / kBytes;
    static constexpr int kDotsRow = kProducts * kBytes * kPanel;  // sums of a stage per row
    static constexpr bool kWholeSuper = kProducts * kDepth == kSuper;

    struct Stage {
        const uint8_t* super;  // the superblock's header
        int groups;            // of 32 k, in the superblock
        int first, count;      // products of the superblock
        int64_t k;             // where the first product begins
        const int8_t* weights;
    };

    // Tiles: 0 and 1 sums (2 and 3: of the activations' low bytes), 4 and 5 activations, 6 and 7 weights.
    static void configure(int64_t rows) {
        const int height = static_cast<int>(RowBlocks(rows).height);
        const TileShape sums{height, 64}, a{height, kDepth}, b{kDepth / 4, 64};
        tile_configure({sums, sums, sums, sums, a, a, b, b});
    }

    // The header and the k of a stage's products, over several rows.
    struct Scales {
        Float scale[kProducts], min[kProducts];  // formats with super-scales: the integer scales
        Float d, dmin;
        Bytes mins[kGroupsPerSuper / 2];
    };

    // Weights [k_begin, k_end) of the panel to i8, and the stages they make. Returns the number of stages.
    static int unpack(const LinearTile& t, int64_t k_begin, int64_t k_end, const uint8_t*& super,
                      int8_t* weights, Stage* stages) {
        const Bytes offset = bytes_splat(static_cast<uint8_t>(f.offset));
        int count = 0;
        for (int64_t k = k_begin; k < k_end; k += kSuper) {
            const int groups =
                f.super ? kGroupsPerSuper : static_cast<int>((t.k - k < kSuper ? t.k - k : kSuper) / kGroup);
            const uint8_t* codes = super + header_bytes(kFormat, groups);
            const int8_t* begin = weights;
            for (int g = 0; g < groups; ++g, codes += group_bytes(kFormat), weights += kGroup * kPanel) {
                if (t.prefetch)  // the codes of the next stretch, while this one is computed
                    for (size_t line = 0; line < group_bytes(kFormat); line += 64)
                        __builtin_prefetch(codes + kStretch / kSuper * super_bytes(kFormat, kGroupsPerSuper) +
                                           line);
                unpack_group<kFormat>(codes, [&](auto s, Bytes w) {
                    bytes_store(reinterpret_cast<uint8_t*>(weights) + s * 64,
                                f.offset == 0 ? w : bytes_sub(w, offset));
                });
            }
            const int products = groups * kGroup / kDepth;
            for (int i = 0; i < products; i += kProducts)
                stages[count++] = {super,
                                   groups,
                                   i,
                                   products - i < kProducts ? products - i : kProducts,
                                   k + i * kDepth,
                                   begin + i * kDepth * kPanel};
            super += super_bytes(kFormat, groups);
        }
        return count;
    }

    // What one unit, a stage of a block of rows, multiplies: activations from its first row and k on, weights
    // of the stage, and where the sums go.
    struct Factors {
        const int8_t *q, *low, *weights;
        int64_t q_stride;
        int32_t* dots;
        int count;  // of products
    };

    // The sums of product i.
    template <int kSlot>
    static inline __attribute__((always_inline)) void multiply(const Factors& of, int i) {
        int32_t* dots = of.dots + i * kBytes * kPanel;
        tile_load<6 + kSlot>(of.weights + i * kDepth * kPanel, 64);
        tile_load<4 + kSlot>(of.q + i * kDepth, of.q_stride);
        tile_zero<kSlot>();
        tile_dot_bytes<kSlot, 4 + kSlot, 6 + kSlot>();
        tile_store<kSlot>(dots, kDotsRow * 4);
        if constexpr (kTwoBytes) {
            tile_load<4 + kSlot>(of.low + i * kDepth, of.q_stride);
            tile_zero<2 + kSlot>();
            tile_dot_bytes<2 + kSlot, 4 + kSlot, 6 + kSlot>();
            tile_store<2 + kSlot>(dots + kPanel, kDotsRow * 4);
        }
    }

    static inline __attribute__((always_inline)) void multiply_two(const Factors& of, int i) {
        if (i < of.count) multiply<0>(of, i);
        if (i + 1 < of.count) multiply<1>(of, i + 1);
    }

    template <class Each>
    static inline __attribute__((always_inline)) void each_product(Each each) {
        [&]<int... i>(std::integer_sequence<int, i...>) {
            (each(std::integral_constant<int, i>{}), ...);
        }(std::make_integer_sequence<int, kProducts>{});
    }

    static inline __attribute__((always_inline)) void load_scales(const Stage& stage, Scales& s) {
        const uint8_t* header = stage.super + 2 * kPanel * (f.min ? 2 : 1);
        each_product([&](auto i) {
            if constexpr (f.super) {
                const uint8_t* at = header + (stage.first + i) * kPanel;
                Int scale = f.min ? ints_from_u8(at) : ints_from_i8(at);
                if constexpr (kFormat == Format::q2_k) scale = int_and(scale, int_splat(0xF));
                s.scale[i] = to_float(scale);
            } else if (i < stage.count) {
                s.scale[i] = float_from_half(stage.super + (stage.first + i) * 2 * kPanel);
                if constexpr (f.min)
                    s.min[i] = float_from_half(stage.super + (stage.groups + stage.first + i) * 2 * kPanel);
            }
        });
        if constexpr (f.super) {
            s.d = float_from_half(stage.super);
            if constexpr (f.min) s.dmin = float_from_half(stage.super + 2 * kPanel);
            if constexpr (f.min && f.scale_k == kGroup)
                for (int pair = 0; pair < kGroupsPerSuper / 2; ++pair)
                    s.mins[pair] = words_from_u8(header + kGroupsPerSuper * kPanel + pair * 2 * kPanel);
        }
    }

    // Adds the products of a stage to one row. `dots`: its sums; `carry`: the row's sum over the first half
    // of a superblock of two stages.
    static inline __attribute__((always_inline)) void add(const LinearTile& t, const Stage& stage,
                                                          const Scales& s, int64_t row, const int32_t* dots,
                                                          float* carry) {
        const auto dot = [&](int i) {
            const int32_t* at = dots + i * kBytes * kPanel;
            Int sum = int_load(at);
            if constexpr (kTwoBytes) sum = int_add(int_shift_left<7>(sum), int_load(at + kPanel));
            return to_float(sum);
        };
        float* out = t.out + row * t.out_stride;
        const int64_t super_k = stage.k - stage.first * kDepth;
        const float* start =
            (f.super ? super_k : stage.k) == t.k_begin ? t.start + row * t.start_stride : out;
        if constexpr (!f.super) {
            Float sum = float_load(start);
            const int64_t at = row * t.a.groups32 + stage.k / kGroup;
            each_product([&](auto i) {
                if (i >= stage.count) return;
                sum = float_fma(dot(i), float_mul(s.scale[i], float_splat(t.a.scale[at + i])), sum);
                if constexpr (f.min) sum = float_fma(s.min[i], float_splat(t.a.sum[at + i]), sum);
            });
            float_store(out, sum);
        } else {
            Float sum = kWholeSuper || stage.first == 0 ? float_zero() : float_load(carry);
            each_product([&](auto i) { sum = float_fma(dot(i), s.scale[i], sum); });
            if (!kWholeSuper && stage.first == 0) return float_store(carry, sum);
            const Float scale = float_splat(t.a.scale[row * t.a.groups32 + super_k / kSuper]);
            Float total = float_fma(sum, float_mul(s.d, scale), float_load(start));
            if constexpr (f.min) {
                Int mins = int_zero();
                if constexpr (kFormat == Format::q2_k) {
                    const uint8_t* packed = stage.super + 2 * 2 * kPanel;
                    for (int i = 0; i < kSuper / 16; ++i)
                        mins = dot_words(mins, int_shift_right<4>(ints_from_u8(packed + i * kPanel)),
                                         -t.a.neg16[(row * t.a.groups32 + super_k / kGroup) * 2 + i] /
                                             kOffset16);
                } else {
                    for (int pair = 0; pair < kGroupsPerSuper / 2; ++pair) {
                        int32_t sums;
                        __builtin_memcpy(&sums, t.a.words + row * t.a.groups32 + super_k / kGroup + pair * 2,
                                         4);
                        mins = dot_words(mins, s.mins[pair], sums);
                    }
                }
                total = float_fnma(to_float(mins), float_mul(s.dmin, scale), total);
            }
            float_store(out, total);
        }
    }

    static void run(const LinearTile& tile) {
        const LinearTile t = tile;  // its members may stay in registers
        alignas(64) int8_t weights[kStretch * kPanel];
        alignas(64) int32_t dots[2][kTileRows * kDotsRow];
        alignas(64) float carry[kTileRows * kPanel];
        Stage stages[kStretch / (kProducts * kDepth)];
        const RowBlocks blocks(t.rows);
        const uint8_t* super = t.panel + t.k_begin / kSuper * super_bytes(kFormat, kGroupsPerSuper);
        for (int64_t k = t.k_begin; k < t.k_end; k += kStretch) {
            const int count =
                unpack(t, k, t.k_end - k < kStretch ? t.k_end : k + kStretch, super, weights, stages);
            const auto factors = [&](int stage, int64_t block, int32_t* to) {
                if (block == blocks.count) return Factors{};
                const Stage& s = stages[stage];
                const int64_t at = blocks.first(block, t.rows) * t.a.q_stride + s.k;
                return Factors{t.a.q + at, kTwoBytes ? t.a.low + at : nullptr, s.weights, t.a.q_stride, to,
                               s.count};
            };
            const Factors first = factors(0, 0, dots[0]);
            for (int i = 0; i < kProducts; i += 2) multiply_two(first, i);
            int stage = 0, turn = 0;  // of dots
            for (int64_t block = 0; block < blocks.count; turn = 1 - turn) {
                const int64_t row = blocks.first(block, t.rows), skip = blocks.skip(block, t.rows);
                const int32_t* sums = dots[turn];
                const Stage& now = stages[stage];
                Scales scales;
                load_scales(now, scales);
                if (++stage == count) {
                    stage = 0;
                    ++block;
                }
                const Factors next = factors(stage, block, dots[1 - turn]);
                for (int i = 0; i < kProducts; i += 2) {
                    multiply_two(next, i);
                    const int64_t begin = blocks.height * i / kProducts;
                    const int64_t end = blocks.height * (i + 2) / kProducts;
                    for (int64_t r = begin < skip ? skip : begin; r < end; ++r)
                        add(t, now, scales, row + r, sums + r * kDotsRow, carry + r * kPanel);
                }
            }
        }
    }
};
