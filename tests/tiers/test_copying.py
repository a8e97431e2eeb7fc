"""That a batch arrives whole, however it is divided, and how many threads copy it."""

import os
import random
import threading

import pytest

from tiers import copying
from tiers.copying import Copier


@pytest.fixture
def copied_by(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """By thread, how many bytes it copied. Three CPUs, shares of 4 and 8 bytes; 16 are enough for several threads."""
    copied: dict[str, int] = {}

    def copy(into: memoryview, source: memoryview) -> None:
        assert len(into) == len(source) > 0
        into[:] = source
        name = threading.current_thread().name
        copied[name] = copied.get(name, 0) + len(source)

    monkeypatch.setattr(copying, "copy_bytes", copy)
    monkeypatch.setattr(copying, "_SHARED_BYTES", 16)
    monkeypatch.setattr(copying, "_SHARE_BYTES", 8)
    monkeypatch.setattr(copying, "_FIRST_SHARE_BYTES", 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 7})
    return copied


@pytest.mark.parametrize("seed", range(30))
def test_every_byte_arrives_in_its_place(seed: int, copied_by: dict[str, int]) -> None:
    choice = random.Random(seed)
    sources = [memoryview(choice.randbytes(choice.randrange(1, 40))) for _ in range(choice.randrange(12))]
    into = [memoryview(bytearray(len(source))) for source in sources]
    Copier().copy_all(zip(into, sources, strict=True), sum(map(len, sources)))
    assert [bytes(view) for view in into] == [bytes(view) for view in sources]
    assert sum(copied_by.values()) == sum(map(len, sources)), "every byte once"


def test_as_many_threads_as_there_are_cpus_copy_a_large_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    at_work = threading.Barrier(3, timeout=60)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 7})
    monkeypatch.setattr(copying, "_SHARED_BYTES", 24)
    monkeypatch.setattr(copying, "_SHARE_BYTES", 8)
    monkeypatch.setattr(copying, "_FIRST_SHARE_BYTES", 8)
    # It would break unless three copied at the same time.
    monkeypatch.setattr(copying, "copy_bytes", lambda *_: void(at_work.wait()))
    Copier().copy_all([(memoryview(bytearray(24)), memoryview(bytes(24)))], 24)


def void(_: object) -> None:
    pass


@pytest.mark.parametrize(("cpus", "num_bytes"), [({0, 5, 7}, 15), ({3}, 500)], ids=["a small batch", "one CPU"])
def test_the_caller_copies_alone(
    cpus: set[int], num_bytes: int, copied_by: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus)
    Copier().copy_all([(memoryview(bytearray(num_bytes)), memoryview(bytes(num_bytes)))], num_bytes)
    assert copied_by == {threading.current_thread().name: num_bytes}


def test_a_fault_in_another_thread_is_not_lost(copied_by: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    at_work = threading.Barrier(2, timeout=60)
    monkeypatch.setattr(copying, "_FIRST_SHARE_BYTES", 8)

    def copy(_: memoryview, __: memoryview) -> None:
        at_work.wait()
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError

    monkeypatch.setattr(copying, "copy_bytes", copy)
    with pytest.raises(MemoryError):
        Copier().copy_all([(memoryview(bytearray(16)), memoryview(bytes(16)))], 16)
