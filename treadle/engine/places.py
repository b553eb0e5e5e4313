"""Slots and KV blocks: which sequences have them, which wait, and who has to give way.

- Requests wait in order of (priority, service of their user, arrival). Prompts that begin like one being read
  wait until those blocks are in the prefix cache, and equal ones until the rest can be copied
  (treadle.engine.kv.tails), so that ``n`` answers cost one prefill.
- A request gets a slot when there are blocks for its whole prompt. If there are none, it may displace others
  of worse priority, or of a user who runs at least two more than its own.
- What is on disk of a prompt (treadle.engine.kv.spill) is loaded before it is read.
- Who is displaced gives its blocks back, waits, and is recomputed from what the prefix cache kept of them.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable
from operator import attrgetter

from treadle.engine.interfaces import StepRunner
from treadle.engine.kv.pool import BLOCK, BlockPool, blocks_for
from treadle.engine.kv.prefix import PrefixCache
from treadle.engine.kv.spill import Spill
from treadle.engine.kv.tails import Tails
from treadle.engine.sequence import Sequence, User

_ORDER = attrgetter("order")
_LOOKAHEAD = 32  # waiting requests per user that are looked at for one that need not wait for a prefix


class Places:
    """Gives sequences a slot and blocks, and keeps the runner's block tables in step."""

    def __init__(self, runner: StepRunner, clock: Callable[[], float], spill: Spill | None) -> None:
        self._tables = runner.tables
        self._copy_block = runner.copy_block
        self._clock = clock
        self._spill = spill
        self._pool = BlockPool(runner.num_blocks)
        self.cache = PrefixCache(self._pool)
        self.running: list[Sequence] = []  # in order; each has a slot
        self.users: dict[str, User] = {}
        self.waiting = 0
        self.preemptions = 0
        self._reading: set[bytes] = set()  # names of blocks that running prompts will put into the cache
        self._tails = Tails()
        self._slots = list(range(runner.max_sequences - 1, -1, -1))

    def join(self, name: str) -> User:
        """The fairness group of one more request. A new one starts level with the others: having been away
        earns no credit.
        """
        user = self.users.get(name)
        if user is None:
            user = User(min((other.service for other in self.users.values()), default=0.0))
            self.users[name] = user
        user.inside += 1
        return user

    def wait(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn."""
        insort(sequence.user.waiting, sequence, key=_ORDER)
        self.waiting += 1

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, wherever it is, and free what it holds."""
        if sequence.slot >= 0:
            self._leave_slot(sequence)
        else:
            sequence.user.waiting.remove(sequence)
            self.waiting -= 1
        sequence.user.inside -= 1
        if not sequence.user.inside:
            del self.users[sequence.request.user]

    def admit(self) -> None:
        """Give slots to those whose turn it is."""
        while self.waiting and (self._slots or self._may_displace()):
            candidate = self._next_waiting()
            if candidate is None:
                return
            sequence, matched = candidate
            if not self._make_room(sequence, matched):
                return
            self._start(sequence, matched)

    def _next_waiting(self) -> tuple[Sequence, list[int]] | None:
        """The first request that need not wait for a prefix being read, and its blocks in the prefix
        cache.
        """
        best: tuple[tuple[int, float, int], Sequence, list[int]] | None = None
        for user in self.users.values():
            for sequence in user.waiting[:_LOOKAHEAD]:
                key = (sequence.order[0], user.service, sequence.order[1])
                if best is not None and best[0] < key:
                    break
                sequence.hash_until(len(sequence.tokens) // BLOCK)
                limit = (len(sequence.tokens) - 1) // BLOCK  # the last token must run: it gives the logits
                matched = self.cache.match(sequence.hashes, limit)
                if not self._is_being_read(sequence, len(matched), limit):
                    best = (key, sequence, matched)
                    break
        return best and best[1:]

    def _is_being_read(self, sequence: Sequence, matched: int, limit: int) -> bool:
        """Whether a running prompt reads what comes after so many blocks of this one."""
        if matched == sequence.tail_block and self._tails.being_read(sequence):
            return True
        return matched < limit and sequence.hashes[matched] in self._reading

    def _may_displace(self) -> bool:
        worst = self.running[-1].order[0]
        most = max(user.running for user in self.users.values())
        return any(
            user.waiting and (user.waiting[0].order[0] < worst or user.running + 2 <= most)
            for user in self.users.values()
        )

    def _make_room(self, sequence: Sequence, matched: list[int]) -> bool:
        """See that there are a slot and blocks for the whole prompt, displacing others if that is fair."""
        if not self.running:
            return True
        slots = len(self._slots)
        blocks = self.cache.available - self.cache.count_idle(matched)
        blocks -= self._growth(sequence) - len(matched) + sum(map(self._growth, self.running))
        kept = set(matched)
        victims: list[Sequence] = []
        left = {user: user.running for user in self.users.values()}
        for other in reversed(self.running):
            if slots and blocks >= 0:
                break
            worse = other.order[0] > sequence.order[0]
            equal = other.order[0] == sequence.order[0]
            if worse or (equal and left[other.user] >= left[sequence.user] + 2):
                victims.append(other)
                left[other.user] -= 1
                slots += 1
                blocks += self._growth(other)
                blocks += sum(self._pool.refs[block] == 1 for block in other.blocks if block not in kept)
        if not slots or blocks < 0:
            return False
        for victim in victims:
            self.preempt(victim)
        return True

    @staticmethod
    def _growth(sequence: Sequence) -> int:
        """Blocks that the sequence still needs for its prompt and one more block of output, at most its
        limit.
        """
        return blocks_for(min(len(sequence.tokens) + BLOCK, sequence.limit)) - len(sequence.blocks)

    def _start(self, sequence: Sequence, matched: list[int]) -> None:
        self.cache.hold(matched)
        sequence.slot = self._slots.pop()
        sequence.blocks = matched.copy()
        sequence.registered = len(matched)
        sequence.computed = len(matched) * BLOCK
        self._tables[sequence.slot, : len(matched)] = matched
        self._reading.update(sequence.hashes[len(matched) :])
        self._copy_tail(sequence)
        if sequence.cached is None:
            sequence.cached = sequence.computed
            sequence.scheduled = self._clock()
        sequence.user.waiting.remove(sequence)
        self.waiting -= 1
        sequence.user.running += 1
        insort(self.running, sequence, key=_ORDER)
        if self._spill is not None:
            since = self._since(sequence)
            self._spill.used(sequence.hashes, since)
            for i, block in enumerate(matched):
                self._spill.store(sequence.hashes[i], i, block, since)
            sequence.restoring = self._on_disk(sequence)

    def _copy_tail(self, sequence: Sequence) -> None:
        """Take the rest of the prompt, all but its last token, from a running sequence that has read it."""
        source = self._tails.source(sequence)
        if source is not None and len(sequence.blocks) == sequence.tail_block:
            self._extend(sequence)
            self._copy_block(source, sequence.blocks[-1])
            sequence.computed = sequence.tail_end
        self._tails.add(sequence)

    def _since(self, sequence: Sequence) -> float:
        """When the sequence was first scheduled, as time.time says it."""
        return time.time() - (self._clock() - sequence.scheduled)

    def _on_disk(self, sequence: Sequence) -> bool:
        """Whether the block that the sequence needs next is on disk, and is not needed for logits."""
        i = len(sequence.blocks)
        limit = (len(sequence.tokens) - 1) // BLOCK
        return self._spill is not None and i < limit and sequence.hashes[i] in self._spill

    def restore(self, seconds: float) -> None:
        """Load what is on disk of prompts: all of it, or for that long if others are running."""
        restoring = [sequence for sequence in self.running if sequence.restoring]
        end = self._clock() + seconds if len(restoring) < len(self.running) else None
        for sequence in restoring:
            while sequence.restoring and (end is None or self._clock() < end):
                sequence.restoring = self._load_block(sequence) and self._on_disk(sequence)

    def _load_block(self, sequence: Sequence) -> bool:
        """Load the next block of a prompt, unless the prefix cache has it by now."""
        assert self._spill is not None
        if not self.cache.available:
            return False
        i = len(sequence.blocks)
        name = sequence.hashes[i]
        known = self.cache.match([name], 1)
        if known:
            self.cache.hold(known)
            block = known[0]
        else:
            block = self.cache.allocate()
            if not self._spill.load(name, block):
                self.cache.release([block])
                self._spill.forget(sequence.hashes[i:])
                return False
            self.cache.register(name, sequence.parent_hash(i), block)
        self._tables[sequence.slot, i] = block
        sequence.blocks.append(block)
        sequence.registered = i + 1
        sequence.computed = sequence.registered * BLOCK
        if not sequence.first_token:
            sequence.cached = max(sequence.cached or 0, sequence.computed)
        self._reading.discard(name)
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Take slot and blocks away; the sequence waits and is recomputed."""
        self._leave_slot(sequence)
        self.wait(sequence)
        self.preemptions += 1

    def _leave_slot(self, sequence: Sequence) -> None:
        self._tails.remove(sequence)
        self.cache.release(sequence.blocks)
        self._reading.difference_update(sequence.hashes[sequence.registered :])
        self.running.remove(sequence)
        sequence.user.running -= 1
        self._slots.append(sequence.slot)
        sequence.slot = -1
        sequence.blocks = []
        sequence.registered = sequence.computed = 0
        sequence.restoring = False

    def reserve(self, sequence: Sequence, tokens: int) -> int:
        """Take blocks for that many more tokens; returns for how many there are some."""
        while len(sequence.blocks) * BLOCK < sequence.computed + tokens:
            if not self.cache.available:
                return len(sequence.blocks) * BLOCK - sequence.computed
            self._extend(sequence)
        return tokens

    def _extend(self, sequence: Sequence) -> None:
        block = self.cache.allocate()
        self._tables[sequence.slot, len(sequence.blocks)] = block
        sequence.blocks.append(block)

    def register(self, sequence: Sequence) -> None:
        """Put the blocks that this step has filled into the prefix cache."""
        full = sequence.computed // BLOCK
        sequence.hash_until(full)
        for i in range(sequence.registered, full):
            name = sequence.hashes[i]
            self._reading.discard(name)
            block = self.cache.register(name, sequence.parent_hash(i), sequence.blocks[i])
            if block != sequence.blocks[i]:
                sequence.blocks[i] = block
                self._tables[sequence.slot, i] = block
            if self._spill is not None:
                self._spill.store(name, i, block, self._since(sequence))
        sequence.registered = full

    def check(self) -> None:
        """Raise AssertionError unless blocks, tables, slots and queues add up."""
        self.cache.check(sequence.blocks for sequence in self.running)
        assert self.running == sorted(self.running, key=_ORDER), "running sequences are out of order"
        taken = [sequence.slot for sequence in self.running]
        assert sorted(taken + self._slots) == list(range(len(self._tables))), "slots are lost or shared"
        waiting = {s for user in self.users.values() for s in user.waiting}
        assert len(waiting) == self.waiting, "a waiting request is lost"
        assert waiting.isdisjoint(self.running), "a request both runs and waits"
        inside = sum(user.inside for user in self.users.values())
        assert inside == len(self.running) + self.waiting, "users and requests differ"
        due = {name for s in self.running for name in s.hashes[s.registered :]}
        assert self._reading <= due, "a prefix is awaited that nobody reads"
        self._tails.check(self.running)
        for s in self.running:
            row = self._tables[s.slot, : len(s.blocks)].tolist()
            assert row == s.blocks, f"the block table of request {s.request.id} differs from its blocks"
