"""The buckets of rate limits, on a clock of the test; and the arguments of ``treadle key``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tests.keys.server import treadle_key
from treadle.cli.key import command
from treadle.core import TreadleError
from treadle.keys.limits import Limiter, LimitReached
from treadle.keys.records import Key, Limits


def test_buckets_fill_evenly_and_debts_are_made_up_for() -> None:
    now = [0.0]
    limiter = Limiter(lambda: now[0])
    key = Key(id="k", name="k", limits=Limits(requests_per_minute=60, tokens_per_minute=600))
    used = 0
    ticket = limiter.enter(key, lambda: used)
    used = 1200  # by an answer that is still running
    assert (limiter.levels(key)["tokens"].left, limiter.levels(key)["requests"].left) == (0, 59)
    with pytest.raises(LimitReached) as reached:
        limiter.enter(key, lambda: 0)
    assert (reached.value.what, reached.value.limit) == ("tokens per minute", 600)
    assert reached.value.wait == pytest.approx(60.1)
    limiter.leave(ticket, used)
    now[0] = 60.0
    with pytest.raises(LimitReached):
        limiter.enter(key, lambda: 0)
    now[0] = 60.2
    limiter.leave(limiter.enter(key, lambda: 0), 0)
    now[0] = 1000.0
    assert limiter.levels(key)["tokens"].left == 600  # never more than one minute's


def test_a_limit_that_is_set_later_begins_full() -> None:
    limiter = Limiter(lambda: 0.0)
    for _ in range(5):
        limiter.leave(limiter.enter(Key(id="k", name="k", limits=Limits(concurrent=1)), lambda: 0), 1000)
    later = Key(id="k", name="k", limits=Limits(requests_per_minute=1, tokens_per_minute=1))
    limiter.enter(later, lambda: 0)
    limiter.enter(Key(id="other", name="other", limits=later.limits), lambda: 0)
    with pytest.raises(LimitReached, match="requests per minute"):
        limiter.enter(later, lambda: 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["create", "a b"], "no name for a key"),
        (["create", "x" * 65], "no name for a key"),
        (["create", "a", "--concurrent", "0"], "--concurrent: '0' is not allowed"),
        (["create", "a", "--tokens-per-minute", "1.5"], "--tokens-per-minute"),
        (["create", "a", "--expires", "soon"], "--expires: 'soon'"),
        (["create", "a", "--expires", "2020-01-01"], "is over"),
        (["rotate", "a", "--keep-old", "1y"], "--keep-old: '1y'"),
        (["revoke", "nobody"], "no key 'nobody'"),
        (["usage", "--month", "2027-13"], "--month"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(TreadleError, match=message):
        treadle_key(tmp_path, *arguments)


def test_scopes_are_a_choice(tmp_path: Path) -> None:
    with pytest.raises(click.BadParameter, match="root"):
        treadle_key(tmp_path, "create", "a", "--scope", "root")
    with pytest.raises(click.UsageError, match="nothing to change"):
        treadle_key(tmp_path, "change", "a")


def test_the_store_is_named(tmp_path: Path) -> None:
    """Who has mistyped the folder sees it."""
    for arguments in (["list"], ["create", "a"]):
        told = CliRunner().invoke(command, [*arguments, "--data-dir", str(tmp_path)])
        assert told.exit_code == 0 and str(tmp_path / "treadle.db") in told.stderr
    treadle_key(tmp_path, "revoke", "a")
    told = CliRunner().invoke(command, ["list", "--data-dir", str(tmp_path)])
    assert told.stdout == "" and "1 are revoked or expired (--all)" in told.stderr


def test_names_of_models_are_told_to_be_unchecked(tmp_path: Path) -> None:
    for action in ("create", "change"):
        arguments = [action, "a", "--model", "nope", "--data-dir", str(tmp_path)]
        told = CliRunner().invoke(command, arguments)
        assert told.exit_code == 0
        assert "only nope" in told.stderr
        assert "not checked" in told.stderr
        assert "nope" not in told.stdout
    told = CliRunner().invoke(command, ["change", "a", "--model", "all", "--data-dir", str(tmp_path)])
    assert "checked" not in told.stderr


def test_list_and_audit(tmp_path: Path) -> None:
    treadle_key(tmp_path, "create", "zoë", "--model", "m", "--concurrent", "3", "--expires", "2d")
    treadle_key(tmp_path, "create", "gone")
    treadle_key(tmp_path, "change", "zoë", "--concurrent", "none", "--model", "all", "--monthly-tokens", "5")
    treadle_key(tmp_path, "revoke", "gone")
    (shown,) = json.loads(treadle_key(tmp_path, "list", "--json"))
    assert (shown["name"], shown["state"], shown["models"]) == ("zoë", "active", [])
    assert (shown["concurrent"], shown["monthly_tokens"]) == (None, 5)
    assert "gone" not in treadle_key(tmp_path, "list")
    assert "revoked" in treadle_key(tmp_path, "list", "--all")
    acts = [json.loads(line) for line in treadle_key(tmp_path, "audit", "--json").splitlines()]
    assert [(act["action"], act["name"]) for act in acts] == [
        ("create", "zoë"), ("create", "gone"), ("change", "zoë"), ("revoke", "gone"),
    ]  # fmt: skip
    assert all(act["actor"] and act["time"].endswith("+00:00") for act in acts)
    made, _, changed, ended = treadle_key(tmp_path, "audit").splitlines()
    assert re.search(
        r" create  zoë \(key_\w+\)  scopes=inference models=m concurrent=3 expires=20\d\d-", made
    )
    assert changed.endswith("  models=all concurrent=none monthly_tokens=5")
    assert re.search(r" revoke  gone \(key_\w+\)$", ended)
