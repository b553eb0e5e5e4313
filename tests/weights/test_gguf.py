"""The GGUF reader against the `gguf` package, and against files that are wrong in every field."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.weights import containers as c
from treadle.core import TreadleError
from treadle.weights.gguf import open_gguf

TYPES = {
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ4_NL", "IQ4_XS", "I8", "I16", "I32", "I64", "F64",
}  # fmt: skip


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file of the `gguf` package's writer, with every kind of value and tensor type."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(28)
    writer.add_rope_freq_base(1e6)
    writer.add_bool("qwen2.flag", True)
    for name, value in INTEGERS.items():
        getattr(writer, f"add_{name}")(f"test.{name}", value)
    writer.add_float64("test.float64", 0.1)
    writer.add_string("test.text", "龘 naïve\n")
    writer.add_array("test.empty", [])
    writer.add_token_list(["a", "龘", "<|end|>"])
    writer.add_token_scores([0.5, -1.0, 0.0])
    writer.add_token_types([1, 1, 3])
    rng = np.random.default_rng(0)
    for name in sorted(TYPES):
        kind = gguf.GGMLQuantizationType[name]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 256, (3, 512 // block * size), np.uint8)
        writer.add_tensor(f"w.{name}", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


INTEGERS = {
    "uint8": 255,
    "int8": -128,
    "uint16": 65535,
    "int16": -32768,
    "uint32": 2**32 - 1,
    "int32": -(2**31),
    "uint64": 2**64 - 1,
    "int64": -(2**63),
}


def test_reads_what_the_gguf_package_writes(model: Path) -> None:
    file = open_gguf(model)
    assert file.architecture == "qwen2"
    assert file.int("block_count") == file.int("qwen2.block_count") == 28
    assert file.float("rope.freq_base") == 1e6
    assert file.bool("flag") is True
    assert file.string("general.architecture") == "qwen2"
    for name, value in INTEGERS.items():
        assert file.metadata[f"test.{name}"] == value
    assert file.metadata["test.float64"] == 0.1
    assert file.metadata["test.text"] == "龘 naïve\n"
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "龘", "<|end|>"]
    np.testing.assert_array_equal(file.metadata["tokenizer.ggml.scores"], np.array([0.5, -1, 0], np.float32))
    assert file.metadata["tokenizer.ggml.token_type"].dtype == np.int32


def test_tensors_equal_those_of_the_gguf_package(model: Path) -> None:
    file = open_gguf(model)
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(model).tensors}
    assert set(file.tensor_names) == set(reference) == {f"w.{name}" for name in TYPES}
    for name, expected in reference.items():
        tensor = file.tensor(name)
        assert tensor.name == name
        assert tensor.type == expected.tensor_type.name
        assert tensor.shape == tuple(reversed(expected.shape.tolist()))
        assert tensor.nbytes == expected.n_bytes
        np.testing.assert_array_equal(tensor.data, expected.data.reshape(-1).view(np.uint8))


def test_tensor_data_is_read_only_and_outlives_the_file_object(model: Path) -> None:
    data = open_gguf(model).tensor("w.F32").data
    expected = data.copy()
    model.unlink()
    np.testing.assert_array_equal(data, expected)
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1


def test_version_2_is_read(tmp_path: Path) -> None:
    file = open_gguf(write(tmp_path / "v2.gguf", c.container([c.OK], [c.T], version=2)))
    assert file.tensor("t").shape == (4,)


def test_alignment_of_the_file_is_used(tmp_path: Path) -> None:
    path = tmp_path / "aligned.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_custom_alignment(1024)
    for name in "ab":
        writer.add_tensor(name, np.full(5, ord(name), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(path)
    assert [file.tensor(name).data.view(np.float32).tolist() for name in "ab"] == [[97.0] * 5, [98.0] * 5]


def test_text_that_is_not_utf8_is_bytes(tmp_path: Path) -> None:
    keys = [
        c.OK,
        c.string(b"a", b"\xe6\xad"),
        c.array(b"tokenizer.ggml.tokens", c.STRING, 3, c.text(b"ok") + c.text(b"\xff") + c.text(b"")),
    ]
    file = open_gguf(write(tmp_path / "bytes.gguf", c.container(keys)))
    assert file.metadata["a"] == b"\xe6\xad"
    assert file.metadata["tokenizer.ggml.tokens"] == ["ok", b"\xff", ""]


@pytest.mark.parametrize("name", c.BROKEN)
def test_broken_file_is_one_clear_line(name: str, tmp_path: Path) -> None:
    content, words = c.BROKEN[name]
    path = write(tmp_path / f"{name}.gguf", content)
    with pytest.raises(TreadleError) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


def test_broken_files_cost_no_memory(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for path in c.write_all(tmp_path)[1:]:
        with pytest.raises(TreadleError):
            open_gguf(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB


def test_model_cut_by_one_byte(model: Path) -> None:
    content = model.read_bytes()
    model.write_bytes(content[:-1])
    with pytest.raises(
        TreadleError, match=rf"file truncated: expected {len(content)} bytes, have {len(content) - 1}"
    ):
        open_gguf(model)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda f: f.int("nothing"), ("'qwen2.nothing'", "missing", "an integer")),
        (lambda f: f.float("block_count"), ("'qwen2.block_count'", "int 28", "a float")),
        (lambda f: f.int("flag"), ("'qwen2.flag'", "bool True", "an integer")),
        (
            lambda f: f.string("tokenizer.ggml.scores"),
            ("tokenizer.ggml.scores", "array of float32", "a string"),
        ),
        (lambda f: f.tensor("nothing"), ("'nothing'", "missing")),
    ],
)
def test_getters_name_file_key_and_expected_type(call: Any, words: tuple[str, ...], model: Path) -> None:
    with pytest.raises(TreadleError) as caught:
        call(open_gguf(model))
    message = str(caught.value)
    assert message.startswith(f"{model}: ")
    assert [word for word in words if word not in message] == []


def test_default_stands_for_an_absent_key_only(model: Path) -> None:
    file = open_gguf(model)
    assert file.int("nothing", 7) == 7
    assert file.int("block_count", 7) == 28
    with pytest.raises(TreadleError):
        file.string("block_count", "x")


@pytest.mark.parametrize("target", ["missing.gguf", "."])
def test_path_that_is_no_file(target: str, tmp_path: Path) -> None:
    with pytest.raises(TreadleError, match=r"No such file|not a regular file"):
        open_gguf(tmp_path / target)


@pytest.mark.parametrize("name", [b"\xe6\xa8\xa1\xe5\x9e\x8b \xc5\xbdeljko's.gguf", b"latin-\xe9.gguf"])
def test_any_path_in_the_c_locale(name: bytes, tmp_path: Path) -> None:
    path = write(tmp_path / os.fsdecode(name), c.GOOD)
    broken = write(tmp_path / os.fsdecode(name + b".broken"), b"")
    code = (
        "import sys\nfrom treadle.core import TreadleError\nfrom treadle.weights.gguf import open_gguf\n"
        "print(open_gguf(sys.argv[1]).architecture)\n"
        "try: open_gguf(sys.argv[2])\nexcept TreadleError as error: print(error)\n"
    )
    environment = {**os.environ, "LANG": "C", "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, "-c", code, path, broken], capture_output=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"qwen2\n")
    assert b"empty (0 bytes)" in done.stdout


class TestSplit:
    """Models in several files."""

    @staticmethod
    def write(folder: Path, count: int = 3, **changes: int) -> Path:
        for i in range(count):
            keys = [c.u16(b"split.no", i), c.u16(b"split.count", count)]
            if i == 0:
                keys += [c.OK, c.i32(b"split.tensors.count", changes.get("tensors", count))]
            name = b"t0" if "twice" in changes else b"t%d" % i
            (folder / f"模型-{i + 1:05d}-of-{count:05d}.gguf").write_bytes(
                c.container(keys, [c.tensor(name, [4])], data=bytes([i]) * 16)
            )
        return folder / f"模型-00001-of-{count:05d}.gguf"

    def test_is_one_model(self, tmp_path: Path) -> None:
        file = open_gguf(self.write(tmp_path))
        assert file.tensor_names == ["t0", "t1", "t2"]
        assert [file.tensor(name).data[0] for name in file.tensor_names] == [0, 1, 2]

    def test_missing_file(self, tmp_path: Path) -> None:
        first = self.write(tmp_path)
        (tmp_path / "模型-00002-of-00003.gguf").unlink()
        with pytest.raises(TreadleError, match=r"00002-of-00003\.gguf: cannot open"):
            open_gguf(first)

    def test_not_the_first_file(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        with pytest.raises(TreadleError, match=r"file 2 of a model split into 3; open the first"):
            open_gguf(tmp_path / "模型-00002-of-00003.gguf")

    def test_renamed_file(self, tmp_path: Path) -> None:
        self.write(tmp_path).rename(tmp_path / "model.gguf")
        with pytest.raises(TreadleError, match=r"name must end in -00001-of-00003\.gguf"):
            open_gguf(tmp_path / "model.gguf")

    def test_files_of_different_models(self, tmp_path: Path) -> None:
        first = self.write(tmp_path)
        (tmp_path / "模型-00003-of-00003.gguf").write_bytes(
            (tmp_path / "模型-00002-of-00003.gguf").read_bytes()
        )
        with pytest.raises(TreadleError, match=r"00003-of-00003.gguf: split.no is 1; expected 2"):
            open_gguf(first)

    def test_wrong_total(self, tmp_path: Path) -> None:
        with pytest.raises(TreadleError, match=r"split.tensors.count is 4; expected 3"):
            open_gguf(self.write(tmp_path, tensors=4))

    def test_tensor_in_two_files(self, tmp_path: Path) -> None:
        with pytest.raises(TreadleError, match="'t0' is also in an earlier file"):
            open_gguf(self.write(tmp_path, twice=1))
