"""``treadle key``: the API keys of a server."""

from __future__ import annotations

import contextlib
import csv
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from treadle.cli.main import config_option, settings
from treadle.core import TreadleError
from treadle.keys.records import SCOPES

if TYPE_CHECKING:
    from treadle.keys.records import Key
    from treadle.keys.store import Store

F = TypeVar("F", bound=Callable[..., Any])

_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent", "monthly_tokens")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@click.group(no_args_is_help=True)
def command() -> None:
    """Make and revoke the API keys of a server, and see what they have used.

    The keys are in a store that running servers share (--data-dir, as for `treadle serve`), hashed: nobody
    can read a key there. A change counts within a second, without a restart. Run these commands as the user
    of the server, or as root.

    \b
    treadle key create alice
    treadle key create ci --model qwen3:8b --requests-per-minute 60 --expires 90d
    treadle key list
    treadle key usage --month 2027-01 --format csv
    treadle key revoke alice
    """


def _store_options(function: F) -> F:
    return settings("data_dir")(config_option(function))


@contextlib.contextmanager
def _store(data_dir: str | None, config_file: str | None) -> Iterator[Store]:
    from treadle.config import Config
    from treadle.keys.actor import administrator
    from treadle.keys.store import Store
    from treadle.keys.store import data_dir as folder

    config = Config.load({"data_dir": data_dir}, file=config_file)
    with contextlib.closing(Store(folder(config.data_dir), actor=administrator())) as store:
        yield store


def _what_it_may(function: F) -> F:
    """Options for scopes, models, limits and expiry."""
    for option in (
        click.option(
            "--expires", metavar="WHEN", help="Last day (2027-01-31, UTC), or time from now (90d, 12h)."
        ),
        click.option("--monthly-tokens", metavar="N", help="Tokens of prompts and answers per month (UTC)."),
        click.option("--concurrent", metavar="N", help="Requests at once."),
        click.option("--tokens-per-minute", metavar="N", help="Tokens of prompts and answers per minute."),
        click.option("--requests-per-minute", metavar="N", help="Requests per minute."),
        click.option(
            "--model", "models", multiple=True, metavar="NAME",
            help="Name or alias of a model that the key may use, as in /v1/models; not checked. Repeat for "
            "several. Default: all.",
        ),
        click.option(
            "--scope", "scopes", multiple=True, type=click.Choice(SCOPES),
            help="What the key may do: inference: use models; metrics: read /metrics; admin: administer the "
            "server. Repeat for several. Default: inference.",
        ),
    ):  # fmt: skip
        function = option(function)
    return function


@command.command()
@click.argument("name")
@_what_it_may
@_store_options
def create(
    name: str,
    scopes: tuple[str, ...],
    models: tuple[str, ...],
    expires: str | None,
    data_dir: str | None,
    config_file: str | None,
    **limits: str | None,
) -> None:
    """Make a key called NAME and write it to standard output.

    It is shown this once. NAME appears in logs and lists: a person, team or program.
    """
    from treadle.keys.records import Limits
    from treadle.keys.store import new_key

    _check_name(name)
    numbers = {limit: _number(limit, value) for limit, value in limits.items() if value is not None}
    key = new_key(name, scopes or ("inference",), models, Limits(**numbers), _expiry(expires))
    with _store(data_dir, config_file) as store:
        secret = store.create(key)
    _tell_of_models(models)
    _show_secret(f"The key {name} was made in {store.path}. It is not shown again:", secret)


@command.command()
@click.argument("name")
@_what_it_may
@_store_options
def change(
    name: str,
    scopes: tuple[str, ...],
    models: tuple[str, ...],
    expires: str | None,
    data_dir: str | None,
    config_file: str | None,
    **limits: str | None,
) -> None:
    """Change what the key NAME may do. What is not given stays; `none` takes a limit or an expiry away, `all`
    allows all models.
    """
    columns: dict[str, Any] = {}
    if scopes:
        columns["scopes"] = json.dumps(sorted(set(scopes)))
    if models:
        columns["models"] = json.dumps([] if models == ("all",) else sorted(set(models)))
    if expires is not None:
        columns["expires"] = None if expires == "none" else _expiry(expires)
    for limit, value in limits.items():
        if value is not None:
            columns[limit] = None if value == "none" else _number(limit, value)
    if not columns:
        raise click.UsageError("nothing to change: give at least one option")
    with _store(data_dir, config_file) as store:
        store.change(name, columns)
    _tell_of_models(() if models == ("all",) else models)
    click.echo(f"The key {name} was changed.", err=True)


@command.command()
@click.argument("name")
@_store_options
def revoke(name: str, data_dir: str | None, config_file: str | None) -> None:
    """End the key NAME (or its id) now and for ever."""
    with _store(data_dir, config_file) as store:
        key = store.revoke(name)
    click.echo(f"The key {key.name} ({key.id}) is revoked.", err=True)


@command.command()
@click.argument("name")
@click.option(
    "--keep-old", metavar="TIME", default="0s", help="How long the old key still works, such as 24h."
)
@_store_options
def rotate(name: str, keep_old: str, data_dir: str | None, config_file: str | None) -> None:
    """Replace the key NAME by a new one with the same name, limits and usage, and write it to standard
    output."""
    seconds = _duration("--keep-old", keep_old)
    with _store(data_dir, config_file) as store:
        _, secret = store.rotate(name, seconds)
    until = f"The old one works for {keep_old} more." if seconds else "The old one has ended."
    _show_secret(f"The key {name} has a new secret. It is not shown again. {until}", secret)


@command.command("list")
@click.option("--all", "everything", is_flag=True, help="Show revoked and expired keys, too.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@_store_options
def list_keys(everything: bool, as_json: bool, data_dir: str | None, config_file: str | None) -> None:
    """List the keys, what they may do and what they have used this month. Times are UTC."""
    from treadle.keys.usage import today

    with _store(data_dir, config_file) as store:
        keys, hints, used = store.all_keys(), store.hints(), store.last_used()
        tokens = store.month_tokens(today(time.time())[:7])
    shown = [key for key in keys if everything or _state(key) == "active"]
    if as_json:
        entries = [_entry(key, hints[key.id], tokens.get(key.id, 0), used.get(key.id)) for key in shown]
        click.echo(json.dumps(entries, indent=2))
        return
    if not shown:
        hidden = f"; {len(keys)} are revoked or expired (--all)" if keys else ""
        click.echo(f"There are no keys in {store.path}{hidden}.", err=True)
        return
    rows = [
        (
            key.name,
            f"{key.id}  …{hints[key.id]}",
            ",".join(sorted(key.scopes)),
            ",".join(sorted(key.models)) or "all",
            _limits(key) or "none",
            f"{tokens.get(key.id, 0):,}",
            _date(used.get(key.id)),
            _date(key.expires),
            _state(key),
        )
        for key in shown
    ]
    titles = (
        "NAME",
        "ID",
        "SCOPES",
        "MODELS",
        "LIMITS",
        "TOKENS THIS MONTH",
        "LAST USED",
        "EXPIRES",
        "STATE",
    )
    _table(titles, rows)


@command.command()
@click.option("--month", metavar="YYYY-MM", help="Month to show, in UTC. Default: the present one.")
@click.option("--by-day", is_flag=True, help="One line per day.")
@click.option("--format", "form", type=click.Choice(("table", "csv", "json")), default="table")
@_store_options
def usage(month: str | None, by_day: bool, form: str, data_dir: str | None, config_file: str | None) -> None:
    """Show requests and tokens per key and model.

    Errors are requests that were answered with a status of 400 or more. Cached tokens are those of the prompt
    tokens that the prefix cache had.
    """
    from treadle.keys.usage import Counts, today

    month = month or today(time.time())[:7]
    if not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", month):
        raise TreadleError(f"--month: {month!r} is not allowed; it must be a month such as 2027-01")
    with _store(data_dir, config_file) as store:
        names = {key.id: key.name for key in store.all_keys()}
        found = store.usage(month, month + "~")
    sums: dict[tuple[str, str, str, str], Counts] = {}
    for used, counts in found:
        name = names.get(used.key, used.key)
        group = (used.day if by_day else month, name, used.key, used.model)
        sums.setdefault(group, Counts()).add(counts)
    columns = ("requests", "errors", "prompt_tokens", "cached_tokens", "completion_tokens")
    names_of_columns = ("day" if by_day else "month", "key", "id", "model", *columns)
    rows = [
        (*group, *(getattr(counts, column) for column in columns)) for group, counts in sorted(sums.items())
    ]
    if form == "json":
        click.echo(json.dumps([dict(zip(names_of_columns, row, strict=True)) for row in rows], indent=2))
    elif form == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerows([names_of_columns, *rows])
    else:
        titles = tuple(name.replace("_", " ").upper() for name in names_of_columns)
        _table(titles, [tuple(f"{v:,}" if isinstance(v, int) else v or "-" for v in row) for row in rows])


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Write a JSON object per line.")
@_store_options
def audit(as_json: bool, data_dir: str | None, config_file: str | None) -> None:
    """Show who made, changed, rotated and revoked which key, and when."""
    with _store(data_dir, config_file) as store:
        acts = store.audit()
    for act in acts:
        when = datetime.fromtimestamp(act["time"], UTC).isoformat(timespec="seconds")
        if as_json:
            click.echo(json.dumps({**act, "time": when}))
        else:
            told = " ".join(f"{name}={_told(name, value)}" for name, value in act["details"].items())
            click.echo(
                f"{when}  {act['actor']}  {act['action']}  {act['name']} ({act['key']})  {told}".rstrip()
            )


def _check_name(name: str) -> None:
    if not 0 < len(name) <= 64 or not name.isprintable() or " " in name or name.startswith("-"):
        raise TreadleError(
            f"{name!r} is no name for a key; it must have 1 to 64 printable characters, without spaces"
        )


def _number(limit: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) < 2**53):
        option = "--" + limit.replace("_", "-")
        raise TreadleError(f"{option}: {text!r} is not allowed; it must be a whole number from 1")
    return int(text)


def _duration(option: str, text: str) -> float:
    match = re.fullmatch(r"(\d{1,6})([smhdw])", text)
    if match is None:
        raise TreadleError(f"{option}: {text!r} is not allowed; it must be a time such as 30m, 24h or 90d")
    return int(match[1]) * _UNITS[match[2]]


def _expiry(text: str | None) -> float | None:
    if text is None:
        return None
    with contextlib.suppress(ValueError):
        end = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).timestamp() + 86400
        if end <= time.time():
            raise TreadleError(f"--expires: {text} is over")
        return end
    if not re.fullmatch(r"\d{1,6}[smhdw]", text):
        raise TreadleError(
            f"--expires: {text!r} is not allowed; it must be a day (2027-01-31) or a time (90d)"
        )
    return time.time() + _duration("--expires", text)


def _tell_of_models(models: Sequence[str]) -> None:
    """The store belongs to no one server, so nobody here knows which names there are."""
    if models:
        names = ", ".join(sorted(set(models)))
        where = "GET /v1/models lists those of a server"
        click.echo(f"It may use only {names}. Names of models are not checked here; {where}.", err=True)


def _show_secret(text: str, secret: str) -> None:
    click.echo(text, err=True)
    click.echo(secret)


def _state(key: Key) -> str:
    if key.revoked is not None:
        return "revoked"
    return "expired" if key.expires is not None and key.expires <= time.time() else "active"


def _limits(key: Key) -> str:
    short = ("requests/min", "tokens/min", "at once", "tokens/month")
    found = zip((getattr(key.limits, name) for name in _LIMITS), short, strict=True)
    return ", ".join(f"{value:,} {unit}" for value, unit in found if value is not None)


def _date(when: float | None) -> str:
    return "never" if when is None else datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M")


def _told(name: str, value: Any) -> str:
    """A value of the audit log, as the options of the command write it."""
    if value is None:
        return "none"
    if name == "expires":
        return datetime.fromtimestamp(value, UTC).isoformat(timespec="seconds")
    if name in ("scopes", "models"):
        return ",".join(json.loads(value)) or "all"
    return str(value)


def _entry(key: Key, hint: str, tokens: int, used: float | None) -> dict[str, Any]:
    times = {"created": key.created, "last_used": used, "expires": key.expires, "revoked": key.revoked}
    return {
        "id": key.id,
        "name": key.name,
        "ends_with": hint,
        "state": _state(key),
        "scopes": sorted(key.scopes),
        "models": sorted(key.models),
        **{name: getattr(key.limits, name) for name in _LIMITS},
        "month_tokens": tokens,
        **{
            name: None if when is None else datetime.fromtimestamp(when, UTC).isoformat(timespec="seconds")
            for name, when in times.items()
        },
    }


def _table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    lines = [titles, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for row in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
