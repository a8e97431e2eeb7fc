"""The messages between the control thread and the worker process of a slow tier.

One ZMQ PAIR per worker, one msgpack list of operations or results per message. Payloads lie in the shared region;
an operation names their place. Every operation is answered by exactly one Result with its number, a Recover by
Recovered ones that end with `done`, each but the last answered by a Continue so that few are ever under way.
"""

import msgspec
import numpy as np

from kvstore.core.block import BlockMeta
from kvstore.core.key import BlockKey
from kvstore.wire import ScrubReport
from tiers.base import RecoveredBatch


class PackedMeta(msgspec.Struct, frozen=True, array_like=True):
    """A BlockMeta in a message."""

    key: bytes
    parent: bytes
    namespace: bytes
    depth: int
    payload_bytes: int

    @classmethod
    def pack(cls, meta: BlockMeta) -> "PackedMeta":
        return cls(meta.key, meta.parent, meta.namespace, meta.depth, meta.payload_bytes)

    def unpack(self) -> BlockMeta:
        return BlockMeta(BlockKey(self.key), BlockKey(self.parent), self.namespace, self.depth, self.payload_bytes)


class Read(msgspec.Struct, frozen=True, tag=True):
    """Copy the block from the tier into the slot at `offset`."""

    op: int
    meta: PackedMeta
    offset: int


class Write(msgspec.Struct, frozen=True, tag=True):
    """Copy the slot at `offset` to the tier. `may_exist`: ask the tier first, since it may well hold the block."""

    op: int
    meta: PackedMeta
    offset: int
    may_exist: bool = False


class Delete(msgspec.Struct, frozen=True, tag=True):
    op: int
    key: bytes


class RecordPut(msgspec.Struct, frozen=True, tag=True):
    op: int
    name: str
    data: bytes
    if_match: str | None = None
    if_absent: bool = False


class RecordGet(msgspec.Struct, frozen=True, tag=True):
    op: int
    name: str


class RecordDelete(msgspec.Struct, frozen=True, tag=True):
    op: int
    name: str


class Discover(msgspec.Struct, frozen=True, tag=True):
    """How many of the leading blocks (joined keys of consecutive ones) the tier holds: bucket/prefix_search.py."""

    op: int
    keys: bytes


class Recover(msgspec.Struct, frozen=True, tag=True):
    """Answer with everything that is there from before, blocks and, under `prefix`, records."""

    op: int
    prefix: str


class Continue(msgspec.Struct, frozen=True, tag=True):
    """A Recovered message has been taken in; one more may come."""


class Scrub(msgspec.Struct, frozen=True, tag=True):
    """Walk over everything in the tier. Answered by Scrubbed ones and, in the end, one Result: OK, CANCELLED or
    UNAVAILABLE."""

    op: int
    repair: bool
    drop_wrong_key: bool


class CancelScrub(msgspec.Struct, frozen=True, tag=True):
    """End the walk that is under way, if there is one."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Finish what has begun, close the tier and exit."""


Op = (
    Read
    | Write
    | Delete
    | RecordPut
    | RecordGet
    | RecordDelete
    | Discover
    | Recover
    | Continue
    | Scrub
    | CancelScrub
    | Stop
)


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The tier is open."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The tier cannot be opened; the worker exits. `fatal`: the settings are wrong, trying again is of no use."""

    message: str
    fatal: bool


class Result(msgspec.Struct, frozen=True, tag=True):
    """`outcome` is an Outcome. For records: OK with `data` and `etag`, MISS, or EXISTS where a condition did not hold.
    `count` answers a Discover that is OK. `seconds` is the time the tier itself took."""

    op: int
    outcome: int
    data: bytes = b""
    etag: str = ""
    seconds: float = 0.0
    count: int = 0


class PackedBatch(msgspec.Struct, frozen=True, array_like=True):
    """A RecoveredBatch in a message; `depths` are int32 as they lie in memory."""

    namespace: bytes
    payload_bytes: int
    keys: bytes
    parents: bytes
    depths: bytes

    @classmethod
    def pack(cls, batch: RecoveredBatch) -> "PackedBatch":
        return cls(batch.namespace, batch.payload_bytes, batch.keys, batch.parents, batch.depths.tobytes())

    def unpack(self) -> RecoveredBatch:
        depths = np.frombuffer(self.depths, dtype=np.int32)
        return RecoveredBatch(self.namespace, self.payload_bytes, self.keys, self.parents, depths)


class Recovered(msgspec.Struct, frozen=True, tag=True):
    op: int
    blocks: PackedBatch | None = None
    records: list[bytes] = []
    done: bool = False


class Scrubbed(msgspec.Struct, frozen=True, tag=True):
    """How far a walk is. `lost` are the joined keys of blocks that it has removed since the last one."""

    op: int
    report: ScrubReport
    lost: bytes = b""


class Level(msgspec.Struct, frozen=True, tag=True):
    """How full the tier is, and its faults so far by kind; sent after every batch that may have changed it. `reason`
    says to people why the state is not ok, where that is known."""

    blocks: int
    used_bytes: int
    capacity_bytes: int | None
    faults: dict[str, int]
    state: str = "ok"
    reason: str = ""


class Tombstones(msgspec.Struct, frozen=True, tag=True):
    """Sessions that were deleted (bucket/tombstone.py); each is told once in a worker's life, or more."""

    records: list[bytes]


class BucketLevel(msgspec.Struct, frozen=True, tag=True):
    """What keeping the bucket in order has come to. `has_lease`: this daemon does it. `num_blocks` and `num_bytes` are
    those of the last whole sweep, `swept_s` when that ended (0: never) and `sweep_took_s` how long it took;
    `num_sessions` as last read. `deleted` counts by reason since the worker started. `waits`: why it is not done."""

    has_lease: bool = False
    num_blocks: int = 0
    num_bytes: int = 0
    num_sessions: int = 0
    swept_s: float = 0.0
    sweep_took_s: float = 0.0
    deleted: dict[str, int] = msgspec.field(default_factory=dict)
    waits: str = ""


Reply = Tombstones | BucketLevel | Ready | Failed | Result | Recovered | Scrubbed | Level

encoder = msgspec.msgpack.Encoder()
op_decoder: msgspec.msgpack.Decoder[list[Op]] = msgspec.msgpack.Decoder(list[Op])
reply_decoder: msgspec.msgpack.Decoder[list[Reply]] = msgspec.msgpack.Decoder(list[Reply])
