"""Walks over a bucket: every object under the names of blocks and of records, in pages as the server lists them.

Covers: whether each object is what its name says, checksum, tag and all. Does not cover: whether anybody still needs a
block; expiry decides that. What lies among ours under a name that is none of ours is told of and left alone; what lies
elsewhere under the prefix is not looked at.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvstore.core.block import HEADER_BYTES, RAW, decode_header
from kvstore.core.errors import CorruptBlock, KVStoreError
from kvstore.core.key import KEY_BYTES, BlockKey
from kvstore.core.outcome import Outcome
from tiers.codec import Codec
from tiers.objects import Listed, ObjectStore, Page
from tiers.s3calls import Runner
from tiers.s3client import S3Settings
from tiers.s3records import S3Records
from tiers.scrub import Finding, Orders, Step, Verdict, fault_of, scrub_records, verdict_of

_BLOCK = re.compile(rf"([0-9a-f]{{2}})/(\1[0-9a-f]{{{2 * KEY_BYTES - 2}}})")
# What is larger than any block was never one, and would only fill our memory.
_MAX_BLOCK_BYTES = 1 << 30

Delete = Callable[[Sequence[BlockKey]], list[Outcome]]


class S3Scrub:
    """One walk; `steps` may be iterated once, by one thread. `run` makes requests as `S3Calls.run` does."""

    def __init__(
        self,
        settings: S3Settings,
        objects: ObjectStore,
        run: Runner,
        codec: Codec,
        records: S3Records,
        delete: Delete,
        orders: Orders,
        parallel: int,
    ) -> None:
        """`parallel` objects are read at once, each whole."""
        self._objects = objects
        self._run = run
        self._codec = codec
        self._records = records
        self._delete = delete
        self._orders = orders
        self._parallel = parallel
        self._folder = settings.key("blocks/")
        self._records_folder = settings.key("records/")

    def steps(self) -> Iterator[Step]:
        with ThreadPoolExecutor(self._parallel, thread_name_prefix="scrub") as pool:
            for page in self._pages(self._folder):
                for start in range(0, len(page.objects), self._parallel):
                    yield from pool.map(self._block, page.objects[start : start + self._parallel])
        for page in self._pages(self._records_folder):
            named = [(listed, self._records.name_of(listed.name)) for listed in page.objects]
            foreign = tuple(Finding(Verdict.FOREIGN, "records", listed.name) for listed, name in named if name is None)
            yield Step("records", findings=foreign)
            yield from scrub_records(self._records, [name for _, name in named if name is not None], self._orders)

    def _pages(self, prefix: str) -> Iterator[Page]:
        following: str | None = None
        while True:
            page = self._run(partial(self._list, prefix, following))
            yield page
            following = page.following
            if following is None:
                return

    def _list(self, prefix: str, following: str | None, deadline: float, _attempt: int) -> Page:
        return self._objects.list(prefix, deadline, following=following)

    def _block(self, listed: Listed) -> Step:
        match = _BLOCK.fullmatch(listed.name.removeprefix(self._folder))
        if match is None:
            return Step("blocks", findings=(Finding(Verdict.FOREIGN, "blocks", listed.name),))
        key = BlockKey(bytes.fromhex(match[2]))
        is_there, fault = self._run(partial(self._check, listed.name, key))
        if not is_there:
            return Step("blocks")  # deleted since it was listed
        if fault is None:
            return Step("blocks", 1, num_bytes=listed.num_bytes)
        verdict = verdict_of(fault)
        is_removed = self._orders.remove(verdict) and self._delete([key]) == [Outcome.OK]
        finding = Finding(verdict, "blocks", key.hex(), str(fault), is_removed)
        return Step("blocks", 0, (finding,), listed.num_bytes, (key,) if is_removed else ())

    def _check(self, name: str, key: BlockKey, deadline: float, _attempt: int) -> tuple[bool, KVStoreError | None]:
        """Return whether the object is there, and what is wrong with it."""
        header = memoryview(bytearray(HEADER_BYTES))
        stored = header

        def places(num_bytes: int) -> Iterator[memoryview]:
            nonlocal stored
            if num_bytes < HEADER_BYTES:
                raise CorruptBlock("the object is shorter than a header")
            yield header
            found = decode_header(header)
            if found.meta.key != key:
                raise CorruptBlock("the object holds another block")
            if num_bytes != HEADER_BYTES + found.stored_bytes or found.meta.payload_bytes > _MAX_BLOCK_BYTES:
                raise CorruptBlock(f"the object has {num_bytes} bytes, its header states another length")
            stored = memoryview(bytearray(found.stored_bytes))
            yield stored

        try:
            if self._objects.get(name, places, deadline) is None:
                return False, None
        except CorruptBlock as fault:
            return True, fault
        return True, fault_of(lambda: self._open(header, stored))

    def _open(self, header: memoryview, stored: memoryview) -> None:
        found = decode_header(header)
        into = stored if found.codec == RAW else memoryview(bytearray(found.meta.payload_bytes))
        self._codec.open(found.meta, header, stored, into)
