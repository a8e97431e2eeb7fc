"""A daemon for a moment, with the tiers that the configuration names and none of their data: what is measured through
it is what the user's daemon would take, and nothing of the user's is touched."""

import contextlib
import logging
import os
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from kvstore.config import Config, S3Config
from kvstore.core.errors import KVStoreError
from kvstore.demo.processes import Daemon
from tiers.s3client import S3Settings, make_client

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def scratch_daemon(
    config: Config, file: Path | None, ram_bytes: int, ssd_bytes: int, segment_bytes: int
) -> Iterator[Daemon]:
    """Start it; afterwards its folders, and what it put into the bucket, are gone.

    Its SSD tier lies beside `ssd.path`, its objects below a prefix of their own. `file` is the configuration's, which
    it reads, too.
    """
    ssd_parent = Path(config.ssd.path).parent
    ssd_parent.mkdir(parents=True, exist_ok=True)
    prefix = "/".join(part for part in (config.s3.prefix, f"calibrate-{secrets.token_hex(6)}") if part)
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-calibrate-") as folder,
        tempfile.TemporaryDirectory(prefix="kvstore-calibrate-", dir=ssd_parent) as ssd,
    ):
        environment = {name: value for name, value in os.environ.items() if name.startswith("KVSTORE_")}
        environment |= {
            "KVSTORE_RAM_SIZE": f"{ram_bytes}B",
            "KVSTORE_RAM_PIN_SHARE": "0.9",
            "KVSTORE_SSD_PATH": str(Path(ssd) / "tier"),
            "KVSTORE_SSD_MAX_BYTES": f"{ssd_bytes}B",
            "KVSTORE_SSD_SEGMENT_BYTES": f"{segment_bytes}B",
            "KVSTORE_S3_PREFIX": prefix,
            "KVSTORE_S3_WRITE": "all",
            "KVSTORE_HTTP_ENABLED": "false",
        }
        if file is not None:
            environment["KVSTORE_CONFIG"] = str(file)
        daemon = Daemon(Path(folder) / "run", Path(folder) / "daemon.log", environment)
        try:
            daemon.start()
            yield daemon
        finally:
            daemon.stop()
            if config.s3.bucket:
                _clear(config.s3, prefix)


def _clear(config: S3Config, prefix: str) -> None:
    """Delete what lies below the prefix; where that fails, say where it is."""
    try:
        client = make_client(S3Settings(**{field.name: getattr(config, field.name) for field in fields(S3Settings)}))
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=config.bucket, Prefix=f"{prefix}/")
        for page in pages:
            for item in page.get("Contents", ()):
                client.delete_object(Bucket=config.bucket, Key=item["Key"])
        client.close()
    # boto3's faults have no common base beside this one; all mean the same here.
    except Exception as error:
        reason = error if isinstance(error, KVStoreError) else type(error).__name__
        _log.warning("objects of the calibration may be left in bucket %s below %s: %s", config.bucket, prefix, reason)
