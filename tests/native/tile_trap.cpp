#include "tile_trap.h"

#include <signal.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct Tile {
    int rows = 0, bytes = 0;
    alignas(64) uint8_t data[16][64] = {};
};
thread_local Tile tiles[8];
thread_local bool configured = false;

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "AMX instruction: %s\n", what);
    std::abort();
}

template <class T>
T read(const uint8_t* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

void load_configuration(const uint8_t* p) {
    require(p[0] == 1, "LDTILECFG: palette is not 1");
    for (int i = 1; i < 16; ++i) require(p[i] == 0, "LDTILECFG: start row or reserved byte is not 0");
    for (int i = 32; i < 48; ++i) require(p[i] == 0, "LDTILECFG: reserved byte is not 0");
    for (int i = 56; i < 64; ++i) require(p[i] == 0, "LDTILECFG: reserved byte is not 0");
    for (int i = 0; i < 8; ++i) {
        tiles[i] = {};
        tiles[i].bytes = read<uint16_t>(p + 16 + 2 * i);
        tiles[i].rows = p[48 + i];
        require(tiles[i].bytes <= 64 && tiles[i].rows <= 16, "LDTILECFG: shape too large");
        require((tiles[i].bytes == 0) == (tiles[i].rows == 0), "LDTILECFG: half a shape");
    }
    configured = true;
}

// One instruction: VEX prefix C4, its fields, opcode, ModRM, SIB and displacement.
struct Instruction {
    const uint8_t* at;
    const greg_t* registers;
    int length = 5;

    int prefix() const { return at[2] & 3; }  // 0 none, 1 66, 2 F3, 3 F2
    int third() const { return ~(at[2] >> 3) & 0xF; }
    int opcode() const { return at[3]; }
    int mode() const { return at[4] >> 6; }
    int reg() const { return (at[4] >> 3 & 7) + (at[1] & 0x80 ? 0 : 8); }
    int rm() const { return (at[4] & 7) + (at[1] & 0x20 ? 0 : 8); }

    int64_t value(int number) const {
        static constexpr int kOrder[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                           REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                           REG_R12, REG_R13, REG_R14, REG_R15};
        return registers[kOrder[number]];
    }

    // The memory operand; index: the SIB byte's index register, scaled (the stride of tile loads and stores).
    uint8_t* memory(int64_t& index) {
        const bool sib = (at[4] & 7) == 4, tile = opcode() == 0x4B;
        require(mode() != 3, "a register where memory is needed");
        require(sib || !tile, "a tile load or store without SIB");
        int base = rm();
        index = 0;
        if (sib) {
            const int number = (at[5] >> 3 & 7) + (at[1] & 0x40 ? 0 : 8);
            if (number != 4) index = value(number) << (at[5] >> 6);
            base = (at[5] & 7) + (at[1] & 0x20 ? 0 : 8);
            ++length;
        }
        const bool no_base = mode() == 0 && (base & 7) == 5;
        int64_t address = no_base ? 0 : value(base);
        if (mode() == 1) address += static_cast<int8_t>(at[length]);
        if (mode() == 2 || no_base) address += read<int32_t>(at + length);
        length += mode() == 1 ? 1 : mode() == 2 || no_base ? 4 : 0;
        if (no_base && !sib) address += reinterpret_cast<int64_t>(at) + length;  // from the next instruction
        if (!tile) address += index;
        return reinterpret_cast<uint8_t*>(address);
    }
};

void multiply(const Instruction& in) {
    require(in.mode() == 3, "memory where a tile is needed");
    require(in.reg() != in.rm() && in.reg() != in.third() && in.rm() != in.third(), "a tile used twice");
    Tile &c = tiles[in.reg() & 7], &a = tiles[in.rm() & 7], &b = tiles[in.third() & 7];
    require(in.reg() < 8 && in.rm() < 8 && in.third() < 8, "there is no such tile");
    require(c.rows > 0 && a.rows > 0 && b.rows > 0, "a tile without a shape");
    require(c.rows == a.rows && c.bytes == b.bytes && a.bytes == 4 * b.rows && c.bytes % 4 == 0 &&
                a.bytes % 4 == 0,
            "shapes that do not fit");
    const bool integers = in.opcode() == 0x5E;
    require(integers ? in.prefix() == 3 : in.prefix() == 2, "a multiplication that is not emulated");
    for (int m = 0; m < c.rows; ++m) {
        for (int n = 0; n < c.bytes / 4; ++n) {
            uint8_t* to = c.data[m] + 4 * n;
            if (integers) {
                int32_t sum = read<int32_t>(to);
                for (int k = 0; k < a.bytes; ++k)
                    sum +=
                        static_cast<int8_t>(a.data[m][k]) * static_cast<int8_t>(b.data[k / 4][4 * n + k % 4]);
                std::memcpy(to, &sum, 4);
                continue;
            }
            const auto number = [](const uint8_t* p) {
                const uint32_t bits = static_cast<uint32_t>(read<uint16_t>(p)) << 16;
                float f;
                std::memcpy(&f, &bits, 4);
                return f;
            };
            float part[2] = {0, 0};
            for (int k = 0; k < a.bytes / 2; ++k)
                part[k % 2] = std::fma(number(a.data[m] + 2 * k), number(b.data[k / 2] + 4 * n + k % 2 * 2),
                                       part[k % 2]);
            const float sum = read<float>(to) + (part[0] + part[1]);
            std::memcpy(to, &sum, 4);
        }
    }
}

// Carries out the instruction and returns its length.
int emulate(Instruction in) {
    require(in.at[0] == 0xC4 && (in.at[1] & 0x1F) == 2 && (in.at[2] & 0x84) == 0, "not one of AMX");
    int64_t stride = 0;
    if (in.opcode() == 0x49 && in.prefix() == 0 && in.mode() != 3) {
        load_configuration(in.memory(stride));
        return in.length;
    }
    if (in.opcode() == 0x49 && in.prefix() == 0) {
        require(in.at[4] == 0xC0, "not TILERELEASE");
        for (Tile& tile : tiles) tile = {};
        configured = false;
        return in.length;
    }
    require(configured, "the tiles are not configured");
    if (in.opcode() == 0x49 && in.prefix() == 3 && in.mode() == 3) {
        require(tiles[in.reg()].rows > 0, "TILEZERO: a tile without a shape");
        std::memset(tiles[in.reg()].data, 0, sizeof tiles[in.reg()].data);
    } else if (in.opcode() == 0x4B) {
        Tile& tile = tiles[in.reg() & 7];
        uint8_t* memory = in.memory(stride);
        require(in.reg() < 8 && tile.rows > 0, "a load or store of a tile without a shape");
        require(in.prefix() == 3 || in.prefix() == 2, "a load that is not emulated");
        const bool load = in.prefix() == 3;
        if (load) std::memset(tile.data, 0, sizeof tile.data);
        for (int m = 0; m < tile.rows; ++m) {
            if (load)
                std::memcpy(tile.data[m], memory + m * stride, tile.bytes);
            else
                std::memcpy(memory + m * stride, tile.data[m], tile.bytes);
        }
    } else {
        require(in.opcode() == 0x5E || in.opcode() == 0x5C, "not emulated");
        multiply(in);
    }
    return in.length;
}

void on_illegal_instruction(int, siginfo_t*, void* context) {
    greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    registers[REG_RIP] += emulate({reinterpret_cast<const uint8_t*>(registers[REG_RIP]), registers});
}

}  // namespace

void trap_tile_instructions() {
    struct sigaction action = {};
    action.sa_sigaction = on_illegal_instruction;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &action, nullptr);
}
