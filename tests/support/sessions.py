"""Chats for tests of the store: their turns, what is known of them, and a bucket that several daemons share."""

from typing import Any

import pytest

from kvstore import session_record as records
from kvstore import wire
from kvstore.core.key import join_keys
from kvstore.core.outcome import TierKind
from kvstore.store.engines import Engine
from tests.support.chats import Prefix, namespace
from tests.support.memory import MemoryRecords
from tests.support.rig import Rig, memory

NAMESPACE = namespace()
NAME = records.record_name(("", NAMESPACE.digest(), "chat"))


class Bucket:
    """What several daemons share."""

    def __init__(self) -> None:
        self.tier = memory(TierKind.S3)
        self.records = MemoryRecords()

    def options(self) -> dict[str, Any]:
        return {"s3": self.tier, "s3_records": self.records}

    def revision(self, name: str = NAME) -> int | None:
        found = self.records.records.get(name)
        record = None if found is None else records.decode(found.data)
        return None if record is None else record.revision


def put(
    num_blocks: int = 2, revision: int = 0, session_id: str = "chat", seed: int = 1, **changes: Any
) -> wire.SessionPut:
    prefix = Prefix(NAMESPACE, seed, num_blocks)
    fields: dict[str, Any] = {
        "id": session_id,
        "tenant": "",
        "namespace": NAMESPACE.digest(),
        "revision": revision,
        "messages": [wire.ChatMessage("user", f"said {seed}", prefix.tokens)],
        "keys": join_keys(prefix.keys),
    }
    return wire.SessionPut(**(fields | changes))


def turn(rig: Rig, engine: Engine, num_blocks: int, revision: int = 0, seed: int = 1) -> wire.SessionSaved:
    """Store the blocks of a turn and record it."""
    rig.put(engine, NAMESPACE, Prefix(NAMESPACE, seed, num_blocks).keys)
    return rig.store.session_put(engine, put(num_blocks, revision, seed=seed))


def turn_on_disk(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Record a turn of two blocks whose text is in memory no more: another session's has taken its room."""
    monkeypatch.setattr("kvstore.store.session._MAX_CACHED_BYTES", 100)
    engine = rig.attach(NAMESPACE)
    turn(rig, engine, 2)
    rig.settle()
    rig.store.session_put(engine, put(2, session_id="another", seed=3))
    rig.settle()
    assert rig.store._session_table.cached(("", NAMESPACE.digest(), "chat")) is None
    return engine


def get(rig: Rig, session_id: str = "chat", digest: bytes = NAMESPACE.digest(), tenant: str = "") -> wire.Message:
    replies: list[wire.Message] = []
    rig.store.sessions.get(wire.SessionGet(session_id, tenant, digest), replies.append)
    rig.settle()
    (answer,) = replies
    return answer


def view(rig: Rig, session_id: str = "chat") -> wire.SessionView:
    answer = get(rig, session_id)
    assert isinstance(answer, wire.SessionFound), answer
    return answer.session


def ids(rig: Rig) -> set[str]:
    return {view.id for view in rig.store.sessions.list(wire.SessionList()).sessions}


def delete(rig: Rig, session_id: str = "chat") -> list[wire.Message]:
    replies: list[wire.Message] = []
    rig.store.sessions.delete(wire.SessionDelete(session_id, "", NAMESPACE.digest()), replies.append)
    return replies


def pin(rig: Rig, pinned: bool) -> list[wire.Message]:
    replies: list[wire.Message] = []
    rig.store.sessions.pin(wire.SessionPin("chat", pinned, "", NAMESPACE.digest()), replies.append)
    return replies
