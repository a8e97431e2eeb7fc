"""What the control thread tells the publisher's process: which blocks entered and left which tier.

Covers: the messages between the two. Does not cover: collecting them (kvstore/store/announcing.py), what routers read
(kvstore/events/vllm_format.py).
"""

import msgspec


class Change(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A block has a readable copy in `tier` (a TierKind) from now on, or has none there any more.

    `name` and `parent` are what events call it and the block before it (`kvstore.core.key.event_name`); `parent` None:
    it is the first of its prefix. `tokens` are its token ids as little-endian uint32, b"" where they are not known, and
    `block_tokens` how many a block has, 0 where that is not known. Nothing but the name matters of one that left.
    """

    is_stored: bool
    tier: int
    name: int
    parent: int | None = None
    tokens: bytes = b""
    block_tokens: int = 0


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One message to routers. Sequences go up by one per batch; one that is missing was dropped.

    `is_cleared`: before these changes, no tier holds anything. `time_s` is unix time.
    """

    sequence: int
    time_s: float
    changes: list[Change]
    is_cleared: bool = False


class Published(msgspec.Struct, frozen=True, array_like=True):
    """The publisher's answer: everything up to this sequence is out of its hands."""

    sequence: int


encoder = msgspec.msgpack.Encoder()
batch_decoder: "msgspec.msgpack.Decoder[Batch]" = msgspec.msgpack.Decoder(Batch)
published_decoder: "msgspec.msgpack.Decoder[Published]" = msgspec.msgpack.Decoder(Published)
