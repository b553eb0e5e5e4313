"""Responses that can be read again and continued, in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

MAX_BYTES = 64 * 2**20

Item = dict[str, Any]


@dataclass(eq=False)
class Stored:
    """A response, and every item of the conversation before it. ``size``: bytes of both as JSON."""

    response: dict[str, Any]
    items: list[Item]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(msgspec.json.encode((self.response, self.items)))

    @property
    def conversation(self) -> list[Item]:
        """What a response that continues this one begins with."""
        output: list[Item] = self.response["output"]
        return [*self.items, *output]


class ResponseStore:
    """Stored responses of each owner (a key). Other owners cannot see them.

    At most ``limit`` bytes are kept. When there are more, the owner who holds most loses what has not been
    used for the longest time. Each response holds its whole conversation, so it can be continued whatever
    became of those before it. A restart forgets all.
    """

    def __init__(self, limit: int = MAX_BYTES) -> None:
        self._limit = limit
        self._owners: dict[str, dict[str, Stored]] = {}  # least recently used first
        self._sizes: dict[str, int] = {}
        self._places: dict[str, Stored] = {}  # by ids of output items

    def add(self, owner: str, stored: Stored) -> None:
        """Keep a response under its ``id``, if it is not larger than the whole store."""
        if stored.size > self._limit:
            return
        self._owners.setdefault(owner, {})[stored.response["id"]] = stored
        self._sizes[owner] = self._sizes.get(owner, 0) + stored.size
        self._places.update((item["id"], stored) for item in stored.response["output"])
        while sum(self._sizes.values()) > self._limit:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self.delete(largest, next(iter(self._owners[largest])))

    def get(self, owner: str, id: str) -> Stored | None:
        """A response; using it keeps it longer."""
        mine = self._owners.get(owner, {})
        stored = mine.pop(id, None)
        if stored is not None:
            mine[id] = stored
        return stored

    def delete(self, owner: str, id: str) -> bool:
        """Forget a response; False if it is not there."""
        mine = self._owners.get(owner, {})
        stored = mine.pop(id, None)
        if stored is None:
            return False
        self._sizes[owner] -= stored.size
        for item in stored.response["output"]:
            del self._places[item["id"]]
        if not mine:
            del self._owners[owner], self._sizes[owner]
        return True

    def item(self, owner: str, id: str) -> Item | None:
        """An output item of any of the owner's responses."""
        stored = self._places.get(id)
        if stored is None or stored.response["id"] not in self._owners.get(owner, {}):
            return None
        output: list[Item] = stored.response["output"]
        return next(item for item in output if item["id"] == id)
