"""Weights on their way from the file to the kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np

PACK = """
import sys
from pathlib import Path
from treadle import _native
from treadle.weights.gguf import open_gguf
from treadle.weights.loader import Weights

def kib(field):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith(field))

pool = _native.Pool(2)
weights = Weights(open_gguf(sys.argv[1]), pool)
before = kib("VmRSS:")
matrix = weights.matrix("a.weight")
file = weights.raw("a.weight").data
print(matrix.nbytes, 1024 * (kib("VmHWM:") - before), file[0], file[-1])
"""


def test_loading_holds_the_weights_once(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    weights = np.full((4096, 16384), 1, np.int8).view(np.uint8)
    weights[0, 0] = 7
    writer.add_tensor("a.weight", weights.reshape(4096, -1).view(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    done = subprocess.run([sys.executable, "-c", PACK, path], capture_output=True, text=True, check=True)
    packed, peak, first, last = map(int, done.stdout.split())
    assert packed == weights.nbytes == 2**26
    assert peak <= 1.15 * packed
    assert (first, last) == (7, 1)  # the file can still be read
