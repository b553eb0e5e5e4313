#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string_view.h>

#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>

#include "gguf/gguf.h"

namespace nb = nanobind;

namespace treadle {

namespace {

using gguf::Bytes;
using gguf::Kind;

// str, or bytes where the file's text is not valid UTF-8.
nb::object to_text(std::string_view text) {
    PyObject* object = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr);
    if (!object) {
        PyErr_Clear();
        object = PyBytes_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
    }
    if (!object) throw nb::python_error();
    return nb::steal(object);
}

// A copy: numbers of the file are not aligned.
template <class T>
nb::object to_array(Bytes bytes) {
    const size_t count = bytes.size() / sizeof(T);
    auto copy = std::make_unique<T[]>(count);
    if (count > 0) std::memcpy(copy.get(), bytes.data(), bytes.size());
    T* data = copy.release();
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {count}, owner));
}

template <class T>
nb::object to_number(const gguf::Value& value) {
    if (value.kind == Kind::array) return to_array<T>(value.bytes);
    return nb::cast(gguf::scalar<T>(value));
}

nb::object to_texts(const gguf::Value& value) {
    Bytes rest = value.bytes;
    if (value.kind != Kind::array) return to_text(gguf::next_string(rest));
    nb::list list;
    for (uint64_t i = 0; i < value.count; ++i) list.append(to_text(gguf::next_string(rest)));
    return list;
}

nb::object to_python(const gguf::Value& value) {
    switch (value.element) {
    case Kind::u8: return to_number<uint8_t>(value);
    case Kind::i8: return to_number<int8_t>(value);
    case Kind::u16: return to_number<uint16_t>(value);
    case Kind::i16: return to_number<int16_t>(value);
    case Kind::u32: return to_number<uint32_t>(value);
    case Kind::i32: return to_number<int32_t>(value);
    case Kind::u64: return to_number<uint64_t>(value);
    case Kind::i64: return to_number<int64_t>(value);
    case Kind::f32: return to_number<float>(value);
    case Kind::f64: return to_number<double>(value);
    case Kind::boolean: return to_number<bool>(value);
    case Kind::string: return to_texts(value);
    case Kind::array: break;
    }
    throw std::logic_error("arrays of arrays do not pass the parser");
}

struct GgufTensor {
    std::shared_ptr<const gguf::Model> model;  // keeps the file mapped
    const gguf::Tensor* tensor;
};

struct Gguf {
    std::shared_ptr<const gguf::Model> model;
    std::unordered_map<std::string_view, const gguf::Tensor*> by_name;
    nb::object metadata;  // a dict, once it was asked for

    explicit Gguf(const char* path) : model(std::make_shared<gguf::Model>(path)) {
        for (const gguf::Tensor& t : model->tensors()) by_name.emplace(t.name, &t);
    }
};

// Takes str (in the file system's encoding, with surrogate escapes), bytes or os.PathLike.
void construct(Gguf* self, nb::handle path) {
    PyObject* encoded = nullptr;
    if (!PyUnicode_FSConverter(path.ptr(), &encoded)) throw nb::python_error();
    const nb::object owner = nb::steal(encoded);
    new (self) Gguf(PyBytes_AS_STRING(encoded));
}

nb::object metadata(Gguf& self) {
    if (!self.metadata.is_valid()) {
        nb::dict dict;
        for (const gguf::Entry& entry : self.model->metadata())
            dict[to_text(entry.key)] = to_python(entry.value);
        self.metadata = dict;
    }
    return self.metadata;
}

nb::tuple shape(const GgufTensor& self) {
    nb::list sizes;
    for (int d = self.tensor->dims; d-- > 0;) sizes.append(self.tensor->ne[static_cast<size_t>(d)]);
    return nb::tuple(sizes);
}

nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>> data(const GgufTensor& self) {
    using Keep = std::shared_ptr<const gguf::Model>;
    const nb::capsule owner(new Keep(self.model), [](void* p) noexcept { delete static_cast<Keep*>(p); });
    return {self.tensor->data.data(), {self.tensor->data.size()}, owner};
}

void translate(const std::exception_ptr& exception, void*) {
    try {
        std::rethrow_exception(exception);
    } catch (const gguf::Error& error) {
        const char* text = error.what();
        PyObject* message =
            PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(std::strlen(text)), "backslashreplace");
        if (!message) return;
        PyErr_SetObject(PyExc_ValueError, message);
        Py_DECREF(message);
    }
}

}  // namespace

void bind_gguf(nb::module_& m) {
    nb::register_exception_translator(translate);

    nb::class_<GgufTensor>(m, "GgufTensor", "One tensor of a GGUF file, not copied.")
        .def_prop_ro("name", [](const GgufTensor& self) { return self.tensor->name; })
        .def_prop_ro(
            "type", [](const GgufTensor& self) { return self.tensor->type->name; }, "As in ggml: 'Q4_K'.")
        .def_prop_ro("shape", &shape, "Sizes, the contiguous dimension last.")
        .def_prop_ro("nbytes", [](const GgufTensor& self) { return self.tensor->data.size(); })
        .def_prop_ro("data", &data, nb::rv_policy::reference,
                     "Read-only uint8 array over the mapped file, which it keeps open.");

    nb::class_<Gguf>(
        m, "Gguf",
        "A GGUF model (versions 2 and 3, little endian), memory-mapped; all files of it if it is split.\n\n"
        "Raises ValueError with one line that names the file, the field and its value.")
        .def("__init__", &construct, nb::arg("path"))
        .def_prop_ro(
            "metadata", &metadata,
            "Every key with its value: scalars, str, NumPy arrays of numbers, lists of str. Text that is not "
            "UTF-8 is bytes. Built when first asked for.")
        .def_prop_ro("tensor_names",
                     [](const Gguf& self) {
                         nb::list names;
                         for (const gguf::Tensor& t : self.model->tensors()) names.append(t.name);
                         return names;
                     })
        .def(
            "tensor",
            [](const Gguf& self, std::string_view name) {
                const auto found = self.by_name.find(name);
                if (found == self.by_name.end()) throw nb::key_error(std::string(name).c_str());
                return GgufTensor{self.model, found->second};
            },
            nb::arg("name"), "Raises KeyError for an unknown name.");
}

}  // namespace treadle
