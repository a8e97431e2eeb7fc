"""In which order a slow tier's writer threads get what is to be changed."""

import threading
from collections.abc import Callable

import pytest

from kvstore.worker import ops
from kvstore.worker.batches import Change, Changes
from tests.support.blocks import key, meta


def write(number: int, payload_bytes: int = 100) -> ops.Write:
    return ops.Write(number, ops.PackedMeta.pack(meta(number, payload_bytes)), 0)


def delete(number: int) -> ops.Delete:
    return ops.Delete(number, key(number))


def put(name: str) -> ops.RecordPut:
    return ops.RecordPut(0, name, b"")


def changes(*operations: Change, batch_bytes: int = 1000) -> Changes:
    made = Changes(batch_bytes)
    made.put(operations)
    return made


def taken_later(made: Changes, release: Callable[[], None]) -> list[Change]:
    """Return what a thread gets that has to wait until `release` was called."""
    taken: list[list[Change]] = []
    thread = threading.Thread(target=lambda: taken.append(made.take()))
    thread.start()
    assert taken == []
    release()
    thread.join(30)
    return taken[0]


def test_a_batch_is_as_long_as_its_bytes_allow() -> None:
    made = changes(*(write(number, 400) for number in range(5)))
    assert [[op.op for op in made.take()] for _ in range(2)] == [[0, 1, 2], [3, 4]]
    assert made.is_empty


def test_a_batch_is_of_one_kind() -> None:
    made = changes(write(1), write(2), put("a"), put("b"), delete(3), delete(4))
    assert [len(made.take()) for _ in range(4)] == [2, 1, 1, 2]


def test_where_nothing_is_batched_each_goes_alone() -> None:
    made = changes(write(1), write(2), delete(3), delete(4), write(5), batch_bytes=0)
    assert [[op.op for op in made.take()] for _ in range(5)] == [[1], [2], [3], [4], [5]]


@pytest.mark.parametrize(("first", "second"), [(write(1), delete(1)), (delete(1), write(1)), (put("a"), put("a"))])
@pytest.mark.parametrize("batch_bytes", [0, 1000])
def test_the_same_key_waits_for_the_batch_that_has_it(first: Change, second: Change, batch_bytes: int) -> None:
    """With two writer threads a block that was deleted and stored again could have been stored, found to exist, and
    then deleted."""
    made = changes(first, second, batch_bytes=batch_bytes)
    batch = made.take()
    assert taken_later(made, lambda: made.done(batch)) == [second]


def test_a_write_waits_for_a_delete_that_makes_room_for_it() -> None:
    made = changes(delete(1), write(2))
    batch = made.take()
    assert taken_later(made, lambda: made.done(batch)) == [write(2)]


def test_a_write_does_not_wait_for_another_write() -> None:
    made = changes(write(1, 1000), write(2, 1000))
    assert made.take() == [write(1, 1000)]
    assert made.take() == [write(2, 1000)]


def test_a_batch_ends_before_a_key_that_is_under_way() -> None:
    made = changes(write(1, 1000), write(2), write(1), write(3))
    first = made.take()
    assert made.take() == [write(2)]
    assert taken_later(made, lambda: made.done(first)) == [write(1), write(3)]


def test_what_waits_when_the_queue_closes_is_still_handed_out() -> None:
    made = changes(write(1))
    made.close()
    assert made.take() == [write(1)]
    assert made.take() == []


def test_a_thread_that_waits_is_told_of_the_end() -> None:
    made = changes()
    assert taken_later(made, made.close) == []
