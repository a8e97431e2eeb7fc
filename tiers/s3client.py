"""The S3 tier's settings, and the boto3 client they make.

Covers: endpoint, credentials, timeouts, connections. Credentials are read here and handed to boto3; they are
never logged and never part of an error.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import botocore.session
from botocore.config import Config

from kvstore.core.errors import ConfigError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_CONNECT_TIMEOUT_S = 2.0
_TALKATIVE = ("boto3", "botocore", "urllib3")


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Where the bucket is and how to talk to it.

    `endpoint` empty means AWS. Without the two key files boto3's own chain finds credentials (environment, profile,
    instance role). `request_deadline_s` bounds each block's and each record's request, retries included;
    `threads` is how many requests are made at once. `sse`, `sse_kms_key_id` and `storage_class` go with every
    object written, where set. The credentials need s3:ListBucket, or a missing block looks like a forbidden one.
    """

    bucket: str
    prefix: str = "kvstore"
    endpoint: str = ""
    region: str = "us-east-1"
    access_key_file: str = ""
    secret_key_file: str = ""
    threads: int = 8
    request_deadline_s: float = 10.0
    sse: str = ""
    sse_kms_key_id: str = ""
    storage_class: str = ""

    def key(self, rest: str) -> str:
        """Return the key of an object of ours."""
        return f"{self.prefix}/{rest}" if self.prefix else rest

    def write_options(self) -> dict[str, Any]:
        """Return the arguments that go with every PutObject."""
        options = {
            "ServerSideEncryption": self.sse,
            "SSEKMSKeyId": self.sse_kms_key_id,
            "StorageClass": self.storage_class,
        }
        return {name: value for name, value in options.items() if value}


def make_client(settings: S3Settings) -> "S3Client":
    """Return a client that any thread may use. Contacts nobody. Raises ConfigError where a key file cannot be read."""
    for name in _TALKATIVE:
        # At "debug" they log every request: the access key and its signature, session ids.
        logging.getLogger(name).setLevel(logging.INFO)
    session = botocore.session.Session()
    # The times in each answer are of no use here, and parsing them took a sixth of the client's CPU time per GET.
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)
    config = Config(
        connect_timeout=min(_CONNECT_TIMEOUT_S, settings.request_deadline_s / 2),
        # So that a server that says nothing leaves time for a second try.
        read_timeout=settings.request_deadline_s / 2,
        # Readers and writers at once; retries are ours, since boto3's know no deadline.
        max_pool_connections=2 * settings.threads + 4,
        retries={"total_max_attempts": 1},
        tcp_keepalive=True,
        parameter_validation=False,
        # Every block has a checksum of its own; boto3's would be a second one.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path" if settings.endpoint else "auto"},
    )
    return boto3.session.Session(botocore_session=session).client(
        "s3",
        endpoint_url=settings.endpoint or None,
        region_name=settings.region,
        config=config,
        aws_access_key_id=_read_secret(settings.access_key_file) if settings.access_key_file else None,
        aws_secret_access_key=_read_secret(settings.secret_key_file) if settings.secret_key_file else None,
    )


def _read_secret(path: str) -> str:
    try:
        secret = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the S3 key file {path}: {error.__class__.__name__}") from None
    if not secret:
        raise ConfigError(f"the S3 key file {path} is empty")
    return secret
