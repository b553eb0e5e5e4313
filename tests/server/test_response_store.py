"""What is kept of responses, and for whom."""

from __future__ import annotations

from treadle.server.responses.store import ResponseStore, Stored


def stored(id: str, text: str = "x" * 1000) -> Stored:
    output = {"id": "msg_" + id, "type": "message", "content": [{"type": "output_text", "text": text}]}
    return Stored({"id": id, "output": [output]}, [])


def kept(store: ResponseStore, owner: str, ids: str) -> str:
    return "".join(id for id in ids if store.get(owner, id) is not None)


def test_what_was_not_used_for_the_longest_time_goes_first() -> None:
    store = ResponseStore(limit=4 * stored("a").size)
    for id in "abcd":
        store.add("k", stored(id))
    assert store.get("k", "a") is not None
    store.add("k", stored("e"))
    assert kept(store, "k", "abcde") == "acde"
    assert store.item("k", "msg_b") is None
    assert store.item("k", "msg_a") is not None


def test_who_holds_most_loses_first() -> None:
    store = ResponseStore(limit=4 * stored("a").size)
    store.add("small", stored("s"))
    for id in "abcdef":
        store.add("large", stored(id))
    assert kept(store, "small", "s") == "s"
    assert kept(store, "large", "abcdef") == "def"


def test_a_response_larger_than_all_is_not_kept() -> None:
    store = ResponseStore(limit=2000)
    store.add("k", stored("a"))
    store.add("k", stored("b", "x" * 3000))
    assert kept(store, "k", "ab") == "a"


def test_deleted_responses_leave_nothing() -> None:
    store = ResponseStore(limit=2 * stored("a").size)
    for _ in range(10):
        store.add("k", stored("a"))
        assert store.item("other", "msg_a") is None
        assert not store.delete("other", "a")
        assert store.delete("k", "a")
        assert not store.delete("k", "a")
        assert store.item("k", "msg_a") is None
