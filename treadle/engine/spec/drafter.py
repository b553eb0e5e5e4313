"""How many guessed tokens a step should check, and whose: as many as are likely to save more time than they
cost.

A checked token costs the time by which one more row lengthens a step (measured; small while the step waits
for weights from memory) and, if it comes true, saves its sequence a step. Guesses by lookup cost nothing
else; those of a draft model cost a pass of that model each. Where none of these pay, one is made now and
then, for a fixed share of the time, to see whether that has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from treadle.engine.sequence import Sequence
from treadle.engine.spec.model import MOST_DECODES, READY, DraftModel

_MOST = 10  # guessed tokens per sequence and step: later ones seldom decide, and a cancel waits for the step
_MARGIN = (
    1.25  # expected saving over cost: measurements are noisy, and guessing must not make anything slower
)
_PLAIN_EVERY = 64  # speculative steps after which one without guesses measures again what those save
_FIRST_SHARE = 0.25  # of a step's time per sequence: the cost of a checked token before it has been measured
_WEIGHT = 0.1  # of a new measurement
_RETURN = 0.01  # of the way back to the first assumption, per step in which cost forbids guesses
_TRIALS = 0.005  # of the time for trying a draft model that does not pay
_AHEAD = 256  # tokens of the rest of an answer that reading its prompt with the draft model may count on


@dataclass(slots=True)
class Guess:
    """The next tokens of a sequence, as they are guessed."""

    tokens: list[int]
    by_model: bool  # by the draft model


@dataclass(slots=True)
class _Plan:
    """How many guesses of a kind to check, and the steps of its sequence that this is likely to save, less
    its cost.
    """

    length: int = 0
    gain: float = 0.0


@dataclass(slots=True)
class _Load:
    """What a step without guesses takes, and what may be added."""

    base: float  # seconds of it
    value: float  # seconds that a token of one sequence takes
    cost: float  # seconds to assume for one more checked token
    rooms: dict[Sequence, int]  # guesses that a sequence may have


class Drafter:
    """Chooses the guesses of each step and learns from the time that it took."""

    def __init__(self, max_rows: int, model: DraftModel | None = None) -> None:
        """``max_rows``: logits rows per step."""
        self.model = model
        self._max_rows = max_rows
        self._row_s = 0.0  # seconds per checked token; 0: not known
        self._measured = 1  # steps that tell, the first assumption counted as one
        self._since_plain = 0
        self._trial_s = 0.0  # seconds that may go into trials of the draft model

    def propose(self, decodes: list[Sequence], base: float) -> dict[Sequence, Guess]:
        """Guesses for some of ``decodes``, which are all that the step runs. ``base``: seconds of the step
        without guesses, 0 if not known.
        """
        count = len(decodes)
        if not base or count > MOST_DECODES:
            return {}
        if self._since_plain >= _PLAIN_EVERY:
            self._since_plain = 0
            return {}
        value = base / count
        cost = max(self._row_s or _FIRST_SHARE * value, 0.02 * value) * _MARGIN
        most = min(_MOST, (self._max_rows - count) // count)
        rooms = {s: min(most, s.limit - len(s.tokens) - 1) for s in decodes}
        lookups = {s: s.lookup for s in decodes if s.lookup is not None and s.lookup.update()}
        plans = {s: _plan(lookup.chance, rooms[s], cost / value) for s, lookup in lookups.items()}
        drafts = self._ask(self.model, _Load(base, value, cost, rooms), plans) if self.model else {}
        for sequence, plan in plans.items():
            if plan.length and sequence not in drafts:
                drafts[sequence] = Guess(lookups[sequence].draft(plan.length), by_model=False)
        if drafts:
            self._since_plain += 1
        elif lookups and self._row_s:
            self._row_s += _RETURN * (_FIRST_SHARE * value - self._row_s)
        return drafts

    def record(self, drafted: int, base: float, seconds: float) -> None:
        """Learn from a step that checked ``drafted`` tokens in ``seconds``; ``base``: see ``propose``."""
        # A row that seems dearer than a whole step was disturbed.
        row_s = min(base, (seconds - base) / drafted)
        if not self._row_s:
            self._row_s = _FIRST_SHARE * base
        self._measured += 1
        self._row_s += max(_WEIGHT, 1 / self._measured) * (row_s - self._row_s)

    def _ask(
        self, model: DraftModel, load: _Load, lookups: Mapping[Sequence, _Plan]
    ) -> dict[Sequence, Guess]:
        """Guesses of the draft model, for sequences where they are likely to save more than ``lookups``."""
        model.follow(load.rooms)
        self._trial_s += _TRIALS * load.base
        count = len(load.rooms)
        pass_s = model.pass_seconds(count, load.base) * _MARGIN / count
        lengths: dict[Sequence, int] = {}
        late: list[Sequence] = []
        pays = False
        for sequence, room in load.rooms.items():
            chance = partial(_always, model.chance(sequence))
            plan = _plan(chance, min(room, model.room(sequence)), (load.cost + pass_s) / load.value)
            pays |= plan.length > 0
            if plan.gain <= lookups.get(sequence, _Plan()).gain:
                continue
            unread = model.unread(sequence)
            if unread <= READY:
                lengths[sequence] = plan.length
                continue
            saved = plan.gain / (1 + plan.length) * load.value  # seconds per token
            ahead = min(_AHEAD, sequence.limit - len(sequence.tokens))
            if saved * ahead > model.reading_seconds(unread, load.base):
                late.append(sequence)
        if late:  # half a step's time at once, so that the others hardly notice
            model.read(min(late, key=model.unread), load.base / 2)
        if not pays:
            lengths = self._try(model, load, lookups)
        return {s: Guess(tokens, by_model=True) for s, tokens in model.guess(lengths).items()}

    def _try(self, model: DraftModel, load: _Load, lookups: Mapping[Sequence, _Plan]) -> dict[Sequence, int]:
        """One guess for the sequence that it costs least, once enough time has been put by for it."""
        free = [s for s, room in load.rooms.items() if s not in lookups and min(room, model.room(s)) > 0]
        if not free:
            return {}
        sequence = min(free, key=model.unread)
        unread = model.unread(sequence)
        price = load.cost + model.pass_seconds(1, load.base)
        if unread > READY:
            price += model.reading_seconds(unread, load.base)
        if self._trial_s < price:
            return {}
        if unread > READY:
            before = model.seconds
            model.read(sequence, load.base / 2)
            self._trial_s -= model.seconds - before
            return {}
        self._trial_s -= price
        return {sequence: 1}


def _plan(chance: Callable[[int], float], room: int, needed: float) -> _Plan:
    """The guesses that are each worth checking: those whose chance is at least ``needed``, their cost in
    steps of the sequence.
    """
    plan, likely = _Plan(), 1.0
    while plan.length < room:
        likely *= chance(plan.length)
        if likely < needed:
            break
        plan.length += 1
        plan.gain += likely - needed
    return plan


def _always(share: float, _ahead: int) -> float:
    return share
