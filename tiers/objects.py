"""The border between what is kept in a bucket and the library that talks to it: whole objects by name.

Covers: one request each, within a deadline, faults told apart by kind. Does not cover: trying again and leaving a sick
bucket alone (`tiers/s3calls.py`), what the objects are (`tiers/s3.py`, `tiers/s3records.py`).

A deadline is a time of the clock that the implementation was made with (`time.monotonic`); no call outlasts it, name
resolution aside. A name is the whole key of an object, prefix included.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

# Told how many bytes are coming, gives the places for all of them, each when the one before is full; what it raises
# ends the transfer.
Places = Callable[[int], Iterable[memoryview]]
Piece = bytes | bytearray | memoryview

# Faults that another try a moment later may not meet.
PASSING = frozenset({"timeout", "connection", "throttled", "server_error", "conflict"})
# S3's own names for what is worth a word of its own.
KIND_OF_CODE = {
    "NoSuchBucket": "no_bucket",
    "AccessDenied": "forbidden",
    "InvalidAccessKeyId": "forbidden",
    "SignatureDoesNotMatch": "forbidden",
    "ExpiredToken": "forbidden",
    "SlowDown": "throttled",
    "ConditionalRequestConflict": "conflict",
    "OperationAborted": "conflict",
}
# S3's limit for one DeleteObjects, and what it lists at most.
DELETE_AT_ONCE = 1000
LIST_AT_ONCE = 1000


class ObjectFault(Exception):
    """The bucket did not answer one request as a working bucket does.

    `kind` is the word under which it is counted: one of PASSING, "no_bucket", "forbidden", "credentials" or "refused".
    `detail` is for the log and never holds the server's own words: some repeat the key they were sent.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind} ({detail})")
        self.kind = kind
        self.detail = detail


class DeadlinePassed(TimeoutError):
    """The deadline passed in the middle of a request."""


@dataclass(frozen=True, slots=True)
class Found:
    """An object: its whole length and the tag of its present version."""

    num_bytes: int
    etag: str


@dataclass(frozen=True, slots=True)
class Listed:
    """An object in a listing; `modified_s` is the server's clock, in seconds since 1970."""

    name: str
    num_bytes: int
    modified_s: float
    etag: str


@dataclass(frozen=True, slots=True)
class Page:
    """Some objects of a listing; `following` goes on from there, None at the end."""

    objects: list[Listed]
    following: str | None


class ObjectStore(Protocol):
    """One bucket. Thread-safe; each call is one request, blocks, and raises ObjectFault."""

    def get(self, name: str, places: Places, deadline: float, *, span: tuple[int, int] | None = None) -> Found | None:
        """Receive an object, or the bytes [start, end) of it, into `places(num_bytes)`; None where it is not there.

        A span that ends behind the object's end is cut there, to nothing where it begins there, too. Unless it returns
        a Found, the content of the places is undefined. Whatever `places` raises is raised.
        """
        ...

    def put(
        self,
        name: str,
        pieces: Sequence[Piece],
        deadline: float,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> str | None:
        """Store the pieces, one after the other, as one object; return its tag, or None where the condition did not
        hold and nothing was stored."""
        ...

    def head(self, name: str, deadline: float) -> Found | None:
        """Return what is known of an object, None where it is not there."""
        ...

    def delete(self, names: Sequence[str], deadline: float) -> set[str]:
        """Delete at most DELETE_AT_ONCE objects, there or not; return those that the server refused to delete."""
        ...

    def list(self, prefix: str, deadline: float, *, following: str | None = None, limit: int = LIST_AT_ONCE) -> Page:
        """Return some of the objects whose names begin with `prefix`, at most `limit`, in an order of the server's.

        `following` is that of the page before.
        """
        ...

    def close(self) -> None:
        """Close all connections. Idempotent."""
        ...


def kind_of(code: str, status: int) -> str:
    """Return the kind of fault for an answer with S3's name for it ("" where it has none) and HTTP's status."""
    kind = KIND_OF_CODE.get(code) or {403: "forbidden", 409: "conflict", 429: "throttled", 503: "throttled"}.get(status)
    return kind or ("server_error" if status >= 500 else "refused")
