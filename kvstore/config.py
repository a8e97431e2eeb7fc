"""What can be configured: the sections as frozen objects, with their defaults and what must hold among them.

Covers: names, types, units, limits, defaults. Where the values come from is in `kvstore/settings.py`.
A field's name carries its unit (`size_bytes`), the key people write does not (`size = "8GiB"`); msgspec's field
name is that key, so that a section also travels to a worker process as JSON: `msgspec.json.encode(config.ram)`.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, field

from kvstore.core.errors import ConfigError
from kvstore.core.hosts import is_loopback

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
# sockaddr_un.sun_path holds 108 bytes with its closing zero.
_MAX_SOCKET_PATH_BYTES = 107
_MIN_PART_BYTES, _MAX_PUT_BYTES = 5 * MIB, 5 * GIB
SOCKET_NAME = "control.sock"
KEY_VARIABLE = "KVSTORE_ENCRYPTION_KEY"
"""Holds the encryption key itself, where no file does: a secret and so no setting."""

# The `unit` tells the reader how to parse a value; the `example` is what an error shows.
Size = Annotated[int, Meta(ge=1, extra={"unit": "bytes", "example": '"8GiB"'})]
AnySize = Annotated[int, Meta(ge=0, extra={"unit": "bytes", "example": '"1GiB", or 0'})]
Duration = Annotated[float, Meta(gt=0, extra={"unit": "seconds", "example": '"30s"'})]
Ratio = Annotated[float, Meta(gt=0, le=1, extra={"unit": "ratio", "example": "0.9"})]
Share = Annotated[float, Meta(ge=0, le=0.9, extra={"unit": "ratio", "example": "0.25"})]
AnyCount = Annotated[int, Meta(ge=0, extra={"unit": "count", "example": "100000, or 0"})]
Count = Annotated[int, Meta(ge=1, extra={"unit": "count", "example": "8"})]
Threads = Annotated[int, Meta(ge=1, le=256, extra={"unit": "count", "example": "8"})]
Port = Annotated[int, Meta(ge=0, le=65535, extra={"unit": "count", "example": "8200"})]
NumaNode = Annotated[int, Meta(ge=-1, le=1023, extra={"unit": "count", "example": "0"})]
Flag = Annotated[bool, Meta(extra={"unit": "flag", "example": "true"})]
Text = Annotated[str, Meta(extra={"unit": "text", "example": '"a-name"'})]
PathText = Annotated[str, Meta(min_length=1, extra={"unit": "path", "example": '"/var/lib/kvstore"'})]
OptionalPathText = Annotated[str, Meta(extra={"unit": "path", "example": '"/run/secrets/name"'})]
AdmissionPolicyName = Literal["always", "second_touch", "learned"]
EvictionPolicyName = Literal["lru", "fifo", "lfu", "s3fifo", "arc", "gittins"]
PathsText = Annotated[tuple[PathText, ...], Meta(extra={"unit": "paths", "example": '["/run/secrets/old-key"]'})]


def default_run_dir(environ: Mapping[str, str] | None = None) -> str:
    """Return the folder of socket and liveness files: the user's own runtime folder, else one in /tmp by user id."""
    runtime = (os.environ if environ is None else environ).get("XDG_RUNTIME_DIR", "")
    return f"{runtime}/kvstore" if runtime.startswith("/") else f"/tmp/kvstore-{os.getuid()}"


def default_ssd_path(environ: Mapping[str, str] | None = None) -> str:
    """Return the SSD tier's folder in the user's cache folder (XDG base directory specification). Raises ConfigError
    for a user without a home, as in some containers."""
    env = os.environ if environ is None else environ
    cache = env.get("XDG_CACHE_HOME", "")
    if not cache.startswith("/"):
        try:
            cache = f"{env.get('HOME') or Path.home()}/.cache"
        except RuntimeError:
            raise ConfigError("this user has no home folder: set HOME, or XDG_CACHE_HOME") from None
    return f"{cache}/kvstore/ssd"


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""


class DaemonConfig(Section, frozen=True, kw_only=True):
    """`run_dir` holds the control socket and is created with mode 0700; engines and the daemon must both see it."""

    run_dir: PathText = field(default_factory=default_run_dir)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    drain_deadline_s: Duration = field(name="drain_deadline", default=10.0)


class RamConfig(Section, frozen=True, kw_only=True):
    """`shm_dir` is where the shared region's file lies: a tmpfs that engines map too, with `hugetlb` a hugetlbfs.
    `numa_node` -1: wherever the kernel likes."""

    size_bytes: Size = field(name="size", default=GIB)
    high_watermark: Ratio = 0.95
    low_watermark: Ratio = 0.90
    policy: EvictionPolicyName = "gittins"
    pin_share: Share = 0.25
    shm_dir: PathText = "/dev/shm"
    prefault: Flag = True
    hugetlb: Flag = False
    mlock: Flag = False
    numa_node: NumaNode = -1


class SsdConfig(Section, frozen=True, kw_only=True):
    """`max_bytes` caps what the tier takes physically; it also leaves `min_free_bytes` of the disk alone."""

    enabled: Flag = True
    path: PathText = field(default_factory=default_ssd_path)
    max_bytes: Size = 10 * GIB
    min_free_bytes: AnySize = GIB
    policy: EvictionPolicyName = "lru"
    pin_share: Share = 0.25
    admission: AdmissionPolicyName = "always"
    write_budget_bytes: AnySize = field(name="write_budget", default=0)
    segment_bytes: Size = 256 * MIB
    threads: Threads = 6


class S3Config(Section, frozen=True, kw_only=True):
    """No `bucket`, no S3 tier. The two key files hold one secret each; without them boto3's own chain decides."""

    bucket: Text = ""
    prefix: Text = "kvstore"
    endpoint: Text = ""
    region: Text = "us-east-1"
    access_key_file: OptionalPathText = ""
    secret_key_file: OptionalPathText = ""
    threads: Threads = 8
    request_deadline_s: Duration = field(name="request_deadline", default=10.0)
    sse: Literal["", "AES256", "aws:kms"] = ""
    sse_kms_key_id: Text = ""
    storage_class: Text = ""
    client: Literal["boto3", "obstore"] = "boto3"
    compression: Literal["none", "auto"] = "none"
    multipart_threshold_bytes: Size = field(name="multipart_threshold", default=64 * MIB)
    part_bytes: Size = field(name="part_size", default=16 * MIB)
    discover: Flag = True
    write: Literal["sessions", "all"] = "sessions"
    admission: AdmissionPolicyName = "always"
    request_budget: AnyCount = 0
    max_bytes: AnySize = 0
    tombstone_poll_s: Duration = field(name="tombstone_poll", default=30.0)
    sweep_every_s: Duration = field(name="sweep_every", default=900.0)
    orphan_grace_s: Duration = field(name="orphan_grace", default=3600.0)

    @property
    def enabled(self) -> bool:
        return bool(self.bucket)


class EncryptionConfig(Section, frozen=True, kw_only=True):
    """Blocks and session records on SSD and in S3 are encrypted with the key in `key_file`, if there is one; those of
    `old_key_files` only decrypt. `accept_plain` also reads what was stored before encryption was switched on."""

    key_file: OptionalPathText = ""
    old_key_files: PathsText = ()
    accept_plain: Flag = False


class SessionsConfig(Section, frozen=True, kw_only=True):
    ttl_s: Duration = field(name="ttl", default=7 * 86400.0)
    max_sessions: Count = 10_000
    max_tokens_per_session: Count = 1 << 20
    pin_for_s: Duration = field(name="pin_for", default=86400.0)
    durable: Literal["all", "admitted"] = "all"


class PrefetchConfig(Section, frozen=True, kw_only=True):
    """Bringing sessions into RAM before they return. `ram_share` of RAM may hold what was brought and not used yet."""

    enabled: Flag = True
    ram_share: Share = 0.25
    in_flight_bytes: Size = field(name="in_flight", default=64 * MIB)
    max_hold_s: Duration = field(name="max_hold", default=600.0)
    short_above: Ratio = 0.8


class HttpConfig(Section, frozen=True, kw_only=True):
    """Port 0 takes any free one and logs which. The file `token_file` holds the bearer token that callers must show."""

    enabled: Flag = True
    host: Text = "127.0.0.1"
    port: Port = 8200
    token_file: OptionalPathText = ""


class EventsConfig(Section, frozen=True, kw_only=True):
    """Which blocks are where, told to routers in vLLM's format. No `endpoint`, no events. The two files have both
    sockets speak CURVE: they hold our secret key, and the public keys of those who may read."""

    endpoint: Text = ""
    connect: Flag = False
    replay_endpoint: Text = ""
    topic: Text = ""
    token_memory_bytes: AnySize = field(name="token_memory", default=64 * MIB)
    queue_bytes: Size = field(name="queue", default=16 * MIB)
    replay_bytes: Size = field(name="replay_buffer", default=64 * MIB)
    curve_secret_key_file: OptionalPathText = ""
    curve_clients_file: OptionalPathText = ""


class Config(Section, frozen=True, kw_only=True):
    """All settings of one daemon. Raises nothing by itself: `check` says what does not hold together."""

    daemon: DaemonConfig = field(default_factory=DaemonConfig)
    ram: RamConfig = field(default_factory=RamConfig)
    ssd: SsdConfig = field(default_factory=SsdConfig)
    s3: S3Config = field(default_factory=S3Config)
    encryption: EncryptionConfig = field(default_factory=EncryptionConfig)
    sessions: SessionsConfig = field(default_factory=SessionsConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    events: EventsConfig = field(default_factory=EventsConfig)


def check(config: Config) -> None:
    """Raise ConfigError for the first setting that cannot hold beside the others; touches no file and no network."""
    _check_daemon(config.daemon)
    if config.ram.low_watermark >= config.ram.high_watermark:
        raise ConfigError("ram.low_watermark must be below ram.high_watermark")
    if config.ram.mlock and not config.ram.prefault:
        raise ConfigError("ram.mlock needs ram.prefault: only memory that has been touched can be locked")
    if config.ssd.enabled and config.ssd.segment_bytes > config.ssd.max_bytes:
        raise ConfigError("ssd.segment_bytes is larger than ssd.max_bytes: lower the first or raise the second")
    _check_s3(config.s3)
    _check_events(config.events)
    if config.http.enabled and not config.http.token_file and not is_loopback(config.http.host):
        raise ConfigError(
            f"http.host {config.http.host!r} can be reached from other machines, so http.token_file must name a file "
            "that holds a token; or set http.host to 127.0.0.1"
        )


def _check_events(events: EventsConfig) -> None:
    is_curve = bool(events.curve_secret_key_file)
    if is_curve != bool(events.curve_clients_file):
        raise ConfigError("events.curve_secret_key_file and events.curve_clients_file belong together")
    if events.connect and is_curve:
        raise ConfigError("events.connect goes without CURVE: leave the two key files out, or bind instead")
    for name, endpoint in (("endpoint", events.endpoint), ("replay_endpoint", events.replay_endpoint)):
        if not endpoint:
            continue
        parts = urlsplit(endpoint)
        is_connected = name == "endpoint" and events.connect
        if not (parts.scheme == "ipc" and parts.path.startswith("/") and not parts.netloc) and not _is_tcp(endpoint):
            raise ConfigError(
                f"events.{name} {endpoint!r} is no address; examples: tcp://127.0.0.1:5557, ipc:///run/kvstore/events"
            )
        is_open = parts.scheme == "tcp" and not is_loopback(_host(endpoint))
        if is_open and not is_connected and not is_curve:
            raise ConfigError(
                f"events.{name} {endpoint!r} can be reached from other machines, and events tell what prompts say: set "
                "events.curve_secret_key_file and events.curve_clients_file, or bind to 127.0.0.1 or ipc://, or have "
                "events.connect make the connection to a router that you trust"
            )
    if events.replay_endpoint and not events.endpoint:
        raise ConfigError("events.replay_endpoint needs events.endpoint: nothing is published without")


def _is_tcp(endpoint: str) -> bool:
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    return endpoint.startswith("tcp://") and bool(colon) and bool(host) and port.isdigit() and int(port) <= 65535


def _host(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def _check_daemon(daemon: DaemonConfig) -> None:
    socket_path = os.fsencode(f"{daemon.run_dir}/{SOCKET_NAME}")
    if len(socket_path) > _MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"daemon.run_dir is too long: the socket's path would have {len(socket_path)} bytes, "
            f"the system allows {_MAX_SOCKET_PATH_BYTES}; choose a shorter folder such as /run/kvstore"
        )


def _check_s3(s3: S3Config) -> None:
    if not s3.bucket:
        return
    if len(s3.bucket) < 3:
        raise ConfigError(f"s3.bucket {s3.bucket!r} is too short: bucket names have at least 3 characters")
    if s3.prefix != s3.prefix.strip("/") or ".." in s3.prefix.split("/"):
        raise ConfigError(f"s3.prefix {s3.prefix!r} must not begin or end with '/' or contain '..'")
    if bool(s3.access_key_file) != bool(s3.secret_key_file):
        raise ConfigError("s3.access_key_file and s3.secret_key_file belong together: set both or neither")
    if not _MIN_PART_BYTES <= s3.part_bytes <= s3.multipart_threshold_bytes <= _MAX_PUT_BYTES:
        raise ConfigError(
            "s3.part_size must be at least 5MiB and at most s3.multipart_threshold, and that at most 5GiB: S3 takes no "
            "smaller parts and no larger object in one piece"
        )
    if s3.sse_kms_key_id and s3.sse != "aws:kms":
        raise ConfigError('s3.sse_kms_key_id needs s3.sse = "aws:kms"')
    if s3.endpoint:
        _check_endpoint(s3.endpoint)


def _check_endpoint(endpoint: str) -> None:
    parts = urlsplit(endpoint)
    if parts.username is not None or parts.password is not None:
        # Not shown: it would end up in a log.
        raise ConfigError("s3.endpoint contains credentials: put them into s3.access_key_file and s3.secret_key_file")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"s3.endpoint {endpoint!r} is no address; example: http://127.0.0.1:8333")
