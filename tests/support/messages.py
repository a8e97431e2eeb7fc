"""A sample of every message of the wire protocol, and what may become of one on the way."""

import random

import msgspec

from kvstore import wire
from kvstore.core.key import join_keys
from kvstore.core.outcome import TierKind
from tests.support.chats import Prefix, namespace
from tests.support.decisions import decision, decision_view

NAMESPACE = namespace()
PREFIX = Prefix(NAMESPACE, 1, 4)
KEYS = join_keys(PREFIX.keys)
SPEC = wire.NamespaceSpec(NAMESPACE.digest(), NAMESPACE.root(), "model", 4, 8192)
MESSAGE = wire.ChatMessage("user", "héllo \U0001f642", PREFIX.tokens)
VIEW = wire.SessionView(
    "chat", "", "ab" * 32, "model", 3, [MESSAGE], 1, 16, 4, "ssd", False, 1.5, 2.5, None, "forked from"
)
SLOT = wire.Slot(3, 0, 1 << 40, 1 << 60, 2)

# At least one of each class; the first of a class is one that an attached engine may send.
REQUESTS: list[wire.Message] = [
    wire.Ping(),
    wire.Attach(SPEC, "file", "name"),
    wire.Detach(),
    wire.Lookup(KEYS),
    wire.Fetch(KEYS, 1.5),
    wire.Release(7),
    wire.Release(7, [1, 2], 3),
    wire.Store(KEYS, NAMESPACE.root(), 0),
    wire.Commit(KEYS, [1, 2, 3, 1 << 60], [True, False, True, True]),
    wire.Report("r", 100, 10, 20, 30, 0, 40, {"evicted": 40}, "load", 0.5, 1.5),
    wire.Report("q", 200, 48, 48, 0, 16, 88, {"plan": 80}, "interval", 0.6, 2.0, "tenant", decision("q")),
    wire.Observe({"unknown_session": 2}),
    wire.DecisionGet("r"),
    wire.DecisionList(None, 10),
    wire.SessionGet("chat", "", NAMESPACE.digest(), 0.5),
    wire.SessionPut("chat", "", NAMESPACE.digest(), 0, [MESSAGE], KEYS, False, 60.0, True),
    wire.SessionList(None, 10),
    wire.SessionPin("chat", True, "", NAMESPACE.digest()),
    wire.SessionPrefetch("chat", "", NAMESPACE.digest()),
    wire.SessionHint("chat", "", NAMESPACE.digest(), False, True, 1, 60.0),
    wire.Hint(b"k" * 64, True, False, -1, 5.0, 60.0, "why"),
    wire.Damaged(b"k" * 64, int(TierKind.SSD)),
    wire.SessionDelete("chat", "", NAMESPACE.digest()),
    wire.Evict(["ram"], False),
    wire.Verify(["ssd"], True, False),
    wire.VerifyStatus(),
    wire.VerifyCancel(),
    wire.Stats(),
]
REPLIES: list[wire.Message] = [
    wire.Prefetching(3, 5),
    wire.Pong(1 << 62),
    wire.Attached(1, 2, "/dev/shm/x", 1 << 33, ["ram", "ssd"]),
    wire.Done(),
    wire.Error("malformed", "why"),
    wire.Found(b"\1\2", 2, "evicted", 4),
    wire.Landed(7, [SLOT, wire.Slot(0, 9)], False),
    wire.Granted([SLOT], 0.05),
    wire.Committed(b"\0\7"),
    wire.Decisions([msgspec.msgpack.encode(decision_view("q"))], 3),
    wire.SessionFound(VIEW),
    wire.SessionSaved("chat~1", 1, True),
    wire.Sessions([VIEW], 1),
    wire.SessionDeleted(3, 4),
    wire.Evicted({"ram": 3}, {"ram": 0}),
    wire.VerifyReport(
        True,
        {"ssd": wire.ScrubReport({"blocks": {"ok": 3}}, [wire.ScrubFinding("corrupt", "blocks", "ab", "why", True)])},
    ),
    wire.StatsReply({"tiers": {"ram": {"blocks": 3, "hit": None, "p50": 0.5}}, "list": [1, "a"]}),
]


def name(message: object) -> str:
    return type(message).__name__


def mutate(frame: bytes, seed: int) -> bytes:
    choice = random.Random(seed)
    data = bytearray(frame)
    for _ in range(choice.randint(1, 4)):
        position = choice.randrange(len(data) + 1)
        match choice.randrange(4):
            case 0 if data:
                data[position % len(data)] = choice.randrange(256)
            case 1:
                data[position:position] = choice.randbytes(choice.randint(1, 5))
            case 2:
                del data[position : position + choice.randint(1, 5)]
            case _:
                data = data[:position] or bytearray(b"\x80")
    return bytes(data)
