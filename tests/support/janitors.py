"""A chain of blocks in a bucket that several daemons share: what is left of it, and time that passes for all."""

from kvstore.bucket import tombstone
from tests.support.chats import Prefix
from tests.support.rig import Rig
from tests.support.sessions import NAMESPACE, Bucket

KEYS = Prefix(NAMESPACE, 1, 10).keys


def stones(bucket: Bucket) -> list[tombstone.Tombstone]:
    found = [tombstone.decode(data.data) for name, data in bucket.records.records.items() if name.startswith("tomb")]
    return [stone for stone in found if stone is not None]


def in_bucket(bucket: Bucket) -> int:
    """How many of the chain's blocks, which must be its head."""
    there = [key in bucket.tier.blocks for key in KEYS]
    assert there == sorted(there, reverse=True)
    return sum(there)


def together(rigs: list[Rig], seconds: float) -> None:
    """Let that much time pass for all of them, side by side."""
    for _ in range(int(seconds)):
        for rig in rigs:
            rig.settle(seconds=1.0)
        latest = max(rig.clock.now for rig in rigs)
        for rig in rigs:
            rig.clock.now = latest
