"""Uploads in parts, through boto3 whatever client the tier uses else: obstore has none with a condition.

    begin ──► put_part, in any order and at once ──► complete
                                               └───► abort

Until it is completed an upload is no object, and costs money all the same; what a process that died left behind is
found by `unfinished`.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tiers.objects import Piece
from tiers.s3boto import BotoObjects, Refused, seconds_of
from tiers.s3http import Body

_ALREADY_THERE = ("412", "PreconditionFailed")


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload that was begun; `begun_s` is the server's clock, in seconds since 1970."""

    name: str
    upload_id: str
    begun_s: float = 0.0


class BotoUploads:
    """Thread-safe; each call is one request within its deadline, and raises ObjectFault."""

    def __init__(self, make: Callable[[], BotoObjects]) -> None:
        """`make` is called at the first upload, once: where blocks are small, there is none."""
        self._make = make
        self._made: BotoObjects | None = None
        self._lock = threading.Lock()

    @property
    def _objects(self) -> BotoObjects:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def begin(self, name: str, deadline: float) -> Upload:
        with self._objects.exchange(deadline):
            response = self._objects.client.create_multipart_upload(
                Bucket=self._objects.bucket, Key=name, **self._objects.write_options
            )
        return Upload(name, response["UploadId"])

    def put_part(self, upload: Upload, number: int, pieces: Sequence[Piece], deadline: float) -> str:
        """Store part `number`, from 1; return its tag. All but the last must have 5 MiB or more."""
        body = cast("Any", Body(pieces))
        with self._objects.exchange(deadline):
            response = self._objects.client.upload_part(**self._of(upload), PartNumber=number, Body=body)
        return response["ETag"]

    def complete(self, upload: Upload, tags: Sequence[str], deadline: float) -> str | None:
        """Make the parts one object, unless there is one of that name; return its tag or None. `tags[i]` is that of
        part i + 1. Where it returns None the upload is still to be aborted."""
        parts: Any = {"Parts": [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]}
        try:
            with self._objects.exchange(deadline):
                response = self._objects.client.complete_multipart_upload(
                    **self._of(upload), MultipartUpload=parts, IfNoneMatch="*"
                )
        except Refused as refusal:
            refusal.unless(_ALREADY_THERE)
            return None
        return response["ETag"]

    def abort(self, upload: Upload, deadline: float) -> None:
        """Forget the upload and its parts; also one that is not there any more."""
        try:
            with self._objects.exchange(deadline):
                self._objects.client.abort_multipart_upload(**self._of(upload))
        except Refused as refusal:
            refusal.unless(("NoSuchUpload", "404"))

    def unfinished(self, prefix: str, deadline: float) -> list[Upload]:
        """Return up to 1000 uploads of names that begin with `prefix` and were neither completed nor aborted."""
        with self._objects.exchange(deadline):
            response = self._objects.client.list_multipart_uploads(Bucket=self._objects.bucket, Prefix=prefix)
        return [
            Upload(item["Key"], item["UploadId"], seconds_of(item["Initiated"])) for item in response.get("Uploads", [])
        ]

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._made is not None:
                self._made.close()

    def _of(self, upload: Upload) -> dict[str, Any]:
        return {"Bucket": self._objects.bucket, "Key": upload.name, "UploadId": upload.upload_id}
