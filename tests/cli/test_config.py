"""Settings: sources, their order, and errors that name the setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from treadle.config import Config
from treadle.core import TreadleError


def test_defaults_listen_on_loopback_only() -> None:
    config = Config.load(environ={})
    assert (config.host, config.port, config.api_key, config.cors_origin) == ("127.0.0.1", 8000, (), ())


def test_flag_wins_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('port = 1\nthreads = 2\ncontext = 64\nkv_memory = "1G"\n')
    config = Config.load({"port": "3", "threads": None}, {"TREADLE_PORT": "4", "TREADLE_THREADS": "5"}, file)
    assert (config.port, config.threads, config.context, config.kv_memory) == (3, 5, 64, 2**30)


def test_file_from_environment_and_home(tmp_path: Path) -> None:
    (tmp_path / "treadle").mkdir()
    (tmp_path / "treadle" / "config.toml").write_text("port = 7")
    assert Config.load(environ={"XDG_CONFIG_HOME": str(tmp_path)}).port == 7
    other = tmp_path / "other.toml"
    other.write_text("port = 8")
    assert Config.load(environ={"XDG_CONFIG_HOME": str(tmp_path), "TREADLE_CONFIG": str(other)}).port == 8


def test_lists() -> None:
    assert Config.load(environ={"TREADLE_API_KEY": "a, b"}).api_key == ("a", "b")
    assert Config.load({"api_key": ("c",)}, {"TREADLE_API_KEY": "a,b"}).api_key == ("c",)


@pytest.mark.parametrize(
    ("text", "size"), [("512M", 2**29), ("4GiB", 2**32), ("1.5g", 3 * 2**29), ("1000", 1000), ("2kb", 2048)]
)
def test_sizes(text: str, size: int) -> None:
    assert Config.load({"kv_memory": text}, {}).kv_memory == size


WRONG: list[tuple[str, Any]] = [
    ("port", "http"), ("port", "65536"), ("port", True), ("threads", "0"), ("context", "1.5"),
    ("kv_memory", "-1G"),
    ("kv_memory", "much"), ("keep_alive", "-1"), ("keep_alive", "nan"), ("log_level", "loud"), ("api_key", 5),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_errors_name_setting_and_source(name: str, value: Any) -> None:
    with pytest.raises(TreadleError, match="--" + name.replace("_", "-")):
        Config.load({name: value}, {})
    if isinstance(value, str):
        with pytest.raises(TreadleError, match="TREADLE_" + name.upper()):
            Config.load(environ={"TREADLE_" + name.upper(): value})


@pytest.mark.parametrize("text", ["colour = 1", "port = ", "port = 'x'", 'port = "\x00"'])
def test_bad_files(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(TreadleError, match="configuration file"):
        Config.load(environ={}, file=file)
    with pytest.raises(TreadleError, match="missing"):
        Config.load(environ={}, file=tmp_path / "missing.toml")


def test_keys_never_appear_in_errors() -> None:
    with pytest.raises(TreadleError) as caught:
        Config.load({"api_key": [b"secret"]}, {})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct"),
        ("DeepSeek-R1-Distill-Qwen-7B-Q4_K_M-00001-of-00002.gguf", "deepseek-r1-distill-qwen-7b"),
        ("tiny-IQ4_XS.gguf", "tiny"),
        ("model.gguf", "model"),
    ],
)
def test_served_name_of_a_file(file: str, name: str) -> None:
    from treadle.cli.load import model_name

    assert model_name(Path(file)) == name
