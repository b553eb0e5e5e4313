#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unordered_map.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <random>
#include <string>
#include <tuple>

#include "sampling/sampler.h"
#include "sampling/state.h"

namespace nb = nanobind;

namespace treadle {

namespace {

using Ids = std::vector<int64_t>;
using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using MaskWords = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using SignedMaskWords = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Top = std::optional<std::vector<std::pair<int32_t, float>>>;
using Tokens = nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>;
using Logprobs = nb::ndarray<nb::numpy, float, nb::ndim<1>>;

uint64_t seed_bits(const std::optional<nb::int_>& seed) {
    if (!seed) {
        std::random_device device;
        return uint64_t{device()} << 32 | device();
    }
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(seed->ptr(), &overflow);
    if (overflow == 0) return static_cast<uint64_t>(value);
    const unsigned long long bits = overflow > 0 ? PyLong_AsUnsignedLongLong(seed->ptr()) : 0;
    if (overflow < 0 || PyErr_Occurred() != nullptr) {
        PyErr_Clear();
        throw nb::value_error("seed must be between -2**63 and 2**64 - 1");
    }
    return bits;
}

void init_state(SamplerState* self, int64_t vocab_size, const Ids& prompt_ids, double temperature,
                int64_t top_k, double top_p, double min_p, double repetition_penalty, double presence_penalty,
                double frequency_penalty, std::unordered_map<int64_t, double> logit_bias, int64_t min_tokens,
                Ids stop_ids, std::optional<int64_t> logprobs, const std::optional<nb::int_>& seed) {
    const SamplingOptions options{.temperature = temperature,
                                  .top_k = top_k,
                                  .top_p = top_p,
                                  .min_p = min_p,
                                  .repetition_penalty = repetition_penalty,
                                  .presence_penalty = presence_penalty,
                                  .frequency_penalty = frequency_penalty,
                                  .logit_bias = std::move(logit_bias),
                                  .min_tokens = min_tokens,
                                  .stop_ids = std::move(stop_ids),
                                  .logprobs = logprobs,
                                  .seed = seed_bits(seed)};
    new (self) SamplerState(vocab_size, options, prompt_ids);
}

template <class Array, class T>
Array to_numpy(std::vector<T> values) {
    auto* kept = new std::vector<T>(std::move(values));
    const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return Array(kept->data(), {kept->size()}, owner);
}

std::tuple<Tokens, Logprobs, std::vector<Top>> sample(Sampler& sampler, const Logits& logits, const Ids& rows,
                                                      const std::vector<const SamplerState*>& states,
                                                      Pool* pool) {
    if (static_cast<int64_t>(logits.shape(1)) != sampler.vocab_size())
        throw nb::value_error(("logits have " + std::to_string(logits.shape(1)) +
                               " columns, but the vocabulary has " + std::to_string(sampler.vocab_size()) +
                               " tokens")
                                  .c_str());
    if (rows.size() != states.size())
        throw nb::value_error((std::to_string(rows.size()) + " rows and " + std::to_string(states.size()) +
                               " states were given, but each row index needs its own state")
                                  .c_str());
    std::vector<Pick> picks;
    for (size_t i = 0; i < rows.size(); ++i) {
        if (rows[i] < 0 || rows[i] >= static_cast<int64_t>(logits.shape(0)))
            throw nb::value_error(("row " + std::to_string(rows[i]) + " was asked for, but logits have " +
                                   std::to_string(logits.shape(0)) + " rows")
                                      .c_str());
        if (states[i] == nullptr) throw nb::type_error("states must be SamplerState objects, not None");
        picks.push_back({logits.data() + rows[i] * sampler.vocab_size(), states[i]});
    }
    std::vector<Choice> choices;
    {
        const nb::gil_scoped_release release;
        choices = sampler.sample(picks, pool);
    }
    std::vector<int32_t> tokens;
    std::vector<float> logprobs;
    std::vector<Top> tops;
    for (size_t i = 0; i < choices.size(); ++i) {
        tokens.push_back(choices[i].token);
        logprobs.push_back(choices[i].logprob);
        tops.emplace_back(states[i]->options().logprobs ? Top(std::move(choices[i].top)) : std::nullopt);
    }
    return {to_numpy<Tokens>(std::move(tokens)), to_numpy<Logprobs>(std::move(logprobs)), std::move(tops)};
}

// NoTokenLeft carries the indices of its picks as an attribute, which nb::exception cannot.
void bind_no_token_left(nb::module_& m) {
    const auto type = nb::steal<nb::object>(PyErr_NewExceptionWithDoc(
        "treadle._native.NoTokenLeft",
        "Nothing is left to choose from for some picks of a batch: every logit is -inf or NaN,\n"
        "or mask and min_tokens leave none. `picks` (list[int]) are their indices; the states are\n"
        "unchanged, so the others may be sampled again.",
        PyExc_ValueError, nullptr));
    m.attr("NoTokenLeft") = type;
    nb::register_exception_translator(
        [](const std::exception_ptr& raised, void* type_pointer) {
            try {
                std::rethrow_exception(raised);
            } catch (const NoTokenLeft& error) {
                const nb::handle kind(static_cast<PyObject*>(type_pointer));
                const nb::object exception = kind(error.what());
                exception.attr("picks") = error.picks();
                PyErr_SetObject(kind.ptr(), exception.ptr());
            }
        },
        type.ptr());
}

}  // namespace

void bind_sampling(nb::module_& m) {
    bind_no_token_left(m);

    nb::class_<SamplerState>(
        m, "SamplerState",
        "What one request brings to the choice of its next token: parameters (named and meant as\n"
        "in treadle.core.SamplingParams), token counts, grammar mask and random numbers. Not\n"
        "thread-safe.")
        .def("__init__", &init_state, nb::arg("vocab_size"), nb::kw_only(), nb::arg("prompt_ids") = Ids{},
             nb::arg("temperature") = 1.0, nb::arg("top_k") = 0, nb::arg("top_p") = 1.0,
             nb::arg("min_p") = 0.0, nb::arg("repetition_penalty") = 1.0, nb::arg("presence_penalty") = 0.0,
             nb::arg("frequency_penalty") = 0.0,
             nb::arg("logit_bias") = std::unordered_map<int64_t, double>{}, nb::arg("min_tokens") = 0,
             nb::arg("stop_ids") = Ids{}, nb::arg("logprobs") = nb::none(), nb::arg("seed") = nb::none(),
             "`prompt_ids` count for the repetition penalty; `stop_ids` (end of text and stop ids) are\n"
             "suppressed before `min_tokens` accepted tokens. `seed`: any 64-bit integer; None draws one\n"
             "from the system. ValueError names a parameter out of range.")
        .def(nb::init<const SamplerState&>(), nb::arg("other"),
             "A copy that goes its own way: the same parameters, counts, mask and random numbers.")
        .def("accept", &SamplerState::accept, nb::arg("token"),
             "Appends one output token: penalties count it, the next draw takes the next random number.")
        .def(
            "set_mask",
            [](SamplerState& self, const MaskWords& words) { self.set_mask({words.data(), words.shape(0)}); },
            nb::arg("words").noconvert(),
            "Allows only ids whose bit is set (bit id % 32 of word id // 32, as llguidance writes them).\n"
            "Copied; stays until replaced or cleared. `words`: uint32 or int32 [(vocab_size + 31) // 32].")
        .def(
            "set_mask",
            [](SamplerState& self, const SignedMaskWords& words) {
                self.set_mask({reinterpret_cast<const uint32_t*>(words.data()), words.shape(0)});
            },
            nb::arg("words").noconvert())
        .def("clear_mask", &SamplerState::clear_mask, "Allows all ids again.")
        .def_prop_ro("output_tokens", &SamplerState::output_tokens, "Number of accepted tokens.");

    nb::class_<Sampler>(m, "Sampler",
                        "Chooses tokens from logits. Holds buffers only; one serves a whole engine.")
        .def(nb::init<int64_t>(), nb::arg("vocab_size"))
        .def("sample", &sample, nb::arg("logits").noconvert(), nb::arg("rows"), nb::arg("states"),
             nb::arg("pool") = nb::none(),
             "Chooses one token per state: state i reads row rows[i] of logits (float32 [R, vocab_size],\n"
             "C order, only read); several states may share a row. Returns tokens int32 [n],\n"
             "log-probabilities float32 [n] and, per state, the most likely (id, log-probability) pairs.\n"
             "Log-probabilities are of the raw logits; states made without `logprobs` get NaN and None.\n"
             "States are not changed. Results depend on neither pool nor neighbours. Releases the GIL.\n"
             "NaN counts as -inf, +inf as the largest float. NoTokenLeft when nothing can be chosen;\n"
             "ValueError for shapes or rows that do not fit.");
}

}  // namespace treadle
