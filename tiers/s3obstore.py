"""A bucket through obstore (Rust): implements `tiers.objects.ObjectStore` with `s3.client = "obstore"`.

Costs less CPU time per byte than boto3, above all for a PUT (benchmarks/s3_clients.py). The package is optional.

obstore knows one time limit per client, for whole requests, and none per call. So there are sixteen clients, for
sixteenths of `request_deadline_s`, and a request uses the longest that ends in time; the first try of each uses the
last one, so that usually there is one. Credentials come from where boto3 finds them.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import botocore.session

from kvstore.core.errors import ConfigError
from tiers.objects import LIST_AT_ONCE, Found, Listed, ObjectFault, Page, Piece, Places, kind_of
from tiers.s3client import S3Settings, read_secret

if TYPE_CHECKING:
    from obstore.store import S3Store

_STEPS = 16
# So that a request that begins a moment after its deadline was set still has all of it.
_TOLERANCE = 0.05
_CONNECT_TIMEOUT_S = 2.0
_CHUNK_BYTES = 256 << 10
_CREDENTIALS_LIVE = timedelta(minutes=5)
_NO_CREDENTIALS = "no credentials were found"
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_NAMES_OF_OPTIONS = {"ServerSideEncryption": "server_side_encryption", "SSEKMSKeyId": "sse_kms_key_id"}


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
        self._settings = settings
        self._clock = clock
        self._options = _options(settings)
        self._storage_class = settings.write_options().get("StorageClass")
        self._lock = threading.Lock()
        self._stores: dict[int, S3Store] = {}
        # A NotFound does not say what is missing.
        self._has_seen_bucket = False

    def get(self, name: str, places: Places, deadline: float, *, span: tuple[int, int] | None = None) -> Found | None:
        store = self._store(deadline)
        with self._faults():
            try:
                result = self._obstore.get(store, name, options={} if span is None else {"range": span})
            except FileNotFoundError as error:
                self._check_absent(error, deadline)
                return None
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
        store = self._store(deadline)
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
        store = self._store(deadline)
        with self._faults():
            try:
                meta = self._obstore.head(store, name)
            except FileNotFoundError as error:
                self._check_absent(error, deadline)
                return None
        return Found(meta["size"], meta["e_tag"] or "")

    def delete(self, names: Sequence[str], deadline: float) -> set[str]:
        store = self._store(deadline)
        with self._faults():
            self._obstore.delete(store, list(names))
        return set()

    def list(self, prefix: str, deadline: float, *, following: str | None = None, limit: int = LIST_AT_ONCE) -> Page:
        # obstore lists folders; what does not begin with the rest of the prefix is left out here.
        folder = prefix.rpartition("/")[0]
        store = self._store(deadline)
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
        with self._lock:
            # Their connections go with them.
            self._stores.clear()

    def _store(self, deadline: float) -> "S3Store":
        limit_s = self._settings.request_deadline_s
        step = int(min(1.0, (deadline - self._clock()) / limit_s) * _STEPS + _TOLERANCE)
        if step <= 0:
            raise ObjectFault("timeout", "no time left")
        with self._lock:
            if step not in self._stores:
                self._stores[step] = self._make(limit_s * step / _STEPS)
            return self._stores[step]

    def _make(self, timeout_s: float) -> "S3Store":
        from obstore.store import S3Store

        client: Any = {
            "allow_http": self._settings.endpoint.startswith("http://"),
            "timeout": _milliseconds(timeout_s),
            "connect_timeout": _milliseconds(min(_CONNECT_TIMEOUT_S, timeout_s / 2)),
            # A server that says nothing for half of the time leaves the other half for another try.
            "read_timeout": _milliseconds(timeout_s / 2),
        }
        bundle = os.environ.get("AWS_CA_BUNDLE")
        if bundle:
            client["root_certificate"] = Path(bundle).read_bytes()
        return S3Store(self._settings.bucket, client_options=client, retry_config={"max_retries": 0}, **self._options)

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


class _Credentials:
    """boto3's chain (environment, profile, instance role), asked at the first request and from then on now and then."""

    def __init__(self) -> None:
        self._session = botocore.session.Session()

    def __call__(self) -> dict[str, Any]:
        found = self._session.get_credentials()
        if found is None:
            raise LookupError(_NO_CREDENTIALS)
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_LIVE,
        }


def _options(settings: S3Settings) -> dict[str, Any]:
    options: dict[str, Any] = {
        "region": settings.region,
        "virtual_hosted_style_request": not settings.endpoint,
        # As with boto3: see make_client.
        "unsigned_payload": True,
    }
    if settings.endpoint:
        options["endpoint"] = settings.endpoint
    for name, value in settings.write_options().items():
        if name in _NAMES_OF_OPTIONS:
            options[_NAMES_OF_OPTIONS[name]] = value
    if settings.access_key_file:
        options["access_key_id"] = read_secret(settings.access_key_file)
        options["secret_access_key"] = read_secret(settings.secret_key_file)
    else:
        options["credential_provider"] = _Credentials()
    return options


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


def _fault(error: Exception) -> ObjectFault:
    detail = f"{type(error).__name__} {_code(error)}"
    status = _status(error)
    if status:
        return ObjectFault(kind_of(_code(error), status), detail)
    if _NO_CREDENTIALS in str(error):
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


def _milliseconds(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"
