"""Tokenizers from ``tokenizer.json`` and ``tokenizer_config.json`` of a model directory, as Hugging Face
writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from treadle.core import TreadleError
from treadle.text.vocabulary import Control, Kind, Vocabulary, ends_text, is_control_text


def vocabulary_from_directory(directory: Path) -> Vocabulary:
    """Read the vocabulary. Raises TreadleError naming the file and what is wrong with it."""
    path = directory / "tokenizer.json"
    raw = _read(path)
    config = _read(directory / "tokenizer_config.json", optional=True)
    model = raw.get("model") or {}
    if model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise TreadleError(f"{path}: model type {model.get('type')!r} is not supported; supported is 'BPE'")
    template = _template(directory, config)
    vocab: dict[str, int] = dict(model["vocab"])
    added: list[dict[str, Any]] = raw.get("added_tokens") or []
    controls = {
        entry["content"]: Control(entry["id"], entry["special"], entry["lstrip"], entry["rstrip"])
        for entry in added
        if entry["special"] or is_control_text(entry["content"], template or "")
    }
    ids = vocab | {entry["content"]: entry["id"] for entry in added}
    tokens, kinds = _by_id(ids, added)
    unk = model.get("unk_token")
    # Control tokens leave the backend altogether, so that no text can turn into one.
    model["vocab"] = {t: i for t, i in ids.items() if t not in controls or t == unk}
    model["merges"] = [pair for pair in model.get("merges", ()) if _joined(pair) not in controls]
    raw["added_tokens"] = [entry for entry in added if entry["content"] not in controls]
    raw["post_processor"] = None
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(raw, ensure_ascii=False))
        inside = _after_control(raw)
    except Exception as error:  # the library raises plain Exception
        raise TreadleError(f"{path}: {error}") from None
    special = _special(directory, config)
    bos = ids.get(special.get("bos_token", ""))
    generation = _read(directory / "generation_config.json", optional=True).get("eos_token_id")
    ends = ends_text(controls) | {i for i in _as_list(generation) if isinstance(i, int)}
    ends |= {ids[t] for t in (special.get("eos_token"),) if t in ids}
    architecture = _read(directory / "config.json", optional=True)
    return Vocabulary(
        tokens=tokens,
        kinds=kinds,
        backend=backend,
        backend_inside=inside,
        byte_level=_uses(raw, "ByteLevel"),
        controls=controls,
        space_prefix=not _uses(raw, "ByteLevel") and (_uses(raw, "Prepend") or _uses_prefix(raw)),
        bos_id=bos,
        adds_bos=bos is not None and _adds_bos(path, config, special.get("bos_token", "")),
        eos_ids=ends,
        chat_template=template,
        template_variables=special,
        family=str(architecture.get("model_type", "")),
        name=directory.name,
    )


def _read(path: Path, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise TreadleError(f"{path}: not found; a model directory needs it for its tokenizer") from None
    except (OSError, ValueError) as error:
        raise TreadleError(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise TreadleError(f"{path}: must be a JSON object")
    return found


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _joined(pair: list[str] | str) -> str:
    return pair.replace(" ", "", 1) if isinstance(pair, str) else "".join(pair)


def _by_id(ids: dict[str, int], added: list[dict[str, Any]]) -> tuple[list[str], list[int]]:
    size = max(ids.values()) + 1
    tokens, kinds = [""] * size, [int(Kind.UNUSED)] * size
    for text, id in ids.items():
        tokens[id] = text
        is_byte = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        kinds[id] = Kind.BYTE if is_byte else Kind.NORMAL
    for entry in added:
        kinds[entry["id"]] = Kind.CONTROL if entry["special"] else Kind.USER_DEFINED
    return tokens, kinds


def _special(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in (_read(directory / "special_tokens_map.json", optional=True), config):
        for name, value in source.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
    return found


def _template(directory: Path, config: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _steps(raw: dict[str, Any]) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    for part, inner in (
        ("normalizer", "normalizers"),
        ("pre_tokenizer", "pretokenizers"),
        ("decoder", "decoders"),
    ):
        step = raw.get(part) or {}
        steps.extend(step[inner] if step.get("type") == "Sequence" else [step])
    return steps


def _uses(raw: dict[str, Any], type_: str) -> bool:
    return any(step.get("type") == type_ for step in _steps(raw))


def _uses_prefix(raw: dict[str, Any]) -> bool:
    return any(
        s.get("type") == "Metaspace" and s.get("prepend_scheme", "always") != "never" for s in _steps(raw)
    )


def _after_control(raw: dict[str, Any]) -> tokenizers.Tokenizer | None:
    """A second tokenizer for text that does not start the prompt, where only the start gets a space put
    before it."""
    pre: dict[str, Any] = raw.get("pre_tokenizer") or {}
    steps = pre["pretokenizers"] if pre.get("type") == "Sequence" else [pre]
    first = [
        step for step in steps if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first"
    ]
    if not first:
        return None
    for step in first:
        step["prepend_scheme"] = "never"
    inside = tokenizers.Tokenizer.from_str(json.dumps(raw, ensure_ascii=False))
    for step in first:
        step["prepend_scheme"] = "first"
    return inside


def _adds_bos(path: Path, config: dict[str, Any], bos: str) -> bool:
    declared = config.get("add_bos_token")
    if isinstance(declared, bool):
        return declared
    processor: dict[str, Any] = _read(path).get("post_processor") or {}
    for step in processor.get("processors", [processor]):
        if step.get("type") == "TemplateProcessing":
            head = (step.get("single") or [{}])[0].get("SpecialToken", {})
            return bool(head.get("id") == bos)
    return False
