"""Perplexity, and the Kullback-Leibler divergence from a reference, token by token.

Arithmetic is in float64, a few rows at a time. Standard errors treat tokens as independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from treadle.core import TreadleError
from treadle.evaluation.logits import Logits, LogitsWriter, Rows
from treadle.evaluation.windows import Text

Values = NDArray[np.float64]
Progress = Callable[[int, int], None]  # tokens done, tokens in total
PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)
_BLOCK = 16  # rows in float64: 20 MB with 152k tokens


class Estimate(msgspec.Struct, frozen=True):
    """A mean, or what follows from it, with its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ± {self.error:.2g}"


class Perplexity(msgspec.Struct, frozen=True, kw_only=True):
    """``perplexity`` is exp(``nll``), the mean negative log-likelihood per token in nats."""

    tokens: int  # predicted
    nll: Estimate
    perplexity: Estimate


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Of a model from a reference: mean over tokens of sum p_ref (log p_ref - log p), in nats."""

    tokens: int
    kl: Estimate
    percentiles: dict[str, float]  # of the KL per token
    top1: Estimate  # share of tokens at which both have the same most likely token
    perplexity: Estimate
    reference_perplexity: Estimate
    ratio: Estimate  # of the perplexities


def perplexity(
    text: Text, logits: Logits, save: LogitsWriter | None = None, progress: Progress | None = None
) -> Perplexity:
    """Read the text. Raises TreadleError when a logit is not finite."""
    losses: list[Values] = []
    for window in text.windows():
        done = 0
        for rows in logits.of(window):
            targets = window.targets[done : done + len(rows)]
            done += len(rows)
            losses.append(np.concatenate([_losses(p, t) for p, t in _blocks(targets, rows)]))
            if save is not None:
                save.add(targets, rows)
            _tell(progress, losses, text)
    nll = _mean(np.concatenate(losses))
    return Perplexity(tokens=text.scored, nll=nll, perplexity=_exp(nll))


def divergence(text: Text, logits: Logits, reference: Logits, progress: Progress | None = None) -> Divergence:
    """Read the text with both. Raises TreadleError when vocabularies differ, or a logit is not finite."""
    if logits.vocab != reference.vocab:
        raise TreadleError(
            f"the model gives {logits.vocab} logits and the reference {reference.vocab}; they must have the "
            "same vocabulary"
        )
    losses: list[Values] = []
    reference_losses: list[Values] = []
    distances: list[Values] = []
    same: list[Values] = []
    for window in text.windows():
        done = 0
        for rows, reference_rows in zip(logits.of(window), reference.of(window), strict=True):
            targets = window.targets[done : done + len(rows)]
            done += len(rows)
            both = zip(_blocks(targets, rows), _blocks(targets, reference_rows), strict=True)
            for (p, wanted), (q, _) in both:
                losses.append(_losses(p, wanted))
                reference_losses.append(_losses(q, wanted))
                distances.append((np.exp(q) * (q - p)).sum(1))
                same.append((p.argmax(1) == q.argmax(1)).astype(np.float64))
            _tell(progress, losses, text)
    loss, reference_loss = np.concatenate(losses), np.concatenate(reference_losses)
    kl = np.concatenate(distances)
    return Divergence(
        tokens=text.scored,
        kl=_mean(kl),
        percentiles={f"{p:g}": float(np.percentile(kl, p)) for p in PERCENTILES},
        top1=_mean(np.concatenate(same)),
        perplexity=_exp(_mean(loss)),
        reference_perplexity=_exp(_mean(reference_loss)),
        ratio=_exp(_mean(loss - reference_loss)),
    )


def _blocks(targets: NDArray[np.int32], rows: Rows) -> Iterator[tuple[Values, NDArray[np.int32]]]:
    """Log-probabilities [n, vocab] of a few rows at a time, with their targets [n]."""
    for begin in range(0, len(rows), _BLOCK):
        x = rows[begin : begin + _BLOCK].astype(np.float64)
        if not np.isfinite(x).all():
            raise TreadleError("some logits are not finite numbers; the weights or the logits are broken")
        x -= x.max(1, keepdims=True)
        x -= np.log(np.exp(x).sum(1, keepdims=True))
        yield x, targets[begin : begin + _BLOCK]


def _losses(log_probabilities: Values, targets: NDArray[np.int32]) -> Values:
    return -log_probabilities[np.arange(len(targets)), targets]


def _mean(values: Values) -> Estimate:
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Estimate(float(values.mean()), error)


def _exp(nll: Estimate) -> Estimate:
    value = math.exp(nll.value)
    return Estimate(value, value * nll.error)


def _tell(progress: Progress | None, losses: list[Values], text: Text) -> None:
    if progress is not None:
        progress(sum(map(len, losses)), text.scored)
