"""A bucket through boto3: implements `tiers.objects.ObjectStore`.

boto3 makes and signs the requests and reads the answers; `tiers/s3http.py` carries the bytes.
"""

import http.client
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.parsers import ResponseParserError

from tiers.objects import LIST_AT_ONCE, Found, Listed, ObjectFault, Page, Piece, Places, kind_of
from tiers.s3client import S3Settings, make_client, make_tls
from tiers.s3connect import Connector
from tiers.s3http import Body, Exchange, Transport

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_BEYOND_THE_END = ("416", "InvalidRange")
_ABSENT = ("404", "NoSuchKey", "NotFound")


class BotoObjects:
    """Implements `ObjectStore`. `client`, used inside of an `exchange`, is for what no ObjectStore does."""

    def __init__(self, settings: S3Settings, clock: Callable[[], float] = time.monotonic) -> None:
        """Contacts nobody. Raises ConfigError where a file cannot be read that the settings or boto3's own
        configuration name."""
        self.bucket = settings.bucket
        self.write_options = settings.write_options()
        self.client: S3Client = make_client(settings)
        # Readers and writers at once.
        self._transport = Transport(Connector(make_tls(settings)), max_idle=2 * settings.threads + 4, clock=clock)
        self.client.meta.events.register("before-send.s3", cast("Any", self._transport.send))
        # A HEAD that finds nothing does not say whether there is a bucket at all.
        self._has_seen_bucket = False

    def get(self, name: str, places: Places, deadline: float, *, span: tuple[int, int] | None = None) -> Found | None:
        part: dict[str, Any] = {} if span is None else {"Range": f"bytes={span[0]}-{span[1] - 1}"}
        try:
            with self.exchange(deadline) as exchange:
                response = self.client.get_object(Bucket=self.bucket, Key=name, **part)
                exchange.receive(places(exchange.body_bytes))
        except Refused as refusal:
            if refusal.code in _BEYOND_THE_END:
                list(places(0))
                return self.head(name, deadline)
            refusal.unless(_ABSENT)
            return None
        return Found(_whole_bytes(response), response["ETag"])

    def put(
        self,
        name: str,
        pieces: Sequence[Piece],
        deadline: float,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> str | None:
        options = dict(self.write_options)
        if if_absent:
            options["IfNoneMatch"] = "*"
        elif if_match is not None:
            options["IfMatch"] = if_match
        # Neither bytes nor a file, whatever boto3's types say: see Body.
        body = cast("Any", Body(pieces))
        try:
            with self.exchange(deadline):
                response = self.client.put_object(Bucket=self.bucket, Key=name, Body=body, **options)
        except Refused as refusal:
            refusal.unless(("412", "PreconditionFailed", *(_ABSENT if if_match is not None else ())))
            return None
        return response["ETag"]

    def head(self, name: str, deadline: float) -> Found | None:
        try:
            with self.exchange(deadline):
                response = self.client.head_object(Bucket=self.bucket, Key=name)
        except Refused as refusal:
            refusal.unless(_ABSENT)
            if not self._has_seen_bucket:
                self.list("", deadline, limit=1)
            return None
        return Found(response["ContentLength"], response["ETag"])

    def delete(self, names: Sequence[str], deadline: float) -> set[str]:
        wanted = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        with self.exchange(deadline):
            response = self.client.delete_objects(Bucket=self.bucket, Delete=cast("Any", wanted))
        errors = response.get("Errors", [])
        return {error["Key"] for error in errors if error.get("Code") != "NoSuchKey" and "Key" in error}

    def list(self, prefix: str, deadline: float, *, following: str | None = None, limit: int = LIST_AT_ONCE) -> Page:
        start: dict[str, Any] = {} if following is None else {"ContinuationToken": following}
        with self.exchange(deadline):
            response = self.client.list_objects_v2(Bucket=self.bucket, Prefix=prefix, MaxKeys=limit, **start)
        listed = [
            Listed(item["Key"], item["Size"], seconds_of(item["LastModified"]), item.get("ETag", ""))
            for item in response.get("Contents", [])
        ]
        return Page(listed, response.get("NextContinuationToken"))

    def close(self) -> None:
        self.client.close()
        self._transport.close()

    @contextmanager
    def exchange(self, deadline: float) -> Iterator[Exchange]:
        """Where one request is made. Raises ObjectFault; Refused where the server answered with an error."""
        try:
            with self._transport.exchange(deadline) as exchange:
                yield exchange
        except ClientError as error:
            refusal = Refused(error)
            if refusal.code not in _ABSENT:
                self._has_seen_bucket = False
            raise refusal from error
        except (BotoCoreError, http.client.HTTPException, OSError) as error:
            raise ObjectFault(_kind(error), type(error).__name__) from error
        self._has_seen_bucket = True


class Refused(ObjectFault):
    """The server answered with an error, which some callers expect."""

    def __init__(self, error: ClientError) -> None:
        self.code = str(error.response.get("Error", {}).get("Code", ""))
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        super().__init__(kind_of(self.code, status), self.code)

    def unless(self, codes: Sequence[str]) -> None:
        """Raise this, unless it is an answer of one of these codes."""
        if self.code not in codes:
            raise self


def _kind(error: Exception) -> str:
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return "credentials"
    if isinstance(error, TimeoutError):
        return "timeout"
    lost = (ConnectionError, HTTPClientError, ResponseParserError, http.client.HTTPException, OSError)
    return "connection" if isinstance(error, lost) else "refused"


def _whole_bytes(response: Any) -> int:
    stated: str | None = response.get("ContentRange")
    return int(response["ContentLength"]) if stated is None else int(stated.rpartition("/")[2])


def seconds_of(modified: Any) -> float:
    """Return a time of an answer in seconds since 1970; it is as the server wrote it, see make_client."""
    return modified.timestamp() if isinstance(modified, datetime) else datetime.fromisoformat(modified).timestamp()
