"""What routers read: as few events as keep the order, each one that llm-d's and Dynamo's readers take."""

import numpy as np

from kvstore.core.outcome import TierKind
from kvstore.events.changes import Batch, Change
from kvstore.events.vllm_format import encode
from tests.support.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, decoder

RAM, SSD, S3 = int(TierKind.RAM), int(TierKind.SSD), int(TierKind.S3)


def read(*changes: Change, is_cleared: bool = False) -> list[Event]:
    batch = decoder.decode(encode(Batch(3, 1.5, list(changes), is_cleared)))
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 0)
    return batch.events


def tokens(*ids: int) -> bytes:
    return np.array(ids, dtype="<u4").tobytes()


def test_blocks_that_follow_each_other_are_one_event() -> None:
    events = read(
        Change(True, RAM, 11, None, tokens(1, 2), 2),
        Change(True, RAM, 22, 11, tokens(3, 4), 2),
        Change(True, RAM, 33, 22, tokens(5, (1 << 32) - 1), 2),
    )
    assert events == [
        BlockStored(
            [11, 22, 33],
            None,
            [1, 2, 3, 4, 5, (1 << 32) - 1],
            2,
            None,
            "CPU",
            None,
            locality="LOCAL",
            ownership="kvstore-ram",
        )
    ]


def test_a_block_of_another_prefix_begins_an_event_with_its_own_parent() -> None:
    events = read(Change(True, RAM, 22, 11, tokens(1), 1), Change(True, RAM, 55, 44, tokens(2), 1))
    assert [(event.block_hashes, event.parent_block_hash) for event in events if isinstance(event, BlockStored)] == [
        ([22], 11),
        ([55], 44),
    ]


def test_without_tokens_no_parent_is_named() -> None:
    """llm-d drops an event whose parent it does not know, but takes the tier of blocks that it does."""
    (event,) = read(Change(True, SSD, 22, 11, b"", 16), Change(True, SSD, 55, 44, b"", 16))
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.parent_block_hash, event.token_ids) == ([22, 55], None, [])
    assert (event.medium, event.locality) == ("STORAGE", "LOCAL")


def test_blocks_with_and_without_tokens_do_not_share_an_event() -> None:
    events = read(Change(True, RAM, 1, None, tokens(7), 1), Change(True, RAM, 2, 1, b"", 1))
    assert [event.block_hashes for event in events if isinstance(event, BlockStored)] == [[1], [2]]


def test_what_lies_in_the_bucket_is_remote() -> None:
    (event,) = read(Change(True, S3, 1))
    assert isinstance(event, BlockStored)
    assert (event.medium, event.locality, event.ownership) == ("STORAGE", "REMOTE", "kvstore-s3")


def test_removals_name_the_tier_that_was_left() -> None:
    events = read(Change(False, RAM, 1), Change(False, RAM, 2), Change(False, SSD, 1))
    assert events == [
        BlockRemoved([1, 2], "CPU", locality="LOCAL", ownership="kvstore-ram"),
        BlockRemoved([1], "STORAGE", locality="LOCAL", ownership="kvstore-ssd"),
    ]


def test_the_order_of_what_happened_is_kept() -> None:
    events = read(Change(True, RAM, 1), Change(False, RAM, 1), Change(True, RAM, 1), is_cleared=True)
    assert [type(event) for event in events] == [AllBlocksCleared, BlockStored, BlockRemoved, BlockStored]


def test_no_event_has_a_hash_twice() -> None:
    """Dynamo drops an event in which a block seems to be its own ancestor."""
    events = read(
        Change(True, RAM, 2, 1, tokens(1), 1),
        Change(True, RAM, 1, 2, tokens(1), 1),
        Change(True, RAM, 5),
        Change(True, RAM, 5),
    )
    for event in events:
        assert isinstance(event, BlockStored)
        names = [*event.block_hashes, event.parent_block_hash]
        assert len(names) == len(set(names))
