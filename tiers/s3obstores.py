"""The clients of obstore, one for each time limit.

obstore knows one time limit per client, for whole requests, and none per call. So there are up to sixteen clients, each
with a sixteenth of `request_deadline_s` more than the one before, and a request uses the longest that ends in time; the
first try of each has nearly all of it, so that usually there is one client. Credentials are those that boto3 finds.
"""

import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import botocore.session

from kvstore.core.errors import ConfigError
from tiers.objects import ObjectFault
from tiers.s3client import S3Settings, read_secret

if TYPE_CHECKING:
    from obstore.store import S3Store

# In the text of what obstore raises then.
NO_CREDENTIALS: Final = "no credentials were found"
_STEPS = 16
_CONNECT_TIMEOUT_S = 2.0
_CREDENTIALS_LIVE = timedelta(minutes=5)
_NAMES_OF_OPTIONS = {"ServerSideEncryption": "server_side_encryption", "SSEKMSKeyId": "sse_kms_key_id"}


class Stores:
    """Thread-safe."""

    def __init__(self, settings: S3Settings, clock: Callable[[], float]) -> None:
        """Raises ConfigError where a file cannot be read."""
        self._settings = settings
        self._clock = clock
        self._options = _options(settings)
        self._certificates = _certificates()
        self._lock = threading.Lock()
        self._stores: dict[int, S3Store] = {}

    def until(self, deadline: float) -> "S3Store":
        """Return one whose requests end by `deadline`. Raises ObjectFault where that is too soon for any."""
        limit_s = self._settings.request_deadline_s
        # Rounded: a first request, a moment after its deadline was set, must find the same client as all others.
        step = int(min(1.0, (deadline - self._clock()) / limit_s) * _STEPS + 0.5)
        if step <= 0:
            raise ObjectFault("timeout", "no time left")
        with self._lock:
            if step not in self._stores:
                self._stores[step] = self._make(limit_s * (step - 0.5) / _STEPS)
            return self._stores[step]

    def close(self) -> None:
        with self._lock:
            # Their connections go with them.
            self._stores.clear()

    def _make(self, timeout_s: float) -> "S3Store":
        from obstore.store import S3Store

        client: Any = {
            "allow_http": self._settings.endpoint.startswith("http://"),
            "timeout": _milliseconds(timeout_s),
            "connect_timeout": _milliseconds(min(_CONNECT_TIMEOUT_S, timeout_s / 2)),
            # A server that says nothing for half of the time leaves the other half for another try.
            "read_timeout": _milliseconds(timeout_s / 2),
        }
        if self._certificates is not None:
            client["root_certificate"] = self._certificates
        return S3Store(self._settings.bucket, client_options=client, retry_config={"max_retries": 0}, **self._options)


class _Credentials:
    """boto3's chain (environment, profile, instance role), asked at the first request and from then on now and then."""

    def __init__(self) -> None:
        self._session = botocore.session.Session()

    def __call__(self) -> dict[str, Any]:
        found = self._session.get_credentials()
        if found is None:
            raise LookupError(NO_CREDENTIALS)
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


def _certificates() -> bytes | None:
    path = os.environ.get("AWS_CA_BUNDLE")
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise ConfigError(f"cannot read the CA bundle {path}: {error.__class__.__name__}") from None


def _milliseconds(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"
