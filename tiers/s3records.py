"""Session records in a bucket: one small object each, with compare-and-swap by If-Match and If-None-Match.

    {prefix}/records/{name, escaped}=r

A record begins with a number that is drawn anew for every write. So two writes of equal data have different tags (a
tag is a digest of the content in S3), and a writer whose answer was lost knows its own record again.
"""

import re
import secrets
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import xxhash
from botocore.exceptions import ClientError

from tiers.base import Record
from tiers.faults import FaultCounter
from tiers.names import check_name
from tiers.s3body import Traffic
from tiers.s3calls import error_code
from tiers.s3client import S3Settings

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_T = TypeVar("_T")
_MAGIC = b"KVR1"
_NONCE_BYTES = 12
# Far beyond any record: what is longer is somebody else's, and would only fill our memory.
_MAX_RECORD_BYTES = 256 << 20
# magic, nonce, xxh3 of nonce and data
_PREFIX = struct.Struct(f"<4s{_NONCE_BYTES}sQ")
# Ends every record's key. No escaped name ends like that, so that no record's key is a folder of another's: some
# servers keep objects in folders.
_SUFFIX = "=r"
_ESCAPED = re.compile(r"=([0-9A-F]{2})")
_PLAIN = re.compile(r"[^A-Za-z0-9._/-]")


class _Runner(Protocol):
    def __call__(self, action: Callable[[float, int], _T]) -> _T: ...


class S3Records:
    """A RecordStore in a bucket. Thread-safe. `run` makes requests as `S3Calls.run` does."""

    def __init__(
        self, settings: S3Settings, client: "S3Client", run: _Runner, traffic: Traffic, faults: FaultCounter
    ) -> None:
        self._settings = settings
        self._client = client
        self._run = run
        self._traffic = traffic
        self._faults = faults

    def put(self, name: str, data: bytes, *, if_match: str | None = None, if_absent: bool = False) -> str | None:
        check_name(name)
        condition: dict[str, Any] = {}
        if if_absent:
            condition = {"IfNoneMatch": "*"}
        elif if_match is not None:
            condition = {"IfMatch": if_match}
        return self._run(partial(self._put, self._key(name), _encode(data), condition))

    def get(self, name: str) -> Record | None:
        """As `RecordStore.get`; a record that is damaged is counted and None."""
        check_name(name)
        found = self._run(partial(self._get, self._key(name)))
        if found is None:
            return None
        body, etag = found
        data = _decode(body)
        if data is None:
            self._faults.count("record_corrupt", detail=name.rpartition("/")[0])
            return None
        return Record(data, etag)

    def names(self, prefix: str) -> Iterator[str]:
        """As `RecordStore.names`; lists all of them before it yields the first, since servers order keys in
        different ways."""
        names: list[str] = []
        token: str | None = None
        while True:
            response = self._run(partial(self._list, self._key_prefix(prefix), token))
            names += [name for item in response.get("Contents", []) if (name := self._name(item["Key"])) is not None]
            token = response.get("NextContinuationToken")
            if token is None:
                break
        yield from sorted(names)

    def delete(self, name: str) -> bool:
        check_name(name)
        key = self._key(name)
        existed = self._run(partial(self._exists, key))
        if existed:
            self._run(lambda _deadline, _attempt: self._client.delete_object(Bucket=self._settings.bucket, Key=key))
        return existed

    # ------------------------------------------------------------ one request each

    def _put(self, key: str, body: bytes, condition: dict[str, Any], deadline: float, attempt: int) -> str | None:
        try:
            response = self._client.put_object(
                Bucket=self._settings.bucket,
                Key=key,
                Body=self._traffic.body(body, deadline),
                **condition,
                **self._settings.write_options(),
            )
        except ClientError as error:
            if error_code(error) not in ("412", "PreconditionFailed", "NoSuchKey"):
                raise
            return self._tag_if_ours(key, body, deadline) if attempt else None
        return response["ETag"]

    def _tag_if_ours(self, key: str, body: bytes, deadline: float) -> str | None:
        """An earlier try may have been carried out although its answer was lost."""
        found = self._get(key, deadline, 0)
        return found[1] if found is not None and found[0] == body else None

    def _get(self, key: str, deadline: float, _attempt: int) -> tuple[bytes, str] | None:
        try:
            response = self._client.get_object(Bucket=self._settings.bucket, Key=key)
        except ClientError as error:
            if error_code(error) != "NoSuchKey":
                raise
            return None
        body = self._traffic.receive_all(response, _MAX_RECORD_BYTES, deadline)
        # An empty one is damaged, too.
        return body or b"", response["ETag"]

    def _exists(self, key: str, _deadline: float, _attempt: int) -> bool:
        try:
            self._client.head_object(Bucket=self._settings.bucket, Key=key)
        except ClientError as error:
            if error_code(error) not in ("404", "NoSuchKey", "NotFound"):
                raise
            return False
        return True

    def _list(self, prefix: str, token: str | None, _deadline: float, _attempt: int) -> Any:
        following: dict[str, Any] = {} if token is None else {"ContinuationToken": token}
        return self._client.list_objects_v2(Bucket=self._settings.bucket, Prefix=prefix, **following)

    # ------------------------------------------------------------ names and keys

    def _key(self, name: str) -> str:
        return self._key_prefix(name) + _SUFFIX

    def _key_prefix(self, prefix: str) -> str:
        # Character by character, so that the prefix of a name becomes the prefix of its key.
        return self._settings.key("records/" + _PLAIN.sub(lambda match: f"={ord(match[0]):02X}", prefix))

    def _name(self, key: str) -> str | None:
        """Return the name of a key, or None where it is no record of ours."""
        start = self._settings.key("records/")
        if not key.startswith(start) or not key.endswith(_SUFFIX):
            return None
        return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), key[len(start) : -len(_SUFFIX)])


def _encode(data: bytes) -> bytes:
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return _PREFIX.pack(_MAGIC, nonce, xxhash.xxh3_64_intdigest(nonce + data)) + data


def _decode(body: bytes) -> bytes | None:
    if len(body) < _PREFIX.size:
        return None
    magic, nonce, checksum = _PREFIX.unpack_from(body)
    data = body[_PREFIX.size :]
    return data if magic == _MAGIC and checksum == xxhash.xxh3_64_intdigest(nonce + data) else None
