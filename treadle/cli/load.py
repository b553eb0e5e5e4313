"""Puts a served model together: hub, tokenizer and engine process."""

from __future__ import annotations

import asyncio
from pathlib import Path

from treadle.config import Config
from treadle.server.service import Served
from treadle.server.text import ModelText

LOADER = "treadle.engine.load:load_engine"  # see treadle.engine.process.Loader


async def load_served(config: Config) -> Served:
    """The model of ``config``, once its engine answers. Raises TreadleError if it cannot."""
    from treadle import hub
    from treadle.engine.client import EngineClient
    from treadle.text.reasoning import preset_for

    model = await asyncio.to_thread(hub.resolve, config.model)
    settings = {
        "path": str(model.path),
        "threads": config.threads,
        "context": config.context,
        "kv_memory": config.kv_memory,
    }
    engine = EngineClient(LOADER, settings)
    await engine.start()
    try:
        text = await asyncio.to_thread(read_text, model.path)
        info = await engine.ready()
    except BaseException:
        await engine.close()
        raise
    name = config.served_name or model.name
    return Served(name=name, text=text, engine=engine, context=info.context, preset=preset_for(name))


def read_text(path: Path) -> ModelText:
    """Tokenizer and chat template of a GGUF file."""
    from treadle import _native
    from treadle.text.tokenizer import Tokenizer

    return ModelText(Tokenizer.from_gguf(_native.Gguf(str(path)).metadata))
