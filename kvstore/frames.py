"""Cuts what comes over a stream socket into messages of the control protocol; both ends use it.

Does not cover: sockets, what messages mean (`kvstore/messages/`).
"""

from typing import Final

from kvstore import wire
from kvstore.core.errors import ProtocolError
from kvstore.wire import HEADER_BYTES, ErrorCode, Header

# What was taken out may take up so much more room than what is left.
_MAX_TAKEN_BYTES: Final = 64 << 10


class Inbox:
    """The bytes of one connection that are no whole message yet: never more than one message and one `add`, as long
    as `next` is asked until it has none before more is added."""

    __slots__ = ("_begin", "_bytes", "_header", "_max_body_bytes")

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        # Most messages come in one piece, which is never copied as a whole.
        self._bytes: bytes | bytearray = b""
        self._begin = 0
        self._header: Header | None = None

    def __len__(self) -> int:
        """How many bytes are held."""
        return len(self._bytes) - self._begin

    @property
    def held_bytes(self) -> int:
        """How much memory they take, with what was taken out and not yet freed."""
        return len(self._bytes)

    def add(self, data: bytes) -> None:
        if not self._bytes:
            self._bytes = data
            return
        if self._begin or not isinstance(self._bytes, bytearray):
            self._bytes = bytearray(self._bytes[self._begin :])
            self._begin = 0
        self._bytes += data

    def next(self) -> tuple[Header, bytes] | None:
        """Return the next whole message, header and body, or None.

        Raises ProtocolError (malformed, too_long): nothing that comes after can be understood any more.
        """
        body_begin = self._begin + HEADER_BYTES
        header = self._header
        if header is None:
            if len(self._bytes) < body_begin:
                return None
            self._header = header = wire.decode_header(self._bytes, self._begin)
            if header.body_bytes > self._max_body_bytes:
                raise ProtocolError(
                    ErrorCode.TOO_LONG,
                    f"a body of {header.body_bytes} bytes, at most {self._max_body_bytes} are allowed",
                )
        body_end = body_begin + header.body_bytes
        if len(self._bytes) < body_end:
            return None
        body = bytes(self._bytes[body_begin:body_end])
        self._header = None
        self._begin = body_end
        if body_end == len(self._bytes):
            self._bytes, self._begin = b"", 0
        elif body_end > max(_MAX_TAKEN_BYTES, len(self)):
            # Else the beginning of a next message would keep all of a long one in memory.
            self._bytes, self._begin = self._bytes[body_end:], 0
        return header, body
