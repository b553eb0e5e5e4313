"""One user, with and without speculation: an answer that repeats its prompt, and free text."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.serving.bars import Bar
from benchmarks.serving.servers import Meter, Programs
from benchmarks.serving.users import target_of
from treadle.bench.http_client import Connection
from treadle.bench.serve import Exchange, Target, exchange

_PASSAGES = (
    "The loom stands in the north room, where the light is even all day. Before work begins the weaver "
    "checks the warp, thread by thread, and ties what has broken in the night. Then the treadles go down in "
    "turn, the shed opens, and the shuttle flies from left to right and back again. Every hundred picks the "
    "cloth is wound on and the tension is set anew. At noon the machine is oiled, and the floor is swept.",
    "def totals(rows):\n    result = {}\n    for name, amount in rows:\n        if name not in result:\n"
    "            result[name] = 0\n        result[name] += amount\n    return result\n\n\ndef report(rows):\n"
    "    for name, amount in sorted(totals(rows).items()):\n        print(name, amount)\n",
    "Order 4711 was placed on Monday and shipped on Tuesday. Order 4712 was placed on Monday and shipped on "
    "Thursday. Order 4713 was placed on Tuesday and has not been shipped. Order 4714 was placed on Wednesday "
    "and was cancelled by the customer. Order 4715 was placed on Friday and will be shipped on Monday.",
    "Wash the lentils and leave them in cold water for one hour. Chop two onions, three carrots and a stick "
    "of celery. Heat four spoons of oil in a large pot, add the onions, and stir until they are golden. Add "
    "the carrots and the celery, then the lentils, and cover everything with water. Cook for forty minutes.",
)
_QUESTIONS = (
    "Write a short story about a lighthouse keeper and a storm.",
    "Explain how rain forms, for a child of ten years.",
    "What should one think about before buying a used bicycle?",
    "Describe a market on a summer morning.",
)
_MOST = 320  # tokens of an answer


async def copying(programs: Programs, count: int, rounds: int) -> list[Bar]:
    """The first ``count`` tasks of each kind, ``rounds`` times, with and without in turns."""
    with programs.ours("--speculation", "on") as on, programs.ours("--speculation", "off") as off:
        targets = [(await target_of(server))[0] for server in (on, off)]
        copies = [f"Copy this text exactly, without any other word:\n\n{text}" for text in _PASSAGES[:count]]
        return [
            *await _compare("copying", targets, copies, rounds, least=1.8),
            *await _compare("free text", targets, list(_QUESTIONS[:count]), rounds, least=0.97),
        ]


async def _compare(
    name: str, targets: list[Target], tasks: list[str], rounds: int, least: float
) -> list[Bar]:
    meter = Meter()
    speeds: list[list[list[float]]] = [[[] for _ in targets] for _ in tasks]
    same, answers = True, []
    for _ in range(rounds):
        for task, by_target in zip(tasks, speeds, strict=True):
            done = [await _ask(target, task) for target in targets]
            same = same and len({e.text for e in done}) == 1
            answers.append({"asked": task, "text": done[0].text, "tokens": done[0].completion_tokens})
            for e, found in zip(done, by_target, strict=True):
                found.append(_speed(e))
    ratios = [median(on) / median(off) for on, off in speeds]
    detail: dict[str, Any] = {
        "ratio_by_task": ratios,
        "token_per_s_by_task": speeds,
        "answers": answers[: len(tasks)],
    }
    foreign = meter.foreign()
    return [
        Bar(
            f"{name}: decode speed with speculation, times without",
            median(ratios),
            least,
            None,
            foreign,
            detail,
        ),
        Bar(f"{name}: greedy answers are the same (1: all)", float(same), 1),
    ]


async def _ask(target: Target, task: str) -> Exchange:
    body = {
        "model": target.model,
        "messages": [{"role": "user", "content": task}],
        "max_tokens": _MOST,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = Connection(target.url)
    done = await exchange(connection, target, body)
    await connection.close()
    if done.error or done.completion_tokens < 2:
        raise SystemExit(f"{target.url}: {done.error or 'an answer of less than two tokens'}")
    return done


def _speed(e: Exchange) -> float:
    """Token/s after the first."""
    return (e.completion_tokens - 1) / (e.arrivals[-1] - e.arrivals[0])
