"""KV events as vLLM publishes them: three kinds of tagged msgpack maps in a batch that is an array.

    [unix seconds, [{"type": "BlockStored", "block_hashes": […], …}, …], data parallel rank]

Read from vllm/distributed/kv_events.py of vLLM 0.32 and 0.33; llm-d's indexer and Dynamo's router read the same.
Hashes are 64-bit integers, vLLM's default. What the two readers make of the fields decides some of the values here:

- Without token ids an event names no parent: llm-d drops a block whose parent it does not know, but takes the tier of
  one that vLLM itself has announced. Dynamo needs the token ids.
- A hash comes at most once in one event: Dynamo drops the event otherwise.
- SSD and bucket are both "STORAGE", the word that vLLM has; `locality` and `ownership` tell them apart. Dynamo drops
  what is REMOTE, which is right: every pod reaches the bucket alike.
"""

from typing import Any, Final

import msgspec
import numpy as np

from kvstore.core.outcome import TierKind
from kvstore.events.changes import Batch, Change

# All ranks of an engine share the daemon; vLLM's own events say 0 where there is one rank.
_RANK: Final = 0
_LOCAL: Final = "LOCAL"
_REMOTE: Final = "REMOTE"
# By tier: medium, locality, ownership.
MEDIA: Final[dict[int, tuple[str, str, str]]] = {
    TierKind.RAM: ("CPU", _LOCAL, "kvstore-ram"),
    TierKind.SSD: ("STORAGE", _LOCAL, "kvstore-ssd"),
    TierKind.S3: ("STORAGE", _REMOTE, "kvstore-s3"),
}


class Event(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag=True):
    """Base of all events; the tag is the class name, under "type"."""


class BlockStored(Event, frozen=True, tag=True):
    """`block_hashes` follow each other in one prefix where there are `token_ids`, of which each has `block_size`."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    locality: str | None = None
    ownership: str | None = None


class BlockRemoved(Event, frozen=True, tag=True):
    block_hashes: list[int]
    medium: str | None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(Event, frozen=True, tag=True):
    """Nothing that was announced before is there any more, in any medium."""


class EventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


def encode(batch: Batch) -> bytes:
    """Return the payload of one message."""
    return _encoder.encode(EventBatch(batch.time_s, events_of(batch), _RANK))


def events_of(batch: Batch) -> list[Event]:
    """Return the events, as few as keep the order."""
    events: list[Event] = [AllBlocksCleared()] if batch.is_cleared else []
    run: list[Change] = []
    names: set[int] = set()
    for change in batch.changes:
        if run and (change.name in names or not _goes_on(run[-1], change)):
            events.append(_event(run))
            run, names = [], set()
        run.append(change)
        names.add(change.name)
        if change.tokens and change.parent is not None:
            names.add(change.parent)
    if run:
        events.append(_event(run))
    return events


def _goes_on(last: Change, change: Change) -> bool:
    """Whether both fit into one event."""
    if (change.is_stored, change.tier) != (last.is_stored, last.tier):
        return False
    if not change.is_stored:
        return True
    if change.block_tokens != last.block_tokens or bool(change.tokens) != bool(last.tokens):
        return False
    return not change.tokens or change.parent == last.name


def _event(run: list[Change]) -> Event:
    first = run[0]
    medium, locality, ownership = MEDIA[first.tier]
    names = [change.name for change in run]
    if not first.is_stored:
        return BlockRemoved(names, medium, locality, ownership)
    tokens = b"".join(change.tokens for change in run)
    return BlockStored(
        names,
        first.parent if tokens else None,
        np.frombuffer(tokens, dtype="<u4").tolist(),
        first.block_tokens,
        None,
        medium,
        None,
        locality,
        ownership,
    )


_encoder = msgspec.msgpack.Encoder()
