"""Segment files and their slots: who gets one, when it is free again, when a file goes."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiers.index import Place
from tiers.segments import Segments

RECORD = 8192


class Disk:
    """How much room there is."""

    def __init__(self) -> None:
        self.max_bytes = 64 * RECORD
        self.segments: Segments

    def room(self, record_bytes: int) -> int:
        return (self.max_bytes - self.segments.size_bytes) // record_bytes * record_bytes


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def segments(tmp_path: Path, disk: Disk) -> Iterator[Segments]:
    disk.segments = Segments(tmp_path / "segments", segment_bytes=16 * RECORD, room=disk.room)
    yield disk.segments
    disk.segments.close()


def test_a_batch_gets_adjacent_slots(segments: Segments) -> None:
    assert segments.take(RECORD, 20) == [
        *(Place(1, slot) for slot in range(16)),
        *(Place(2, slot) for slot in range(4)),
    ]


def test_a_batch_gets_what_there_is(segments: Segments) -> None:
    assert len(segments.take(RECORD, 100)) == 64
    assert segments.take(RECORD, 1) == []


def test_slots_that_are_given_back_serve_again(segments: Segments) -> None:
    places = segments.take(RECORD, 64)
    segments.give_back(places[10:20])
    assert sorted(segments.take(RECORD, 100)) == places[10:20]


def test_a_file_system_that_cannot_allocate_gets_zeros_written(
    segments: Segments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the C library writes a byte per page, which direct I/O refuses: on NFS and some FUSE file systems every
    write of the SSD tier was UNAVAILABLE."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "invalid argument")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr("tiers.direct._ZEROS_BYTES", 3 * RECORD)
    assert len(segments.take(RECORD, 16)) == 16
    (file,) = (tmp_path / "segments").iterdir()
    assert file.stat().st_blocks * 512 >= 16 * RECORD
    assert not any(file.read_bytes())


def test_a_retired_slot_waits_for_the_reads_that_began_before(segments: Segments) -> None:
    (place, *_) = segments.take(RECORD, 64)
    before = segments.reading()
    before.__enter__()
    segments.retire([place])
    after = segments.reading()
    after.__enter__()
    assert segments.take(RECORD, 1) == []
    before.__exit__(None, None, None)
    assert segments.take(RECORD, 1) == [place]
    after.__exit__(None, None, None)


def test_room_of_empty_segments_goes_to_another_size(segments: Segments, tmp_path: Path) -> None:
    places = segments.take(RECORD, 64)
    assert segments.take(4 * RECORD, 1) == []
    segments.give_back(places[:16])
    assert len(segments.take(4 * RECORD, 9)) == 4
    assert sorted(path.name for path in (tmp_path / "segments").iterdir()) == [
        "00000002-00008192.seg",
        "00000003-00008192.seg",
        "00000004-00008192.seg",
        "00000005-00032768.seg",
    ]


def test_a_segment_that_somebody_may_still_read_is_not_removed(segments: Segments) -> None:
    places = segments.take(RECORD, 64)
    with segments.reading():
        segments.retire(places)
        assert segments.take(4 * RECORD, 1) == []
    assert len(segments.take(4 * RECORD, 1)) == 1


def test_after_a_restart_slots_are_free_until_they_are_occupied(segments: Segments, disk: Disk, tmp_path: Path) -> None:
    segments.take(RECORD, 32)
    segments.close()
    disk.segments = Segments(tmp_path / "segments", segment_bytes=16 * RECORD, room=disk.room)
    assert disk.segments.layout() == [(1, RECORD, 16), (2, RECORD, 16)]
    disk.segments.occupy(1, b"\0\0\0\1" + bytes(12))
    assert disk.segments.unlink_empty() == 16 * RECORD
    assert disk.segments.take(RECORD, 1) == [Place(1, 0)]


def test_files_that_are_no_segments_are_left_alone(segments: Segments, disk: Disk, tmp_path: Path) -> None:
    segments.close()
    names = ["notes.txt", "1-1.seg", "00000001-00000100.seg"]
    for name in names:
        (tmp_path / "segments" / name).write_text("mine")
    disk.segments = Segments(tmp_path / "segments", segment_bytes=16 * RECORD, room=disk.room)
    disk.segments.unlink_empty()
    assert sorted(path.name for path in (tmp_path / "segments").iterdir()) == sorted(names)
    assert disk.segments.take(RECORD, 1) == [Place(2, 0)]


def test_the_sparsest_segments_are_the_first_to_go(segments: Segments) -> None:
    places = segments.take(RECORD, 64)
    segments.give_back(places[20:30])
    assert segments.sparsest(1) == [2]
    assert segments.sparsest(17 * RECORD) == [2, 1]
