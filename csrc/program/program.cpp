#include "program/program.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>

namespace treadle {

namespace {

void require(bool condition, const std::string& message) {
    if (!condition) throw std::invalid_argument(message);
}

void require_same_rows(const Buffer& a, const Buffer& b) {
    require(a.logits() == b.logits(), "an operation cannot mix a row per token with a row per wanted logits");
}

}  // namespace

Program::Program(std::shared_ptr<Pool> pool, Isa isa, const ProgramLimits& limits, bool two_bytes, KvType kv)
    : pool_(std::move(pool)), isa_(isa), limits_(limits), two_bytes_(two_bytes), kv_(kv),
      rows_(row_kernels(isa)), attention_(attention_kernels(isa, kv)) {
    for (int format = 0; format < kFormats; ++format)
        linear_.push_back(linear_kernels(isa, static_cast<Format>(format)));
    require(limits.max_tokens > 0 && limits.max_tokens <= 4096, "max_tokens must be between 1 and 4096");
    require(limits.max_logits > 0 && limits.max_logits <= 4096, "max_logits must be between 1 and 4096");
    require(limits.blocks > 0, "a program needs at least one cache block");
    for (int i = 0; i < pool_->size(); ++i) scratch_.push_back(Memory::resident(kScratchBytes));
}

int Program::buffer(int64_t width, bool logits) {
    require(width > 0, "a buffer needs a positive width");
    buffers_.push_back(
        std::make_unique<Buffer>(logits ? limits_.max_logits : limits_.max_tokens, width, logits));
    forms_.emplace_back();
    norm_of_.push_back(nullptr);
    return static_cast<int>(buffers_.size()) - 1;
}

Buffer& Program::buffer_of(int index, int64_t width) {
    require(index >= 0 && index < static_cast<int>(buffers_.size()),
            "there is no buffer " + std::to_string(index));
    Buffer& buffer = *buffers_[index];
    require(buffer.width() == width, "buffer " + std::to_string(index) + " is " +
                                         std::to_string(buffer.width()) + " wide, the operation needs " +
                                         std::to_string(width));
    return buffer;
}

void Program::add(std::unique_ptr<Op> op) {
    ops_.push_back(std::move(op));
    strips_.reset();  // made by the next run, for as many operations
}

void Program::wrote(int out, RmsNormOp* norm) {
    forms_[out].clear();
    norm_of_[out] = norm;
}

void Program::want(int x, Form form) {
    if (form == Form::floats || std::count(forms_[x].begin(), forms_[x].end(), form) != 0) return;
    Buffer& buffer = *buffers_[x];
    buffer.need(form);
    if (norm_of_[x] != nullptr)
        norm_of_[x]->emit(form);
    else
        add(std::make_unique<ConvertOp>(rows_, buffer, form));
    forms_[x].push_back(form);
}

void Program::embed(Format format, std::span<const uint8_t> table, int64_t rows, int out) {
    Buffer& to = buffer_of(out, at(out).width());
    require(!to.logits(), "an embedding goes to a buffer of tokens");
    require(to.width() % info(format).block_k == 0 && table.size() == file_bytes(format, to.width()) * rows,
            "the embedding table has " + std::to_string(table.size()) + " bytes, not those of " +
                std::to_string(rows) + " x " + std::to_string(to.width()) + " values");
    embed_rows_ = rows;
    add(std::make_unique<EmbedOp>(format, table.data(), to));
    wrote(out, nullptr);
}

void Program::select(int x, int out) {
    Buffer& to = buffer_of(out, at(x).width());
    require(to.logits() && !at(x).logits(), "select goes from a buffer of tokens to one of logits rows");
    add(std::make_unique<SelectOp>(*buffers_[x], to));
    wrote(out, nullptr);
}

void Program::rms_norm(int x, std::vector<float> weight, float eps, int out) {
    const Buffer& from = buffer_of(x, static_cast<int64_t>(weight.size()));
    Buffer& to = buffer_of(out, from.width());
    require_same_rows(from, to);
    auto op = std::make_unique<RmsNormOp>(rows_, from, std::move(weight), eps, to);
    RmsNormOp* norm = op.get();
    add(std::move(op));
    wrote(out, norm);
}

LinearPart Program::part(int x, std::shared_ptr<const Matrix> matrix) {
    buffer_of(x, matrix->cols);
    const LinearKernels& kernels = linear_[static_cast<int>(matrix->format)];
    LinearPart part{matrix, kernels.tile, kernels.max_rows, kernels.block, Form::floats};
    if (two_bytes_ && kernels.max_two_byte_rows > 0)
        part = {matrix, kernels.two_byte_tile, kernels.max_two_byte_rows, kernels.two_byte_block,
                Form::two_bytes_32};
    else if (kernels.bf16_activations)
        part.form = Form::bf16;
    else if (!is_float(matrix->format))
        part.form = info(matrix->format).super ? Form::int8_256 : Form::int8_32;
    want(x, part.form);
    return part;
}

void Program::linear(int x, std::vector<std::shared_ptr<const Matrix>> matrices, std::vector<float> bias,
                     int residual, int out) {
    std::vector<LinearPart> parts;
    int64_t width = 0;
    for (std::shared_ptr<const Matrix>& matrix : matrices) {
        width += matrix->rows;
        parts.push_back(part(x, std::move(matrix)));
    }
    Buffer& to = buffer_of(out, width);
    require(out != x, "a linear operation cannot write to its own input");
    require_same_rows(at(x), to);
    require(bias.empty() || static_cast<int64_t>(bias.size()) == width,
            "the bias has " + std::to_string(bias.size()) + " values for " + std::to_string(width) +
                " outputs");
    LinearOp::Epilogue epilogue{std::move(bias)};
    if (residual >= 0) {
        epilogue.residual = &buffer_of(residual, width);
        require_same_rows(*epilogue.residual, to);
    }
    add(std::make_unique<LinearOp>(rows_, *buffers_[x], std::move(parts), std::move(epilogue), to));
    wrote(out, nullptr);
}

void Program::gated_linear(int x, std::shared_ptr<const Matrix> gate, std::shared_ptr<const Matrix> up,
                           int out) {
    require(gate->rows == up->rows && gate->format == up->format,
            "gate and up must have the same shape and format to be computed together");
    Buffer& to = buffer_of(out, gate->rows);
    require(out != x, "a linear operation cannot write to its own input");
    require_same_rows(at(x), to);
    std::vector<LinearPart> parts{part(x, std::move(gate)), part(x, std::move(up))};
    add(std::make_unique<LinearOp>(rows_, *buffers_[x], std::move(parts),
                                   LinearOp::Epilogue{{}, nullptr, true}, to));
    wrote(out, nullptr);
}

void Program::angles(std::vector<float> frequency, float magnitude) {
    auto op = std::make_unique<AnglesOp>(std::move(frequency), magnitude, limits_.max_tokens);
    angles_ = op.get();
    add(std::move(op));
}

void Program::attention(int qkv, const AttentionShape& shape, bool neox, CacheOp::HeadNorm norm, int out) {
    require(shape.heads > 0 && shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0 &&
                shape.heads / shape.kv_heads <= kMaxAttentionRows,
            "attention with " + std::to_string(shape.heads) + " heads and " + std::to_string(shape.kv_heads) +
                " kv heads: the first must be a multiple of the second, at most " +
                std::to_string(kMaxAttentionRows) + " times it");
    const int64_t head_stride = head_block_bytes(kv_, shape.head_dim);
    require(angles_ != nullptr && 2 * angles_->pairs() <= shape.head_dim,
            "attention needs rotation frequencies for at most half a head");
    const Buffer& from =
        buffer_of(qkv, static_cast<int64_t>(shape.heads + 2 * shape.kv_heads) * shape.head_dim);
    Buffer& to = buffer_of(out, static_cast<int64_t>(shape.heads) * shape.head_dim);
    require(!from.logits() && !to.logits(), "attention goes from a buffer of tokens to another");
    require((norm.q.empty() || static_cast<int64_t>(norm.q.size()) == shape.head_dim) &&
                (norm.k.empty() || static_cast<int64_t>(norm.k.size()) == shape.head_dim),
            "the norms of query and key heads need " + std::to_string(shape.head_dim) + " weights");
    const bool first = plan_ == nullptr;
    if (first) {
        plan_ = std::make_shared<AttentionPlan>();
        plan_shape_ = shape;
        queries_ = Memory::resident(limits_.max_tokens * shape.heads * query_bytes(kv_, shape.head_dim));
        block_stride_ = shape.kv_heads * head_stride;
    }
    require(shape.heads == plan_shape_.heads && shape.kv_heads == plan_shape_.kv_heads &&
                shape.head_dim == plan_shape_.head_dim,
            "all layers must have the same attention shape");
    caches_.emplace_back(limits_.blocks * block_stride_);
    const CacheLayer cache{caches_.back().data(), block_stride_, head_stride};
    const Queries queries{queries_.data(), shape.heads, query_bytes(kv_, shape.head_dim)};
    add(std::make_unique<CacheOp>(rows_, attention_, shape, from, *angles_, neox, std::move(norm), cache,
                                  queries));
    add(std::make_unique<AttentionOp>(attention_, shape, plan_, first, cache, queries, to));
    wrote(out, nullptr);
}

size_t Program::cache_bytes() const {
    size_t total = 0;
    for (const Memory& cache : caches_) total += cache.size();
    return total;
}

size_t Program::block_bytes() const { return caches_.size() * block_stride_; }

void Program::read_block(int64_t block, uint8_t* to) const {
    require(block >= 0 && block < limits_.blocks, "there is no cache block " + std::to_string(block));
    for (const Memory& cache : caches_) {
        std::memcpy(to, cache.data() + block * block_stride_, block_stride_);
        to += block_stride_;
    }
}

void Program::write_block(int64_t block, const uint8_t* from) {
    require(block >= 0 && block < limits_.blocks, "there is no cache block " + std::to_string(block));
    for (const Memory& cache : caches_) {
        std::memcpy(cache.data() + block * block_stride_, from, block_stride_);
        from += block_stride_;
    }
}

void Program::check(const Step& step) const {
    require(step.rows() > 0 && step.rows() <= limits_.max_tokens, "a step of " + std::to_string(step.rows()) +
                                                                      " tokens: must be 1 to " +
                                                                      std::to_string(limits_.max_tokens));
    require(static_cast<int64_t>(step.logits_rows.size()) <= limits_.max_logits,
            std::to_string(step.logits_rows.size()) + " logits rows: at most " +
                std::to_string(limits_.max_logits));
    for (int32_t token : step.tokens)
        require(embed_rows_ == 0 || (token >= 0 && token < embed_rows_),
                "token id " + std::to_string(token) + " is outside the vocabulary of " +
                    std::to_string(embed_rows_));
    for (int32_t row : step.logits_rows)
        require(row >= 0 && row < step.rows(), "logits row " + std::to_string(row) + " is outside the step");
    for (const StepSequence& s : step.sequences) {
        for (int64_t block = 0; block < (s.past_len + s.query_len + kBlock - 1) / kBlock; ++block)
            require(s.table[block] >= 0 && s.table[block] < limits_.blocks,
                    "cache block " + std::to_string(s.table[block]) + " is outside the " +
                        std::to_string(limits_.blocks) + " there are");
    }
}

bool Program::run(Step step, const std::function<bool()>& interrupted) {
    const std::lock_guard lock(one_run_);
    check(step);
    step_ = std::move(step);
    const int workers = workers_ = pool_->active();
    if (strips_ == nullptr) {
        strips_ = std::make_unique<Strip[]>(ops_.size() * pool_->size());
        progress_ = std::make_unique<Progress[]>(ops_.size());
    }
    stopped_.store(false);
    for (size_t i = 0; i < ops_.size(); ++i) {
        const int64_t chunks = ops_[i]->plan(step_);
        for (int w = 0; w < workers; ++w) {
            Strip& strip = strips_[i * workers + w];
            strip.next.store(chunks * w / workers, std::memory_order_relaxed);
            strip.end = chunks * (w + 1) / workers;
        }
        progress_[i].unfinished.store(static_cast<uint32_t>(chunks));
    }
    pool_->run([&](int worker) { work(worker, interrupted); },
               step_.rows() < kManyRows ? Pool::Waits::often : Pool::Waits::seldom);
    return !stopped_.load();
}

void Program::work(int worker, const std::function<bool()>& interrupted) {
    using Clock = std::chrono::steady_clock;
    constexpr auto kAskEvery = std::chrono::milliseconds(50);
    const int workers = workers_;  // more of them would help, fewer do the others' part
    auto asked = Clock::now();
    for (size_t i = 0; i < ops_.size(); ++i) {
        if (worker == 0 && Clock::now() - asked > kAskEvery) {
            if (interrupted()) stopped_.store(true);
            asked = Clock::now();
        }
        if (stopped_.load(std::memory_order_relaxed)) return;
        Word& unfinished = progress_[i].unfinished;
        for (int other = 0; other < workers; ++other) {
            Strip& strip = strips_[i * workers + (worker + other) % workers];
            if (strip.next.load(std::memory_order_relaxed) >= strip.end) continue;
            for (int64_t chunk = strip.next.fetch_add(1, std::memory_order_relaxed); chunk < strip.end;
                 chunk = strip.next.fetch_add(1, std::memory_order_relaxed)) {
                ops_[i]->run(step_, chunk, scratch_[worker].data());
                if (unfinished.add(~0u) == 0) unfinished.wake();
            }
        }
        // Only chunks are waited for, never workers: one that has lost its core holds up nobody unless it has
        // a chunk.
        unfinished.wait([](uint32_t left) { return left == 0; });
    }
}

}  // namespace treadle
