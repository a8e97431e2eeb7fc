"""A client that answers from memory, for what talks to the daemon as a console: the HTTP API and the commands."""

from typing import Any

from kvstore import wire
from kvstore.core.errors import KVStoreError, ProtocolError
from kvstore.wire import ErrorCode

SNAPSHOT: dict[str, Any] = {
    "daemon": {"version": "0.1.0", "epoch": 7, "uptime_s": 61.4, "engines": 1, "tiers": ["ram", "ssd"]},
    "tiers": {
        "hbm": {"hit_tokens": 100},
        "ram": {
            "state": "ok",
            "blocks": 12,
            "used_bytes": 3 << 20,
            "capacity_bytes": 1 << 30,
            "hit_tokens": 250,
            "bytes_in": 5 << 20,
            "bytes_out": 2 << 20,
            "evicted_blocks": 3,
            "queue": 0,
        },
        "s3": {
            "state": "down",
            "admission": {"admitted": 5, "refused": 6},
            "reason": "no route to the bucket",
            "blocks": 0,
            "used_bytes": 0,
            "capacity_bytes": None,
            "hit_tokens": 0,
            "bucket": {
                "has_lease": True,
                "blocks": 5,
                "bytes": 7 << 20,
                "sessions": 2,
                "swept_s": 1_060.0,
                "sweep_took_s": 0.5,
                "deleted": {"orphan_blocks": 3},
                "waits": "",
            },
        },
    },
    "requests": {
        "count": 4,
        "prompt_tokens": 1000,
        "hit_tokens": {"hbm": 100, "ram": 250, "ssd": 0, "s3": 0},
        "recomputed_tokens": 650,
        "miss_tokens": {"evicted": 50, "never_stored": 600},
        "plans": {"fetch": 3, "recompute": 1},
        "saved_prefill_s": 1.25,
        "ttft_s": {"sum": 2.5, "recent_p50": 0.25, "recent_p99": 1.5},
        "decisions": {
            "chosen": {"load_all": 2, "two_ended": 1},
            "why": {"latency": 2, "not_measured": 1},
            "judged": 3,
            "lost_s": 0.125,
        },
    },
    "errors": {"corrupt": 2},
    "events": {"published_changes": 9, "dropped_changes": 1, "sequence": 4, "walks": 1},
    "sessions": {"count": 2, "pinned": 1, "durable": {"none": 0, "ssd": 2, "s3": 0}},
    "prefetch": {"predicted": 2, "begun_blocks": 9, "useful_blocks": 7, "wasted_blocks": 2, "held_bytes": 4096},
    "pins": {"owners": 1, "refused": 3, "ram_bytes": 8192, "ssd_bytes": 16384},
    "discovery": {"unknown_lookups": 9, "found_blocks": 4},
    "store": {"blocks_stored": 12, "refused": {"full": 1}},
}


def session(session_id: str = "chat-1", **changes: Any) -> wire.SessionView:
    """A session of two messages."""
    fields: dict[str, Any] = {
        "id": session_id,
        "tenant": "",
        "namespace": "ab" * 32,
        "model": "model",
        "revision": 1,
        "messages": [wire.ChatMessage("user", "a secret", [1, 2, 3]), wire.ChatMessage("assistant", "hush", [4])],
        "num_messages": 2,
        "num_tokens": 4,
        "num_blocks": 0,
        "durable": "ssd",
        "pinned": False,
        "created_s": 1_000.0,
        "last_turn_s": 1_060.0,
        "expires_s": None,
        "forked_from": "",
    }
    return wire.SessionView(**(fields | changes))


class FakeClient:
    """Knows some sessions and one snapshot. With `fault` set, every call raises it."""

    def __init__(self, *sessions: wire.SessionView) -> None:
        self.sessions = {view.id: view for view in sessions}
        self.snapshot = SNAPSHOT
        self.decisions: list[wire.DecisionView] = []
        self.fault: KVStoreError | None = None
        self.calls: list[tuple[Any, ...]] = []
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def ping(self) -> float:
        self._called("ping")
        return 0.0001

    def stats(self) -> dict[str, Any]:
        self._called("stats")
        return self.snapshot

    def decision_get(self, request_id: str, tenant: str | None = None) -> wire.DecisionView:
        self._called("decision_get", request_id, tenant)
        for view in self.decisions:
            if view.id == request_id:
                return view
        raise ProtocolError(ErrorCode.NOT_FOUND, f"nothing is known of request {request_id!r}")

    def decision_list(self, tenant: str | None = None, limit: int = 1000) -> tuple[list[wire.DecisionView], int]:
        self._called("decision_list", tenant, limit)
        return self.decisions[:limit], len(self.decisions)

    def session_list(self, tenant: str | None = None, limit: int = 1000) -> wire.Sessions:
        self._called("session_list", tenant, limit)
        # As a daemon that forgot to leave the texts out.
        return wire.Sessions(list(self.sessions.values())[:limit], len(self.sessions))

    def session_get(
        self, session_id: str, tenant: str = "", deadline_s: float | None = None
    ) -> wire.SessionView | None:
        self._called("session_get", session_id, tenant)
        return self.sessions.get(session_id)

    def session_pin(self, session_id: str, pinned: bool, tenant: str = "", namespace: bytes = b"") -> None:
        self._called("session_pin", session_id, pinned, tenant)
        self._known(session_id)

    def session_hint(self, session_id: str, **said: Any) -> None:
        self._called("session_hint", session_id, said)
        self._known(session_id)

    def session_prefetch(self, session_id: str, tenant: str = "", namespace: bytes = b"") -> wire.Prefetching:
        self._called("session_prefetch", session_id, tenant)
        self._known(session_id)
        return wire.Prefetching(blocks_to_load=3, blocks=5)

    def session_delete(self, session_id: str, tenant: str = "", namespace: bytes = b"") -> wire.SessionDeleted:
        self._called("session_delete", session_id, tenant)
        self._known(session_id)
        del self.sessions[session_id]
        return wire.SessionDeleted(blocks_deleted=5, blocks_shared=2)

    def evict(self, tiers: list[str], drop: bool = False, deadline_s: float = 60.0) -> wire.Evicted:
        self._called("evict", tuple(tiers), drop)
        return wire.Evicted(dict.fromkeys(tiers, 3), dict.fromkeys(tiers, 1))

    def _called(self, *call: Any) -> None:
        self.calls.append(call)
        if self.fault is not None:
            raise self.fault

    def _known(self, session_id: str) -> None:
        if session_id not in self.sessions:
            raise ProtocolError(ErrorCode.NOT_FOUND, f"there is no session {session_id!r}")
