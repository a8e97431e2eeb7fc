"""The wire protocol: every message there and back, and whatever else may come, answered by a daemon that goes on."""

import contextlib
import struct
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import wire
from kvstore.core.errors import ProtocolError
from kvstore.wire import ErrorCode
from tests.support.decisions import decision
from tests.support.messages import REPLIES, REQUESTS, VIEW, mutate, name


def decode(message: wire.Message, frame: bytes) -> wire.Message:
    return wire.decode_request(frame) if message in REQUESTS else wire.decode_reply(frame)


def raw(message: wire.Message) -> dict[str, object]:
    """The message as the plain msgpack map that it is on the wire."""
    return dict(msgspec.msgpack.decode(wire.encode(message)))


# ---------------------------------------------------------------- the messages


def test_there_is_a_sample_of_every_message() -> None:
    assert {type(message) for message in REQUESTS} == set(typing.get_args(wire.Request))
    assert {type(message) for message in REPLIES} == set(typing.get_args(wire.Reply))


@pytest.mark.parametrize("message", [*REQUESTS, *REPLIES], ids=name)
def test_a_message_comes_out_as_it_went_in(message: wire.Message) -> None:
    assert decode(message, wire.encode(message)) == message


@pytest.mark.parametrize("message", [*REQUESTS, *REPLIES], ids=name)
def test_a_message_with_a_field_too_many_too_few_or_of_another_type_is_refused(message: wire.Message) -> None:
    fields = raw(message)
    # Views are read by programs that may be older than the daemon, but not the messages around them.
    wrong = [fields | {"surplus": 1}]
    required = {field.name for field in msgspec.structs.fields(type(message)) if field.required}
    for field in required:
        wrong.append({key: value for key, value in fields.items() if key != field})
    wrong += [fields | {field: [[]]} for field in set(fields) - {"t"}]
    for bad in wrong:
        with pytest.raises(ProtocolError) as caught:
            decode(message, msgspec.msgpack.encode(bad))
        assert caught.value.code == ErrorCode.MALFORMED


@pytest.mark.parametrize("body", [b"", b"\xc0", b"\x80", b"[]", b"\x81\xa1t\xa4Ping\x00", b"\xc1", b"\x81\xa1t\xa3Nix"])
def test_what_is_no_message_is_refused(body: bytes) -> None:
    for decoder in (wire.decode_request, wire.decode_reply):
        with pytest.raises(ProtocolError) as caught:
            decoder(body)
        assert caught.value.code == ErrorCode.MALFORMED


def test_a_request_is_no_reply_and_the_other_way_round() -> None:
    for message in REQUESTS:
        with pytest.raises(ProtocolError):
            wire.decode_reply(wire.encode(message))
    for message in REPLIES:
        with pytest.raises(ProtocolError):
            wire.decode_request(wire.encode(message))


def test_a_body_beyond_the_limit_is_neither_made_nor_read() -> None:
    long = wire.Lookup(b"x" * (wire.MAX_BODY_BYTES + 1))
    with pytest.raises(ProtocolError) as caught:
        wire.encode(long)
    assert caught.value.code == ErrorCode.TOO_LONG
    with pytest.raises(ProtocolError) as caught:
        wire.decode_request(msgspec.msgpack.encode(long))
    assert caught.value.code == ErrorCode.TOO_LONG


def test_the_largest_session_that_can_be_put_can_be_got_back() -> None:
    """What the daemon adds made the reply longer than a message may be."""
    put = wire.SessionPut("chat", "", b"\0" * 32, 0, [wire.ChatMessage("user", "", [1])], b"")
    room = wire.MAX_BODY_BYTES - len(wire.encode(put)) - 8
    largest = wire.ChatMessage("user", "x" * room, [1])
    wire.encode(msgspec.structs.replace(put, messages=[largest]))
    found = wire.SessionFound(msgspec.structs.replace(VIEW, messages=[largest], id="\U0001f642" * 200))
    assert wire.decode_reply(wire.encode(found)) == found


@pytest.mark.parametrize("field", ["cached", "plans"])
def test_a_decision_of_too_many_parts_is_refused_at_its_length(field: str) -> None:
    """Reading half a million runs held the daemon up for a third of a second."""
    report = wire.Report("q", 200, 48, 48, 0, 16, 88, {}, "interval", 0.6, decision=decision("q"))
    fields = raw(report)
    told: Any = fields["decision"]
    parts = told if field == "plans" else told["situation"]
    parts[field] = parts[field][:1] * 100_000
    with pytest.raises(ProtocolError, match=f"length <= .*{field}") as caught:
        wire.decode_request(msgspec.msgpack.encode(fields))
    assert caught.value.code == ErrorCode.MALFORMED


@pytest.mark.parametrize("token", [-1, 1 << 32, 1 << 63])
def test_a_token_id_out_of_range_is_refused(token: int) -> None:
    put = wire.SessionPut("chat", "", b"", 0, [wire.ChatMessage("user", "x", [1, token])], b"")
    with pytest.raises(ProtocolError, match="token_ids"):
        wire.decode_request(wire.encode(put))


@pytest.mark.parametrize("message", [wire.SessionGet("\ud800"), wire.Release(1 << 70)], ids=name)
def test_what_cannot_be_said_in_a_message_is_refused_by_the_sender(message: wire.Message) -> None:
    with pytest.raises(ProtocolError):
        wire.encode(message)


def test_a_header_comes_out_as_it_went_in_and_nothing_else_is_one() -> None:
    header = wire.Header(1 << 63, 1 << 62, 1 << 61)
    frame = header.encode(1 << 31)
    assert wire.decode_header(frame) == msgspec.structs.replace(header, body_bytes=1 << 31)
    assert wire.decode_header(frame[:2] + struct.pack("<H", 9) + frame[4:]).version == 9
    assert wire.decode_header(b"xyz" + frame + b"body", 3) == wire.decode_header(frame)
    for bad in (b"", frame[:-1], b"\0" + frame, b"VK" + frame[2:]):
        with pytest.raises(ProtocolError):
            wire.decode_header(bad)


mutations = st.builds(
    lambda number, seed: mutate(wire.encode(REQUESTS[number]), seed),
    st.integers(0, len(REQUESTS) - 1),
    st.integers(0, 1 << 32),
)


@given(st.binary(max_size=200) | mutations)
def test_whatever_bytes_come_they_are_a_message_or_refused(frame: bytes) -> None:
    for decoder in (wire.decode_request, wire.decode_reply):
        with contextlib.suppress(ProtocolError):
            decoder(frame)
