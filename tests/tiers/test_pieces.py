"""Records in pieces: short and long ones, through buffers and straight, whole or not at all."""

import errno
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.core.block import HEADER_BYTES, Checksum, checksum
from tiers.aligned import AlignedBuffers, is_aligned
from tiers.crew import Crew
from tiers.direct import RecordFile, record_size
from tiers.pieces import PIECE_BYTES, Incoming, Outgoing, PieceMover

# Shorter than a page, one page, several to a piece, exactly one piece, and several pieces with an odd end.
# Those of several parts also where no buffer is needed, and parts are longer, come last.
SIZES = [
    1,
    4096,
    300_000,
    303_104,
    PIECE_BYTES - HEADER_BYTES,
    2 * PIECE_BYTES,
    2 * PIECE_BYTES + 12_345,
    2 * PIECE_BYTES + 4096,
    17 << 20,
]


@pytest.fixture(params=[0, 3], ids=["alone", "crew"])
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    crew = Crew(request.param, "crew")
    yield crew
    crew.close()


@pytest.fixture(params=[False, True], ids=["buffered", "straight"])
def mover(request: pytest.FixtureRequest) -> PieceMover:
    return PieceMover(AlignedBuffers(), is_straight=request.param)


def header(slot: int) -> bytes:
    return b"header %d" % slot + bytes(HEADER_BYTES - len(b"header %d" % slot))


def outgoing(slot: int, payload: memoryview) -> Outgoing:
    return Outgoing(slot, payload, lambda _: (header(slot), payload))


def write(file: RecordFile, mover: PieceMover, crew: Crew, payloads: dict[int, memoryview]) -> None:
    crew.run(list(mover.write_jobs(file, [outgoing(slot, payload) for slot, payload in payloads.items()])))
    file.sync()


def read(
    file: RecordFile, mover: PieceMover, crew: Crew, slots: Sequence[int], num_bytes: int
) -> dict[int, tuple[bytes, bytes] | None]:
    found: dict[int, tuple[bytes, bytes] | None] = {}

    def incoming(slot: int) -> Incoming:
        def accept(header: memoryview | None, stored: memoryview, stored_checksum: int) -> None:
            assert slot not in found
            found[slot] = None if header is None else (bytes(header), bytes(stored))
            assert header is None or stored_checksum == checksum(stored)

        return Incoming(slot, memory(num_bytes), accept)

    crew.run(mover.read_jobs(file, [incoming(slot) for slot in sorted(slots)]))
    return found


def memory(num_bytes: int) -> memoryview:
    """Return page-aligned memory, as slots are."""
    with AlignedBuffers().borrow(num_bytes) as view:
        return view


def payload(num_bytes: int) -> memoryview:
    view = memory(num_bytes)
    view[:] = os.urandom(num_bytes)
    return view


@pytest.fixture
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RecordFile]:
    file = RecordFile(tmp_path / "file", record_size(request.param), create=True)
    file.allocate(5 * file.record_bytes)
    yield file
    file.close()


@pytest.mark.parametrize(("file", "num_bytes"), [(size, size) for size in SIZES], indirect=["file"])
def test_records_come_back_from_their_slots(file: RecordFile, num_bytes: int, mover: PieceMover, crew: Crew) -> None:
    payloads = {slot: payload(num_bytes) for slot in (4, 0, 1)}
    write(file, mover, crew, payloads)
    found = read(file, mover, crew, [1, 0, 4], num_bytes)
    assert found == {slot: (header(slot), bytes(view)) for slot, view in payloads.items()}


@pytest.mark.parametrize("file", [4096, 2 * PIECE_BYTES], indirect=True)
def test_what_a_cipher_puts_into_the_place_is_what_is_stored(file: RecordFile, mover: PieceMover, crew: Crew) -> None:
    num_bytes = file.record_bytes - HEADER_BYTES

    def seal(place: memoryview | None) -> tuple[bytes, memoryview]:
        assert place is not None
        place[:num_bytes] = b"s" * num_bytes
        return header(2), place[:num_bytes]

    crew.run(list(mover.write_jobs(file, [Outgoing(2, memory(num_bytes), seal, is_payload_stored=False)])))
    assert read(file, mover, crew, [2], num_bytes) == {2: (header(2), b"s" * num_bytes)}


@pytest.mark.parametrize("file", [300_000, 2 * PIECE_BYTES], indirect=True)
def test_a_record_behind_the_end_of_the_file_is_told_as_lost(file: RecordFile, mover: PieceMover, crew: Crew) -> None:
    num_bytes = file.record_bytes - HEADER_BYTES
    write(file, mover, crew, {0: payload(num_bytes), 1: payload(num_bytes)})
    os.truncate(file.descriptor, 2 * file.record_bytes - 4096)
    found = read(file, mover, crew, [0, 1, 2], num_bytes)
    assert found[0] is not None
    assert found[1] is found[2] is None


@pytest.mark.parametrize("place", [8192, -4096])
@pytest.mark.parametrize("file", [300_000, 303_104, 2 * PIECE_BYTES, 17 << 20], indirect=True)
def test_a_bad_sector_costs_one_record(
    file: RecordFile, place: int, mover: PieceMover, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes = file.record_bytes - HEADER_BYTES
    write(file, mover, crew, {slot: payload(num_bytes) for slot in range(3)})
    preadv, bad = os.preadv, file.record_bytes + place % file.record_bytes

    def reads(descriptor: int, vector: Any, offset: int) -> int:
        if offset <= bad < offset + sum(map(len, vector)):
            raise OSError(errno.EIO, "input/output error")
        return preadv(descriptor, vector, offset)

    monkeypatch.setattr(os, "preadv", reads)
    found = read(file, mover, crew, [0, 1, 2], num_bytes)
    assert sorted(found) == [0, 1, 2]
    assert [slot for slot, record in found.items() if record is None] == [1]


@pytest.mark.parametrize("file", [17 << 20], indirect=True)
def test_one_thread_at_a_time_makes_the_checksum_of_a_record(
    file: RecordFile, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow:
        def __init__(self) -> None:
            self._checksum = Checksum()
            self._is_busy = False

        def update(self, part: memoryview) -> None:
            assert not self._is_busy
            self._is_busy = True
            time.sleep(0.02)
            self._checksum.update(part)
            self._is_busy = False

        def intdigest(self) -> int:
            return self._checksum.intdigest()

    mover = PieceMover(AlignedBuffers())
    num_bytes = file.record_bytes - HEADER_BYTES
    stored = payload(num_bytes)
    write(file, mover, crew, {0: stored})
    monkeypatch.setattr("tiers.pieces.Checksum", Slow)
    assert read(file, mover, crew, [0], num_bytes) == {0: (header(0), bytes(stored))}


def test_buffers_lie_on_pages_and_serve_again() -> None:
    buffers = AlignedBuffers()
    with buffers.borrow(3 << 20) as first:
        assert len(first) == 3 << 20
        assert is_aligned(first)
        first[:4] = b"seen"
    with buffers.borrow(100) as again, buffers.borrow(100) as other:
        assert bytes(again[:4]) == b"seen"
        assert bytes(other[:4]) != b"seen"
