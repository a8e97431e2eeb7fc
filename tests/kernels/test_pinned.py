"""Pinning in pieces, against a CUDA runtime that only takes notes."""

import pytest

from kernels.pinned import PIECE_BYTES, PinnedMemory

_BASE = 1 << 40


class _Runtime:
    def __init__(self, fail_at: int | None = None) -> None:
        self.pieces: dict[int, int] = {}
        self._fail_at = fail_at

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if len(self.pieces) == self._fail_at:
            return 2
        self.pieces[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pieces[address]
        return 0


def test_a_range_is_pinned_in_pieces_and_unpinned_whole() -> None:
    runtime = _Runtime()
    pinned = PinnedMemory(runtime)
    pinned.pin(_BASE, 2 * PIECE_BYTES + 4096)
    assert runtime.pieces == {
        _BASE: PIECE_BYTES,
        _BASE + PIECE_BYTES: PIECE_BYTES,
        _BASE + 2 * PIECE_BYTES: 4096,
    }
    pinned.unpin(_BASE)
    assert not runtime.pieces
    pinned.unpin(_BASE)


def test_a_refusal_leaves_nothing_pinned_and_says_how_far_it_got() -> None:
    runtime = _Runtime(fail_at=2)
    pinned = PinnedMemory(runtime)
    with pytest.raises(MemoryError, match=f"2 after {2 * PIECE_BYTES} bytes"):
        pinned.pin(_BASE, 3 * PIECE_BYTES)
    assert not runtime.pieces
    pinned.unpin(_BASE)


def test_pinning_that_need_not_go_on_leaves_nothing_pinned() -> None:
    runtime = _Runtime()
    pinned = PinnedMemory(runtime)
    pinned.pin(_BASE, 4 * PIECE_BYTES, lambda: len(runtime.pieces) < 2)
    assert not runtime.pieces
    assert pinned.unbroken(_BASE + PIECE_BYTES - 1, 2) == [2]


def test_transfers_are_cut_at_the_pieces_already_while_they_are_being_pinned() -> None:
    """Half of a block that crosses a border may be pinned before the other half."""
    runtime = _Runtime()
    pinned = PinnedMemory(runtime)
    seen: list[list[int]] = []
    pinned.pin(_BASE, 2 * PIECE_BYTES, lambda: seen.append(pinned.unbroken(_BASE + PIECE_BYTES - 1, 2)) is None)
    assert seen == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("offset", "num_bytes", "lengths"),
    [
        (0, 100, [100]),
        (PIECE_BYTES - 100, 100, [100]),
        (PIECE_BYTES - 60, 100, [60, 40]),
        (PIECE_BYTES - 1, 2 * PIECE_BYTES, [1, PIECE_BYTES, PIECE_BYTES - 1]),
        (-50, 100, [100]),
    ],
)
def test_transfers_are_cut_where_one_piece_ends(offset: int, num_bytes: int, lengths: list[int]) -> None:
    pinned = PinnedMemory(_Runtime())
    pinned.pin(_BASE, 4 * PIECE_BYTES)
    assert pinned.unbroken(_BASE + offset, num_bytes) == lengths
