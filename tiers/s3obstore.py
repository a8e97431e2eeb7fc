"""A bucket through obstore (Rust): implements `tiers.objects.ObjectStore` with `s3.client = "obstore"`.

Costs less CPU time per byte than boto3, above all for a PUT (benchmarks/s3_clients.py). The package is optional.

How a deadline is kept, and where credentials come from: `tiers/s3obstores.py`.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvstore.core.errors import ConfigError
from tiers.objects import LIST_AT_ONCE, Found, Listed, ObjectFault, Page, Piece, Places, kind_of
from tiers.s3client import S3Settings
from tiers.s3obstores import NO_CREDENTIALS, Stores

_CHUNK_BYTES = 256 << 10
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")


class ObstoreObjects:
    """Implements `ObjectStore`."""

    def __init__(self, settings: S3Settings, clock: Callable[[], float] = time.monotonic) -> None:
        """Contacts nobody. Raises ConfigError where obstore is not installed or a file cannot be read."""
        try:
            import obstore
        except ImportError:
            raise ConfigError(
                's3.client = "obstore" needs a package more; install it with: pip install "tiered-kvstore[obstore]"'
            ) from None
        self._obstore = obstore
        self._stores = Stores(settings, clock)
        self._storage_class = settings.write_options().get("StorageClass")
        # A NotFound does not say what is missing.
        self._has_seen_bucket = False

    def get(self, name: str, places: Places, deadline: float, *, span: tuple[int, int] | None = None) -> Found | None:
        store = self._stores.until(deadline)
        with self._faults():
            try:
                result = self._obstore.get(store, name, options={} if span is None else {"range": span})
            except FileNotFoundError as error:
                self._check_absent(error, deadline)
                return None
            except self._obstore.exceptions.GenericError as error:
                if _status(error) != 416:
                    raise
                result = None
        if result is None:
            list(places(0))
            return self.head(name, deadline)
        start, end = result.range
        _fill(places(end - start), self._chunks(result))
        return Found(result.meta["size"], result.meta["e_tag"] or "")

    def put(
        self,
        name: str,
        pieces: Sequence[Piece],
        deadline: float,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> str | None:
        mode: Any = "create" if if_absent else "overwrite" if if_match is None else {"e_tag": if_match}
        attributes: Any = {"Storage-Class": self._storage_class} if self._storage_class else None
        exceptions = self._obstore.exceptions
        store = self._stores.until(deadline)
        with self._faults():
            try:
                result = self._obstore.put(
                    store, name, list(pieces), mode=mode, attributes=attributes, use_multipart=False
                )
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
                # A conflict with another write that is under way is called AlreadyExists, too.
                if _status(error) == 412:
                    return None
                raise
            except FileNotFoundError as error:
                if if_match is None:
                    raise
                self._check_absent(error, deadline)
                return None
        return result["e_tag"]

    def head(self, name: str, deadline: float) -> Found | None:
        store = self._stores.until(deadline)
        with self._faults():
            try:
                meta = self._obstore.head(store, name)
            except FileNotFoundError as error:
                self._check_absent(error, deadline)
                return None
        return Found(meta["size"], meta["e_tag"] or "")

    def delete(self, names: Sequence[str], deadline: float) -> set[str]:
        store = self._stores.until(deadline)
        with self._faults():
            self._obstore.delete(store, list(names))
        return set()

    def list(self, prefix: str, deadline: float, *, following: str | None = None, limit: int = LIST_AT_ONCE) -> Page:
        # obstore lists folders; what does not begin with the rest of the prefix is left out here.
        folder = prefix.rpartition("/")[0]
        store = self._stores.until(deadline)
        with self._faults():
            found = next(
                iter(self._obstore.list(store, folder or None, offset=following, chunk_size=limit)),
                (),
            )
        listed = [
            Listed(item["path"], item["size"], item["last_modified"].timestamp(), item["e_tag"] or "") for item in found
        ]
        return Page(
            [item for item in listed if item.name.startswith(prefix)],
            listed[-1].name if len(listed) == limit else None,
        )

    def close(self) -> None:
        self._stores.close()

    def _check_absent(self, error: Exception, deadline: float) -> None:
        """Return for a missing object; raise for a missing bucket, which an answer to a HEAD does not tell."""
        if _code(error) == "NoSuchBucket":
            raise error
        if not self._has_seen_bucket and not _code(error):
            self.list("", deadline, limit=1)

    def _chunks(self, result: Any) -> Iterator[memoryview]:
        stream = iter(result.stream(_CHUNK_BYTES))
        while True:
            with self._faults():
                chunk = next(stream, None)
            if chunk is None:
                return
            yield memoryview(chunk)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except (self._obstore.exceptions.BaseError, OSError) as error:
            self._has_seen_bucket = False
            # Not `from error`: its text repeats the server's words, and the key they hold.
            raise _fault(error) from None
        self._has_seen_bucket = True


def _fill(places: Iterable[memoryview], chunks: Iterable[memoryview]) -> None:
    incoming = iter(chunks)
    chunk = memoryview(b"")
    for place in places:
        filled = 0
        while filled < place.nbytes:
            chunk = chunk or next(incoming, chunk)
            if not chunk:
                raise ObjectFault("connection", "the body ended early")
            num_bytes = min(len(chunk), place.nbytes - filled)
            place[filled : filled + num_bytes] = chunk[:num_bytes]
            chunk = chunk[num_bytes:]
            filled += num_bytes
    # Takes note of the end of the body, so that the connection can serve the next request.
    next(incoming, None)


def _fault(error: Exception) -> ObjectFault:
    detail = f"{type(error).__name__} {_code(error)}"
    status = _status(error)
    if status:
        return ObjectFault(kind_of(_code(error), status), detail)
    if NO_CREDENTIALS in str(error):
        return ObjectFault("credentials", detail)
    if "kind: Timeout" in str(error):
        return ObjectFault("timeout", detail)
    return ObjectFault("connection" if "HTTP error" in str(error) else "refused", detail)


def _status(error: Exception) -> int:
    found = _STATUS.search(str(error))
    return int(found[1]) if found else 0


def _code(error: Exception) -> str:
    found = _CODE.search(str(error))
    return found[1] if found else ""
