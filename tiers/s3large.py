"""Large objects, several requests at once each: PUTs in parts, GETs by ranges.

One request of a hundred megabytes is bound by one connection, and begins anew where it breaks off. S3 takes no more
than 5 GiB in one PUT, and parts of 5 MiB or more but for the last. Every part is a request with a deadline and tries of
its own, so how long a block may take grows with its size.

All parts of all blocks share one pool of threads, whose tasks wait for nothing but their request; so callers that wait
here for their parts cannot lock each other out.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from kvstore.core.errors import CorruptBlock, TierUnavailable
from tiers.objects import ObjectStore, Piece
from tiers.s3calls import Runner
from tiers.s3uploads import BotoUploads, Upload

_T = TypeVar("_T")
_logger = logging.getLogger("kvstore.tiers.s3")


class LargeObjects:
    """Thread-safe. Raises TierUnavailable where a part fails to the end."""

    def __init__(self, objects: ObjectStore, uploads: BotoUploads, run: Runner, threads: int, part_bytes: int) -> None:
        self._objects = objects
        self._uploads = uploads
        self._run = run
        self._part_bytes = part_bytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="s3-part")

    def put(self, name: str, pieces: Sequence[Piece]) -> bool:
        """Store the pieces as one object; return False where there is one of that name, which is left alone.

        An upload that fails is aborted. The server's last word is asked when all parts are there, since only then it
        knows who was first; but an object that is there already is noticed before a part is sent.
        """
        if self._run(lambda deadline, _attempt: self._objects.head(name, deadline)) is not None:
            return False
        upload = self._run(lambda deadline, _attempt: self._uploads.begin(name, deadline))
        is_stored = False
        try:
            parts: list[Future[str]] = [
                self._pool.submit(self._run, partial(self._put_part, upload, number, part))
                for number, part in enumerate(cut(pieces, self._part_bytes), 1)
            ]
            tags = _results(parts)
            is_stored = self._run(partial(self._complete, upload, tags))
        finally:
            if not is_stored:
                self._abort(upload)
        return is_stored

    def get(self, name: str, start: int, place: memoryview) -> bool:
        """Receive the bytes [start, start + len(place)) of an object; return False where it is not there (any more).
        Raises CorruptBlock where it does not have them."""
        parts: list[Future[bool]] = [
            self._pool.submit(self._run, partial(self._get_part, name, start + at, place[at : at + self._part_bytes]))
            for at in range(0, len(place), self._part_bytes)
        ]
        were_there: list[bool] = _results(parts)
        return all(were_there)

    def abort_unfinished(self, prefix: str, begun_before_s: float) -> int:
        """Abort uploads below `prefix` that began before that time of the server's clock; return how many."""
        found = self._run(lambda deadline, _attempt: self._uploads.unfinished(prefix, deadline))
        old = [upload for upload in found if upload.begun_s < begun_before_s]
        for upload in old:
            self._run(partial(self._abort_one, upload))
        return len(old)

    def close(self) -> None:
        """Wait for requests that run. Idempotent."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._uploads.close()

    def _put_part(self, upload: Upload, number: int, pieces: list[memoryview], deadline: float, _attempt: int) -> str:
        return self._uploads.put_part(upload, number, pieces, deadline)

    def _get_part(self, name: str, start: int, place: memoryview, deadline: float, _attempt: int) -> bool:
        def places(num_bytes: int) -> list[memoryview]:
            if num_bytes != len(place):
                raise CorruptBlock(f"the object has {num_bytes} bytes where {len(place)} were expected")
            return [place]

        return self._objects.get(name, places, deadline, span=(start, start + len(place))) is not None

    def _complete(self, upload: Upload, tags: list[str], deadline: float, attempt: int) -> bool:
        if self._uploads.complete(upload, tags, deadline) is not None:
            return True
        if attempt == 0:
            return False
        # An earlier try may have been carried out although its answer was lost: then it is ours, or as good as that.
        return self._objects.head(upload.name, deadline) is not None

    def _abort_one(self, upload: Upload, deadline: float, _attempt: int) -> None:
        self._uploads.abort(upload, deadline)

    def _abort(self, upload: Upload) -> None:
        with contextlib.suppress(TierUnavailable):
            self._run(partial(self._abort_one, upload))
            return
        _logger.warning("s3 tier: an upload could not be aborted; it is left to the bucket's cleaning")


def cut(pieces: Sequence[Piece], part_bytes: int) -> Iterator[list[memoryview]]:
    """Yield the pieces, in order, as parts of `part_bytes` bytes, the last one shorter; nothing is copied."""
    part: list[memoryview] = []
    room = part_bytes
    for whole in pieces:
        piece = memoryview(whole)
        while piece.nbytes:
            part.append(piece[:room])
            room -= part[-1].nbytes
            piece = piece[part[-1].nbytes :]
            if room == 0:
                yield part
                part, room = [], part_bytes
    if part:
        yield part


def _results(futures: list[Future[_T]]) -> list[_T]:
    """Return all results; after the first fault, what has not begun is not begun, what has is waited for."""
    try:
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        for future in futures:
            if not future.cancelled():
                future.exception()
        raise
