"""Puts a served model together: hub, tokenizer and engine process."""

from __future__ import annotations

import asyncio

from treadle.config import Config
from treadle.server.service import Served


async def load_served(config: Config) -> Served:
    """The model of ``config``, once its engine answers. Raises TreadleError for a model that cannot be
    served."""
    from treadle import hub
    from treadle.engine.client import EngineClient
    from treadle.llm import ENGINE_LOADER, engine_config
    from treadle.server.text import ModelText

    model = await asyncio.to_thread(hub.resolve, config.model)
    engine = EngineClient(
        ENGINE_LOADER, engine_config(model.path, config.threads, config.context, config.kv_memory)
    )
    await engine.start()
    try:
        text = await asyncio.to_thread(ModelText.from_gguf, model.path)
        info = await engine.ready()
    except BaseException:
        await engine.close()
        raise
    name = config.served_name or model.name
    return Served(name=name, aliases=(), text=text, engine=engine, context=info.context)
