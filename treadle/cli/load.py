"""Puts a served model together: hub, tokenizer and engine process."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from treadle.config import Config
from treadle.engine.engine import EngineInfo
from treadle.server.service import Served
from treadle.server.text import ModelText

_QUANTISATION = re.compile(r"[-._](I?Q\d\w*|B?F(16|32))(-\d{5}-of-\d{5})?$", re.IGNORECASE)
LOADER = "treadle.engine.load:load_engine"  # see treadle.engine.process.Loader


async def load_served(config: Config) -> Served:
    """The model of ``config``, once its engine answers. Raises TreadleError if it cannot."""
    from treadle.engine.client import EngineClient
    from treadle.text.reasoning import preset_for

    path, aliases = await asyncio.to_thread(find, config.model)
    settings = {
        "path": str(path),
        "threads": config.threads,
        "context": config.context,
        "kv_memory": config.kv_memory,
        "target_itl": config.target_itl,
        "max_queue": config.max_queue,
        "speculation": config.speculation == "on",
    }
    engine = EngineClient(LOADER, settings)
    await engine.start()
    try:
        text = await asyncio.to_thread(read_text, path)
        info = await engine.ready()
    except BaseException:
        await engine.close()
        raise
    name = config.served_name or model_name(path)
    preset = preset_for(text.model_name) or preset_for(name)
    return Served(
        name=name,
        aliases=aliases,
        text=text,
        engine=engine,
        context=info.context,
        preset=preset,
        summary=describe(info),
    )


def find(model: str | None) -> tuple[Path, tuple[str, ...]]:
    """The file of a model, and its name in `treadle list` unless it was named by its path."""
    from treadle import hub

    found = hub.resolve(model)
    named_by_path = model is not None and Path(model).exists()
    return Path(found), () if named_by_path else (found.name,)


def describe(info: EngineInfo) -> str:
    """What the engine runs with, in a few words."""
    threads = "1 thread" if info.threads == 1 else f"{info.threads} threads"
    return f"{threads}, ISA {info.isa}, {info.weight_bytes / 2**20:.0f} MiB of weights"


def model_name(path: Path) -> str:
    """The name of a model file without its quantisation, lower case: ``smollm2-135m-instruct``."""
    return _QUANTISATION.sub("", path.stem).lower()


def read_text(path: Path) -> ModelText:
    """Tokenizer and chat template of a GGUF file."""
    from treadle.text.tokenizer import Tokenizer
    from treadle.weights.gguf import open_gguf

    return ModelText(Tokenizer.from_gguf(open_gguf(path).metadata))
