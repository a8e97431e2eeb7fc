"""Blocks as objects: what an object of a block is called and holds, and that it is the block on the way back.

    {prefix}/blocks/{first two hex digits of the key}/{key in hex}      header page, stored payload (`tiers/codec.py`)

A PUT is conditional, so that two daemons do not replace each other's copy. A GET goes straight into its place where the
payload is stored as it is. Large payloads go in parts and come by ranges (`tiers/s3large.py`).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvstore.core.block import HEADER_BYTES, RAW, BlockMeta, Header, decode_header
from kvstore.core.errors import CorruptBlock, TierUnavailable, WrongKey
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome
from tiers.codec import Codec
from tiers.faults import FaultCounter
from tiers.objects import ObjectFault, ObjectStore
from tiers.otherkeys import OtherKeys
from tiers.s3calls import Runner
from tiers.s3client import S3Settings
from tiers.s3large import LargeObjects


class S3Blocks:
    """Thread-safe. Raises TierUnavailable where the bucket does not answer."""

    def __init__(
        self,
        settings: S3Settings,
        objects: ObjectStore,
        large: LargeObjects,
        codec: Codec,
        run: Runner,
        faults: FaultCounter,
        on_sent: Callable[[int, float], None] | None,
        clock: Callable[[], float],
    ) -> None:
        """`on_sent` is told of every block stored: how many bytes, and the seconds that took."""
        self._settings = settings
        self._objects = objects
        self._large = large
        self._codec = codec
        self._run = run
        self._faults = faults
        self._locked: OtherKeys[None] = OtherKeys()
        self._on_sent = on_sent
        self._clock = clock

    def name(self, key: BlockKey) -> str:
        # Two hex digits of a hash first, so that requests spread over S3's partitions.
        text = key.hex()
        return self._settings.key(f"blocks/{text[:2]}/{text}")

    def head(self, key: BlockKey) -> Outcome:
        """OK or MISS, MISS also for what is known to be encrypted with another key."""
        if key in self._locked:
            return Outcome.MISS
        found = self._run(lambda deadline, _attempt: self._objects.head(self.name(key), deadline))
        return Outcome.MISS if found is None else Outcome.OK

    def put(self, meta: BlockMeta, payload: memoryview) -> tuple[Outcome, int]:
        """Return OK or EXISTS, and how many bytes were stored."""
        # Once, whatever tries it takes.
        pieces = self._codec.seal(meta, payload)
        num_bytes = sum(len(piece) for piece in pieces)
        began_s = self._clock()
        if self._locked.take([meta.key]):
            self._quarantine(meta.key)
        if num_bytes >= self._settings.multipart_threshold_bytes:
            is_stored = self._large.put(self.name(meta.key), pieces)
        else:
            is_stored = self._run(partial(self._put, self.name(meta.key), pieces))
        if not is_stored:
            return Outcome.EXISTS, 0
        if self._on_sent is not None:
            self._on_sent(num_bytes, self._clock() - began_s)
        return Outcome.OK, num_bytes

    def get(self, meta: BlockMeta, view: memoryview) -> Outcome:
        """Bring the payload into `view`: OK, MISS or CORRUPT."""
        try:
            return self._get_again(meta, view)
        except CorruptBlock as error:
            self._faults.count("corrupt", detail=f"block {meta.key.hex()[:12]}: {error}")
            self._quarantine(meta.key)
            return Outcome.CORRUPT
        except WrongKey as error:
            # It stays: a start with the wrong key must not empty the bucket.
            self._faults.count("wrong_key", detail=f"block {meta.key.hex()[:12]}: {error}")
            self._locked.add(meta.key, None)
            return Outcome.MISS

    def _get_again(self, meta: BlockMeta, view: memoryview) -> Outcome:
        """Read it a second time where the first time shows damage: that may have come on the way, and a damaged copy is
        deleted. Raises CorruptBlock, WrongKey."""
        try:
            return self._get_whole(meta, view)
        except CorruptBlock as error:
            outcome = self._get_whole(meta, view)
            if outcome is Outcome.OK:
                self._faults.count("damaged_on_the_way", detail=f"block {meta.key.hex()[:12]}: {error}")
            return outcome

    def _get_whole(self, meta: BlockMeta, view: memoryview) -> Outcome:
        incoming = _Incoming(meta, view)
        is_large = HEADER_BYTES + meta.payload_bytes >= self._settings.multipart_threshold_bytes
        if not (self._get_large(incoming) if is_large else self._run(partial(self._get, incoming))):
            return Outcome.MISS
        self._codec.open(meta, incoming.header, incoming.stored, view)
        return Outcome.OK

    def _put(self, name: str, pieces: Sequence[bytes | memoryview], deadline: float, _attempt: int) -> bool:
        return self._objects.put(name, pieces, deadline, if_absent=True) is not None

    def _get(self, incoming: "_Incoming", deadline: float, _attempt: int) -> bool:
        return self._objects.get(self.name(incoming.meta.key), incoming.places, deadline) is not None

    def _get_large(self, incoming: "_Incoming") -> bool:
        name = self.name(incoming.meta.key)

        def get_header(deadline: float, _attempt: int) -> bool:
            def places(num_bytes: int) -> list[memoryview]:
                return [incoming.header[:num_bytes]]

            found = self._objects.get(name, places, deadline, span=(0, HEADER_BYTES))
            if found is not None:
                incoming.decide(found.num_bytes)
            return found is not None

        return self._run(get_header) and self._large.get(name, HEADER_BYTES, incoming.stored)

    def _quarantine(self, key: BlockKey) -> None:
        """Delete a damaged copy. Where that is refused (credentials that may only read) or fails, it stays, and answers
        CORRUPT to the next reader: no reason to take the whole bucket for sick."""
        name = self.name(key)

        def delete(deadline: float, _attempt: int) -> bool:
            try:
                return name not in self._objects.delete([name], deadline)
            except ObjectFault:
                return False

        is_deleted = False
        with contextlib.suppress(TierUnavailable):
            is_deleted = self._run(delete)
        if not is_deleted:
            self._faults.count("delete_refused", detail=f"the bad copy of block {key.hex()[:12]} stays in the bucket")


class _Incoming:
    """Where one object goes: the header page first, which says how much follows and what it is."""

    def __init__(self, meta: BlockMeta, view: memoryview) -> None:
        self.meta = meta
        self.header = memoryview(bytearray(HEADER_BYTES))
        self.stored = view

    def places(self, num_bytes: int) -> Iterator[memoryview]:
        if num_bytes < HEADER_BYTES:
            raise CorruptBlock("the object is shorter than a header")
        yield self.header
        self.decide(num_bytes)
        yield self.stored

    def decide(self, num_bytes: int) -> None:
        """Read the header of an object of `num_bytes`. Raises CorruptBlock."""
        found: Header = decode_header(self.header)
        if found.meta != self.meta:
            raise CorruptBlock("the object holds another block")
        if num_bytes != HEADER_BYTES + found.stored_bytes:
            raise CorruptBlock(f"the object has {num_bytes} bytes, expected {HEADER_BYTES + found.stored_bytes}")
        if found.codec != RAW:
            # At most as long as the payload, which is of a length that we know: see decode_header.
            self.stored = memoryview(bytearray(found.stored_bytes))
