"""The S3 tier's settings, and the boto3 client they make.

Covers: endpoint, credentials, trusted certificates. Credentials are read here and handed to boto3; they are never
logged and never part of an error.
"""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import ConfigParseError, PartialCredentialsError, ProfileNotFound
from botocore.httpsession import get_cert_path

from kvstore.core.errors import ConfigError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_TALKATIVE = ("boto3", "botocore", "urllib3")


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Where the bucket is and how to talk to it.

    `endpoint` empty means AWS. Without the two key files boto3's own chain finds credentials (environment, profile,
    instance role). `request_deadline_s` bounds each block's and each record's request, retries included;
    `threads` is how many requests are made at once. `sse`, `sse_kms_key_id` and `storage_class` go with every
    object written, where set. Objects of `multipart_threshold_bytes` and more go in requests of `part_bytes`, each
    with a deadline of its own. `client` is the library that makes the requests: "boto3" or "obstore". The credentials
    need s3:ListBucket, or a missing block looks like a forbidden one.
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
    client: str = "boto3"
    multipart_threshold_bytes: int = 64 << 20
    part_bytes: int = 16 << 20

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
    """Return a client that any thread may use. Contacts nobody.

    Raises ConfigError where a key file cannot be read, or boto3's own configuration is not whole.
    """
    for name in _TALKATIVE:
        # At "debug" they log every request: the access key and its signature, session ids.
        logging.getLogger(name).setLevel(logging.INFO)
    session = botocore.session.Session()
    # The times in each answer are of no use here, and parsing them took a sixth of the client's CPU time per GET.
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)
    config = Config(
        # Retries are ours, since boto3's know no deadline.
        retries={"total_max_attempts": 1},
        parameter_validation=False,
        # Every block has a checksum of its own, so neither boto3's nor, without TLS, a SHA-256 of the body as part of
        # the signature (half of the CPU time of a PUT) guards against anything more.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path" if settings.endpoint else "auto", "payload_signing_enabled": False},
    )
    try:
        return boto3.session.Session(botocore_session=session).client(
            "s3",
            endpoint_url=settings.endpoint or None,
            region_name=settings.region,
            config=config,
            aws_access_key_id=read_secret(settings.access_key_file) if settings.access_key_file else None,
            aws_secret_access_key=read_secret(settings.secret_key_file) if settings.secret_key_file else None,
        )
    except (PartialCredentialsError, ProfileNotFound, ConfigParseError) as error:
        # These name variables, profiles and files, never a key.
        raise ConfigError(f"boto3 finds no credentials: {error}") from None


def make_tls(settings: S3Settings) -> ssl.SSLContext | None:
    """Return what https needs, None for an endpoint without it: the certificates that boto3 would trust, or those that
    AWS_CA_BUNDLE or `ca_bundle` in the AWS configuration names. Raises ConfigError where that cannot be read."""
    if settings.endpoint.startswith("http://"):
        return None
    bundle = botocore.session.Session().get_config_variable("ca_bundle")
    try:
        return ssl.create_default_context(cafile=bundle or get_cert_path(True))
    except OSError as error:
        raise ConfigError(f"cannot read the CA bundle {bundle}: {error.__class__.__name__}") from None


def read_secret(path: str) -> str:
    """Return what a key file holds. Raises ConfigError."""
    try:
        secret = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the S3 key file {path}: {error.__class__.__name__}") from None
    if not secret:
        raise ConfigError(f"the S3 key file {path} is empty")
    return secret
