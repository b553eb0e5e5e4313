// A model as a static list of operations, run whole for one step.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/isa.h"
#include "kernels/attention/attention.h"
#include "kernels/rows/rows.h"
#include "program/op.h"
#include "program/ops.h"
#include "threads/pool.h"

namespace treadle {

// Rows of a step from which its arithmetic, not the memory, is the limit, and its operations are long.
inline constexpr int64_t kManyRows = 33;
// A worker's own memory: the tile of a linear chunk, 8 panels x 512 rows x 16 floats, or two sets of
// attention sums.
inline constexpr int64_t kScratchBytes = int64_t{512} << 10;

struct ProgramLimits {
    int64_t max_tokens;  // rows per step
    int64_t max_logits;  // wanted logits rows per step
    int64_t blocks;      // cache blocks of kBlock tokens
};

class Program {
public:
    // `two_bytes`: activations in 15 instead of 8 bits where the weight format allows it.
    Program(std::shared_ptr<Pool> pool, Isa isa, const ProgramLimits& limits, bool two_bytes,
            KvType kv = KvType::bf16);

    // Building. Buffers are named by index. Every function throws std::invalid_argument when shapes do not
    // fit.
    int buffer(int64_t width, bool logits);
    void embed(Format format, std::span<const uint8_t> table, int64_t rows, int out);
    void select(int x, int out);
    void rms_norm(int x, std::vector<float> weight, float eps, int out);
    // residual < 0: none
    void linear(int x, std::vector<std::shared_ptr<const Matrix>> parts, std::vector<float> bias,
                int residual, int out);
    void gated_linear(int x, std::shared_ptr<const Matrix> gate, std::shared_ptr<const Matrix> up, int out);
    // Rotation frequencies per pair (radians per token), used by the attention operations that follow.
    void angles(std::vector<float> frequency, float magnitude);
    void attention(int qkv, const AttentionShape& shape, bool neox, CacheOp::HeadNorm norm, int out);

    // Runs every operation for the step. `interrupted` is asked now and then by the calling thread; when it
    // says yes the run ends early and the result is false. A second caller waits for the first. Throws
    // std::invalid_argument when the step exceeds the limits.
    bool run(Step step, const std::function<bool()>& interrupted);

    const Buffer& at(int buffer) const { return *buffers_.at(buffer); }
    const Step& step() const { return step_; }
    const ProgramLimits& limits() const { return limits_; }
    Isa isa() const { return isa_; }
    // Bytes of all caches.
    size_t cache_bytes() const;
    // Bytes of one block in all layers.
    size_t block_bytes() const;
    // Copies the content of a block, layer after layer, out of the caches and into them. Not while it runs.
    void read_block(int64_t block, uint8_t* to) const;
    void write_block(int64_t block, const uint8_t* from);

private:
    // The chunks that a worker takes first; the others help when their own are done.
    struct alignas(64) Strip {
        std::atomic<int64_t> next;
        int64_t end;
    };
    struct alignas(64) Progress {
        Word unfinished;  // chunks
    };

    Buffer& buffer_of(int index, int64_t width);
    // Emits `form` of buffer x unless it is there already.
    void want(int x, Form form);
    void wrote(int out, RmsNormOp* norm);
    LinearPart part(int x, std::shared_ptr<const Matrix> matrix);
    void add(std::unique_ptr<Op> op);
    void check(const Step& step) const;
    void work(int worker, const std::function<bool()>& interrupted);

    std::shared_ptr<Pool> pool_;
    Isa isa_;
    ProgramLimits limits_;
    bool two_bytes_;
    KvType kv_;
    std::vector<LinearKernels> linear_;  // by format
    RowKernels rows_;
    AttentionKernels attention_;
    std::vector<std::unique_ptr<Buffer>> buffers_;
    std::vector<std::vector<Form>> forms_;  // valid forms per buffer
    std::vector<RmsNormOp*> norm_of_;       // the norm that wrote the buffer, if it did
    std::vector<std::unique_ptr<Op>> ops_;
    AnglesOp* angles_ = nullptr;
    std::shared_ptr<AttentionPlan> plan_;
    AttentionShape plan_shape_{};
    Memory queries_;
    std::vector<Memory> caches_;
    int64_t block_stride_ = 0;  // bytes of one block in one layer
    int64_t embed_rows_ = 0;

    Step step_;
    std::mutex one_run_;
    int workers_ = 1;                       // of this run
    std::vector<Memory> scratch_;           // per worker
    std::unique_ptr<Strip[]> strips_;       // [ops][workers]
    std::unique_ptr<Progress[]> progress_;  // [ops]
    std::atomic<bool> stopped_{false};
};

}  // namespace treadle
