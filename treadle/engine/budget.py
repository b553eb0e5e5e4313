"""How many prompt tokens a step may carry besides its decodes, learned from measured step times."""

from __future__ import annotations

_PROBE_EVERY = 64  # mixed steps after which one step without prefill measures again what decoding alone costs
_SLOWDOWN = 1.8  # while prompts are read, running decodes slow down to at most this factor,
_LEAST_SLOWDOWN = 1.5  # and never less than this, so that prompts advance where the target is out of reach
_BURST = 2.0  # seconds of reading: as few prompts as this are read at the target, however fast decoding is
_LONGEST_STEP = 0.5  # seconds: a cancel or a short prompt waits no longer for a step that reads prompts only
_FIRST_CHUNK = 32  # prompt tokens of the first step of all, which tells how fast the machine is
_LEAST_CHUNK = 16  # a step of fewer prompt tokens is hardly faster: it reads all weights anyway
_WEIGHT = 0.25  # of a new measurement in the running means


class Budget:
    """Model: seconds of a step = decode time (by the number of decodes) + prompt tokens x seconds per
    prompt token.
    """

    def __init__(self, max_tokens: int, max_sequences: int, target_itl: float) -> None:
        """``target_itl``: seconds between two tokens of a running request that prefill should not exceed."""
        self._max_tokens = max_tokens
        self._target = target_itl
        sizes = self._size(max_sequences) + 1
        self._decode_s = [0.0] * sizes  # seconds of a step without prefill, by size of the number of decodes
        self._age = [_PROBE_EVERY] * sizes  # mixed steps since that was measured
        self._token_s = 0.0  # seconds per prompt token

    def prefill_tokens(self, decodes: int, waiting: int) -> int:
        """Prompt tokens that the next step should carry of the ``waiting`` ones; 0 to measure decoding alone
        once.
        """
        room = self._max_tokens - decodes
        if not decodes:
            if not self._token_s:
                return min(room, _FIRST_CHUNK)
            return min(room, max(_LEAST_CHUNK, int(_LONGEST_STEP / self._token_s)))
        size = self._size(decodes)
        if self._age[size] >= _PROBE_EVERY:
            return 0
        base = self._decode_s[size]
        allowed = max(self._target, _LEAST_SLOWDOWN * base)
        if waiting * self._token_s > _BURST:
            allowed = min(allowed, _SLOWDOWN * base)
        return max(1, min(room, int((allowed - base) / self._token_s))) if self._token_s else room

    def decode_seconds(self, decodes: int) -> float:
        """Measured seconds of a step without prefill; 0 if there was none yet."""
        return self._decode_s[self._size(decodes)]

    def record(self, decodes: int, prefill: int, seconds: float) -> None:
        """Learn from a step that carried ``decodes`` decodes and ``prefill`` prompt tokens."""
        size = self._size(decodes)
        if not prefill:
            fresh = self._age[size] >= _PROBE_EVERY and not self._decode_s[size]
            self._decode_s[size] += (1.0 if fresh else _WEIGHT) * (seconds - self._decode_s[size])
            self._age[size] = 0
            return
        base = self._decode_s[size] if decodes else 0.0
        per_token = max(seconds - base, 0.05 * seconds) / prefill
        # A step of few tokens says little about the cost of one: much of its time does not grow with them.
        weight = _WEIGHT * prefill / (prefill + 8) if self._token_s else 1.0
        self._token_s += weight * (per_token - self._token_s)
        if decodes:
            self._age[size] += 1

    @staticmethod
    def _size(decodes: int) -> int:
        """0, 1, 2, 3..4, 5..8, 9..16, ... decodes are measured together."""
        return (decodes - 1).bit_length() + 1 if decodes else 0
