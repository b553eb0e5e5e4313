"""What simulated users say: lengths, prompts, shared beginnings, conversations of several turns."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from treadle.core import TreadleError

# Frequent words: one or two tokens each in any vocabulary, so lengths can be steered.
_FREQUENT = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point home
water room mother area money story fact month lot right study book eye job word business issue side kind
head house service friend father power hour game line end member law car city community name president
team minute idea kid body information back parent face others level office door health person art war
history party result change morning reason research girl guy moment air teacher force education foot boy
age policy music market sense nation plan college interest death experience effect use class control
field development role effort rate heart drug show leader light voice wife police mind price report
decision son view relationship town road arm truth
"""
_WORDS = _FREQUENT.split()


@dataclass(frozen=True)
class Length:
    """Token counts: ``256``, ``30-60`` (uniform) or ``lognormal:200,0.8`` (median, sigma)."""

    kind: str
    first: float
    second: float

    @staticmethod
    def parse(text: str) -> Length:
        """Raises TreadleError with the three forms."""
        if re.fullmatch(r"[1-9]\d*", text):
            return Length("uniform", int(text), int(text))
        if match := re.fullmatch(r"([1-9]\d*)-([1-9]\d*)", text):
            low, high = int(match[1]), int(match[2])
            if low <= high:
                return Length("uniform", low, high)
        if match := re.fullmatch(r"lognormal:([1-9]\d*),(\d+\.?\d*)", text):
            return Length("lognormal", int(match[1]), float(match[2]))
        raise TreadleError(f"{text!r} is no length; write 256, 30-60 or lognormal:200,0.8 (median, sigma)")

    def draw(self, rng: random.Random) -> int:
        """A length of at least 1 token; the lognormal one is cut at 20 times its median."""
        if self.kind == "uniform":
            return rng.randint(int(self.first), int(self.second))
        return max(1, min(round(self.first * rng.lognormvariate(0, self.second)), round(20 * self.first)))


@dataclass(frozen=True)
class Workload:
    """What one user does. Token counts of prompts are approximate: a server's tokenizer decides."""

    prompt: Length
    answer: Length
    shared_prefix: int = 0  # tokens of a system message that all requests begin with
    turns: int = 1  # questions per conversation; the history is sent again with each
    temperature: float = 0.0
    ignore_eos: bool = True  # answers get exactly the length drawn, on servers that know the parameter
    seed: int = 1


@dataclass(frozen=True)
class TokensPerWord:
    """tokens of a message = per_word * words + fixed, measured on the server."""

    per_word: float = 1.3
    fixed: float = 8.0

    def words(self, tokens: int) -> int:
        """How many words give about ``tokens`` prompt tokens; at least one."""
        return max(1, round((tokens - self.fixed) / self.per_word))


def words(count: int, rng: random.Random) -> str:
    """``count`` random words."""
    return " ".join(rng.choices(_WORDS, k=count))


def shared_message(workload: Workload, rate: TokensPerWord) -> list[dict[str, str]]:
    """The system message that all requests of this workload share, or nothing."""
    if not workload.shared_prefix:
        return []
    text = words(rate.words(workload.shared_prefix), random.Random(workload.seed))
    return [{"role": "system", "content": text}]
