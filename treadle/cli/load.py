"""Puts the served models together: hub, tokenizers and engine processes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from treadle.config import Config
from treadle.core import TreadleError
from treadle.engine.client import EngineClient
from treadle.engine.load import LoadConfig, Outline, outline
from treadle.engine.messages import Manners
from treadle.engine.runner import RunnerConfig
from treadle.server.models import ModelEngine, Plan, Residents
from treadle.server.service import Served
from treadle.server.text import ModelText
from treadle.text.reasoning import preset_for
from treadle.text.tokenizer import Tokenizer
from treadle.weights.gguf import open_gguf

_QUANTISATION = re.compile(r"[-._](I?Q\d\w*|B?F(16|32))(-\d{5}-of-\d{5})?$", re.IGNORECASE)
_NAMED = re.compile(r"([\w.:/-]{1,128})=(.+)", re.DOTALL)
LOADER = "treadle.engine.load:load_engine"  # see treadle.engine.process.Loader


async def load_models(config: Config) -> list[Served]:
    """The models of ``config``; those that fit into memory together are being loaded when it returns. Raises
    TreadleError if one of them cannot be served."""
    found = await asyncio.to_thread(find_all, config.model)
    drafts = await asyncio.to_thread(find_drafts, config.draft, [name for name, _, _ in found])
    residents = Residents(config.idle_unload)
    turns = residents.turns if len(found) > 1 else None
    manners = Manners(turns=turns, spare=config.cpu_share == "spare")
    models: list[tuple[ModelEngine, Outline]] = []
    for name, path, _ in found:
        settings = load_config(config, path, drafts.get(name))
        known = await asyncio.to_thread(outline, settings)
        plan = Plan(
            start=_starter(config, settings, manners),
            least=known.memory,
            places=RunnerConfig.max_sequences + config.max_queue,
            patience=config.load_timeout,
        )
        models.append((ModelEngine(name, plan, residents), known))
    residents.start()
    try:
        return [
            await asyncio.to_thread(served, name, path, aliases, engine, known)
            for (name, path, aliases), (engine, known) in zip(found, models, strict=True)
        ]
    except BaseException:
        for engine, _ in models:
            await engine.close()
        raise


def load_config(config: Config, path: Path, draft: Path | None = None) -> LoadConfig:
    """What an engine process is told to load."""
    return LoadConfig(
        path=str(path),
        draft=None if draft is None else str(draft),
        threads=config.threads,
        context=config.context,
        kv_memory=config.kv_memory,
        kv_dtype=config.kv_dtype,
        kv_spill=config.kv_spill,
        kv_spill_size=config.kv_spill_size,
        pack_cache=config.pack_cache,
        pack_cache_size=config.pack_cache_size,
        target_itl=config.target_itl,
        max_queue=config.max_queue,
        speculation=config.speculation == "on",
        pinned=config.cpu_share == "full",
    )


def _starter(config: Config, settings: LoadConfig, manners: Manners) -> Callable[[int], EngineClient]:
    def start(room: int) -> EngineClient:
        loading = msgspec.structs.replace(settings, memory=room)
        return EngineClient(LOADER, loading, manners=manners, timeout=config.engine_timeout)

    return start


def served(name: str, path: Path, aliases: tuple[str, ...], engine: ModelEngine, known: Outline) -> Served:
    """A model with its text side, read from its file."""
    text = ModelText(Tokenizer.from_gguf(open_gguf(path).metadata))
    preset = preset_for(text.model_name) or preset_for(name)
    return Served(
        name=name,
        aliases=aliases,
        text=text,
        engine=engine,
        context=known.context,
        embedding=known.embedding,
        preset=preset,
    )


def find_all(models: tuple[str, ...]) -> list[tuple[str, Path, tuple[str, ...]]]:
    """Name, file and other names of each model; the built-in one if there is none. Raises TreadleError when
    two have the same name."""
    found: dict[str, tuple[str, Path, tuple[str, ...]]] = {}
    others: set[str] = set()
    for text in models or (None,):
        chosen, model = split_name(text)
        path, aliases = find(model)
        name = chosen or model_name(path)
        if name in found:
            raise TreadleError(
                f"two models have the name {name}: {found[name][1]} and {path}; choose another for one of "
                f"them: OTHER={model}"
            )
        found[name] = name, path, tuple(alias for alias in aliases if alias not in others)
        others.update(aliases)
    return [
        (name, path, tuple(alias for alias in aliases if alias not in found))
        for name, path, aliases in found.values()
    ]


def find_drafts(drafts: tuple[str, ...], names: list[str]) -> dict[str, Path]:
    """The files of draft models by the names of the models that they guess for. Raises TreadleError when one
    is for none of ``names``, or it is not said for which."""
    found: dict[str, Path] = {}
    for text in drafts:
        name, model = split_name(text)
        if name is None and len(names) > 1:
            raise TreadleError(
                f"--draft {text}: several models are served; say for which it guesses: "
                f"--draft {names[0]}={text}"
            )
        name = name or names[0]
        if name not in names:
            raise TreadleError(f"--draft {text}: no model {name} is served; there are: {', '.join(names)}")
        if name in found:
            raise TreadleError(f"--draft {text}: {name} has a draft model already; leave one of the two out")
        found[name] = find(model)[0]
    return found


def split_name(text: str | None) -> tuple[str | None, str | None]:
    """``NAME=MODEL`` as (name, model); the name is None where none is given."""
    match = _NAMED.fullmatch(text or "")
    if match is None or Path(text or "").exists():
        return None, text
    return match[1], match[2]


def find(model: str | None) -> tuple[Path, tuple[str, ...]]:
    """The file of a model, and its name in `treadle list` unless it was named by its path."""
    from treadle import hub

    found = hub.resolve(model)
    named_by_path = model is not None and Path(model).exists()
    return Path(found), () if named_by_path else (found.name,)


def model_name(path: Path) -> str:
    """The name of a model file without its quantisation, lower case: ``smollm2-135m-instruct``."""
    return _QUANTISATION.sub("", path.stem).lower()
