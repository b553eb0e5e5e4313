"""Steps of a program: refused, interrupted, concurrent, and the end of its process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models import tiny
from treadle import _native
from treadle.engine.runner import Runner, RunnerConfig
from treadle.weights.gguf import open_gguf

VOCAB, WIDTH, BLOCKS = 50, 64, 6


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Tiny:
    """Embedding, one layer of attention with two heads, and logits."""

    def __init__(self, pool: _native.Pool, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        table, logits = (
            rng.normal(size=size).astype(np.float32) for size in ((VOCAB, 2 * WIDTH), (VOCAB, WIDTH))
        )
        self.program = _native.Program(pool, _native.isa(), 16, 4, BLOCKS, two_bytes=False)
        qkv, attended = self.program.buffer(2 * WIDTH), self.program.buffer(WIDTH)
        wanted, self.logits = self.program.buffer(WIDTH, logits=True), self.program.buffer(VOCAB, logits=True)
        self.program.embed("F32", table.view(np.uint8).reshape(-1), VOCAB, out=qkv)
        self.program.angles(np.full(16, 0.1, np.float32))
        self.program.attention(qkv, (2, 1, 32), neox=True, out=attended)
        self.program.select(attended, wanted)
        matrix = _native.pack(pool, "F32", logits.view(np.uint8).reshape(-1), VOCAB, WIDTH)
        self.program.linear(wanted, [matrix], out=self.logits)
        self.tables = np.arange(BLOCKS, dtype=np.int32).reshape(2, 3)

    def step(self, **changes: Any) -> np.ndarray:
        """Logits of two sequences of five and two tokens; ``changes`` replace arguments of Program.run."""
        arguments = {
            "tokens": i32(1, 2, 3, 4, 5, 48, 49),
            "query_lens": i32(5, 2),
            "past_lens": i32(0, 0),
            "slots": i32(0, 1),
            "logits_rows": i32(4, 6),
            "tables": self.tables,
        }
        self.program.run(**{**arguments, **changes})
        return np.array(self.program.rows(self.logits))


@pytest.fixture(scope="module")
def pool() -> _native.Pool:
    return _native.Pool(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": i32(1, 2, 3, 4, 5, 48, VOCAB)}, "token id 50 is outside the vocabulary of 50"),
        ({"tokens": i32(1, 2, -1, 4, 5, 48, 49)}, "token id -1 is outside"),
        ({"tables": np.full((2, 3), BLOCKS, np.int32)}, "cache block 6 is outside the 6"),
        ({"tables": np.full((2, 3), -1, np.int32)}, "cache block -1 is outside"),
        ({"slots": i32(0, 2)}, "slot 2 is outside the 2 tables"),
        ({"slots": i32(0, -1)}, "slot -1 is outside"),
        ({"slots": i32(0)}, "must name the same sequences"),
        ({"past_lens": i32(0)}, "must name the same sequences"),
        ({"past_lens": i32(0, 95)}, "95 past and 2 new tokens do not fit a table of 3 blocks"),
        ({"past_lens": i32(-1, 0)}, "-1 past"),
        ({"past_lens": i32(2**31 - 1, 0)}, "do not fit"),
        ({"query_lens": i32(5, 1)}, "query_lens add up to 6, but there are 7 tokens"),
        ({"query_lens": i32(7, 0)}, "0 new tokens"),
        ({"query_lens": i32(2**31 - 1, 2)}, "do not fit"),
        ({"tokens": i32(*range(17)), "query_lens": i32(15, 2)}, "a step of 17 tokens: must be 1 to 16"),
        ({"tokens": i32(), "query_lens": i32(), "past_lens": i32(), "slots": i32()}, "a step of 0 tokens"),
        ({"logits_rows": i32(7)}, "logits row 7 is outside the step"),
        ({"logits_rows": i32(-1)}, "logits row -1 is outside"),
        ({"logits_rows": i32(0, 1, 2, 3, 4)}, "5 logits rows: at most 4"),
    ],
)
def test_a_bad_step_is_refused_and_the_next_one_works(
    pool: _native.Pool, changes: dict[str, np.ndarray], message: str
) -> None:
    model = Tiny(pool)
    expected = model.step()
    with pytest.raises(ValueError, match=message):
        model.step(**changes)
    np.testing.assert_array_equal(model.step(), expected)


@pytest.mark.parametrize("tokens", [np.zeros((7, 1), np.int32), [1, 2, 3, 4, 5, 6, 7], None])
def test_arrays_of_another_kind_are_refused(pool: _native.Pool, tokens: Any) -> None:
    with pytest.raises(TypeError):
        Tiny(pool).step(tokens=tokens)


def test_a_step_without_logits(pool: _native.Pool) -> None:
    assert Tiny(pool).step(logits_rows=i32()).shape == (0, VOCAB)


def test_shapes_that_do_not_fit_are_refused(pool: _native.Pool) -> None:
    program = _native.Program(pool, "ref", 16, 4, 2, two_bytes=False)
    x, y, wanted = program.buffer(16), program.buffer(16), program.buffer(16, logits=True)
    matrix = _native.pack(pool, "F32", np.zeros(1024, np.uint8), 16, 16)
    ones = np.ones(16, np.float32)
    with pytest.raises(ValueError, match="there is no buffer 9"):
        program.rms_norm(9, ones, 1e-5, out=y)
    with pytest.raises(ValueError, match="16 wide, the operation needs 8"):
        program.rms_norm(x, ones[:8], 1e-5, out=y)
    with pytest.raises(ValueError, match="the bias has 15 values for 16 outputs"):
        program.linear(x, [matrix], ones[:15], out=y)
    with pytest.raises(ValueError, match="cannot write to its own input"):
        program.linear(x, [matrix], out=x)
    calls: list[Callable[[], None]] = [
        lambda: program.linear(x, [matrix], out=wanted),
        lambda: program.linear(x, [matrix], residual=wanted, out=y),
        lambda: program.gated_linear(wanted, matrix, matrix, out=y),
        lambda: program.rms_norm(wanted, ones, 1e-5, out=x),
    ]
    for mixed in calls:
        with pytest.raises(ValueError, match="cannot mix a row per token with a row per wanted logits"):
            mixed()
    with pytest.raises(ValueError, match="an embedding goes to a buffer of tokens"):
        program.embed("F32", np.zeros(64, np.uint8), 1, out=wanted)
    program.angles(np.zeros(8, np.float32))
    qkv = program.buffer(48)
    with pytest.raises(ValueError, match="need 16 weights"):
        program.attention(qkv, (1, 1, 16), neox=True, q_norm=ones[:8], out=y)
    with pytest.raises(ValueError, match="attention goes from a buffer of tokens"):
        program.attention(qkv, (1, 1, 16), neox=True, out=wanted)


def test_operations_can_be_added_after_a_run(pool: _native.Pool) -> None:
    model = Tiny(pool)
    expected = model.step()
    matrix = _native.pack(
        pool, "F32", np.eye(VOCAB, dtype=np.float32).view(np.uint8).reshape(-1), VOCAB, VOCAB
    )
    for _ in range(40):
        following = model.program.buffer(VOCAB, logits=True)
        model.program.linear(model.logits, [matrix], out=following)
        model.logits = following
    np.testing.assert_array_equal(model.step(), expected)


def test_programs_run_from_many_threads() -> None:
    """Two programs share a pool, a third has its own, and every one is called from two threads."""
    shared = _native.Pool(1)
    models = [Tiny(shared, 1), Tiny(shared, 2), Tiny(_native.Pool(1), 3)]
    expected = [model.step() for model in models]
    with ThreadPoolExecutor(6) as threads:
        for i, result in enumerate(threads.map(lambda i: models[i % 3].step(), range(300))):
            np.testing.assert_array_equal(result, expected[i % 3])


LONG_RUN = """
import signal

import numpy as np
from treadle import _native

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a script inherit "ignore"
rows = 512
pool = _native.Pool(1)
program = _native.Program(pool, _native.isa(), rows, 1, 16, two_bytes=False)
a, b = program.buffer(512), program.buffer(512)
table = np.ones((1, 512), np.float32)
program.embed("F32", table.view(np.uint8).reshape(-1), 1, out=a)
eye = _native.pack(pool, "F32", np.eye(512, dtype=np.float32).view(np.uint8).reshape(-1), 512, 512)
for _ in range(5000):
    program.linear(a, [eye], out=b)
    program.linear(b, [eye], out=a)
one, none = np.ones(1, np.int32), np.zeros(0, np.int32)
tables = np.zeros((1, 16), np.int32)

def run(tokens):
    program.run(np.zeros(tokens, np.int32), one * tokens, one * 0, one * 0, none, tables)
    return np.array(program.rows(a))

print("running", flush=True)
try:
    run(rows)
except KeyboardInterrupt:
    print("interrupted", flush=True)
else:
    print("finished", flush=True)
assert (run(1) == 1).all()
"""


def test_ctrl_c_ends_a_long_step_and_the_next_one_works() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LONG_RUN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.readline() == "running\n"
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.3)  # it is in the step now
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "interrupted\n"
        assert child.wait(60) == 0, child.stderr.read()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "tiny.gguf"
    tiny.write(path, tiny.make("llama"), "llama")
    return path


def load(path: Path) -> Runner:
    return Runner(open_gguf(path), frozenset(), RunnerConfig(context=128, max_sequences=1))


def first_logits(runner: Runner) -> np.ndarray:
    runner.tables[0] = np.arange(runner.tables.shape[1])
    runner.run(i32(1, 2, 3), i32(3), i32(0), i32(0), i32(2))
    return np.array(runner.logits)


def test_two_models_in_one_process(model_path: Path) -> None:
    first, second = load(model_path), load(model_path)
    expected = first_logits(first)
    with ThreadPoolExecutor(2) as threads:
        for result in threads.map(first_logits, [first, second] * 20):
            np.testing.assert_array_equal(result, expected)
    del first
    np.testing.assert_array_equal(first_logits(second), expected)


def test_a_process_with_a_loaded_model_exits_with_status_0(model_path: Path) -> None:
    code = f"""
import pathlib
from tests.program.test_program import first_logits, load
runner = load(pathlib.Path({str(model_path)!r}))
view = runner.logits
first_logits(runner)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
