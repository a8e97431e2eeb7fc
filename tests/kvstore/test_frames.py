"""Messages are cut from a stream alike, however its bytes come."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import wire
from kvstore.core.errors import ProtocolError
from kvstore.frames import Inbox
from kvstore.wire import ErrorCode, Header

MAX_BODY = 100


@given(st.lists(st.binary(max_size=MAX_BODY), max_size=8), st.lists(st.integers(1, 80), min_size=1, max_size=20))
def test_messages_come_out_as_they_went_in_whatever_the_pieces(bodies: list[bytes], sizes: list[int]) -> None:
    stream = b"".join(wire.pack(Header(1, 2, number), body) for number, body in enumerate(bodies))
    inbox = Inbox(MAX_BODY)
    found: list[tuple[int, bytes]] = []
    turn = 0
    while stream:
        size = sizes[turn % len(sizes)]
        turn += 1
        inbox.add(stream[:size])
        stream = stream[size:]
        while message := inbox.next():
            found.append((message[0].sequence, message[1]))
        assert len(inbox) < wire.HEADER_BYTES + MAX_BODY
    assert found == list(enumerate(bodies))
    assert len(inbox) == 0 and inbox.next() is None


def test_a_message_that_says_to_be_too_long_is_refused_before_it_is_there() -> None:
    inbox = Inbox(MAX_BODY)
    inbox.add(Header().encode(MAX_BODY + 1))
    with pytest.raises(ProtocolError) as caught:
        inbox.next()
    assert caught.value.code == ErrorCode.TOO_LONG


def test_what_does_not_begin_as_a_message_is_refused() -> None:
    inbox = Inbox(MAX_BODY)
    inbox.add(wire.pack(Header(), b"sound") + b"x" * wire.HEADER_BYTES)
    assert inbox.next() is not None
    with pytest.raises(ProtocolError) as caught:
        inbox.next()
    assert caught.value.code == ErrorCode.MALFORMED


def test_a_long_message_that_was_taken_out_leaves_no_memory_behind_the_beginning_of_the_next() -> None:
    """A client that sent the longest message and one byte more cost 8 MiB for as long as it was connected, and those
    were counted as one byte."""
    inbox = Inbox(wire.MAX_BODY_BYTES)
    message = wire.pack(Header(), bytes(wire.MAX_BODY_BYTES)) + b"K"
    tracemalloc.start()
    try:
        for start in range(0, len(message), 1 << 20):
            inbox.add(message[start : start + (1 << 20)])
        assert inbox.next() is not None and inbox.next() is None
        held_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(inbox) == 1 and held_bytes < 64 << 10
