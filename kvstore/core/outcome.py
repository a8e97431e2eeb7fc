"""The words for places and for results: which tier, and what became of one block in one call."""

from enum import IntEnum


class TierKind(IntEnum):
    """Where a copy of a block lies, fastest first; the numbers are part of the wire protocol."""

    HBM = 0
    RAM = 1
    SSD = 2
    S3 = 3

    @property
    def label(self) -> str:
        return self.name.lower()


class Outcome(IntEnum):
    """What became of one block in one call; the numbers are part of the wire protocol.

    Only OK means that the bytes are where they were asked to be. EXISTS means that an equal copy was
    already there. Every other value means that the caller goes on without the block.
    """

    OK = 0
    EXISTS = 1  # a store found the block there already: nothing to copy
    MISS = 2  # known not to be there
    PENDING = 3  # somebody is writing it now; it may appear soon
    UNKNOWN = 4  # the tier has not been asked
    BUSY = 5  # a queue or every slot is taken for now; worth another try later
    FULL = 6  # no room can be made, or it was left out by policy
    STALE = 7  # the slot, lease or epoch is an older one; the bytes may be anyone's
    CORRUPT = 8  # found, failed verification, quarantined
    TIMED_OUT = 9  # the deadline passed first
    UNAVAILABLE = 10  # the tier is down
    CANCELLED = 11  # the caller took the request back
    REJECTED = 12  # the request for this block made no sense (wrong length, unknown parent)

    @property
    def label(self) -> str:
        return self.name.lower()
