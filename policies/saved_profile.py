"""What was measured of one model on one device of one host, kept in a file between runs.

One JSON file each, in a folder that keeps the newest of them. A file that cannot be read, or is about something else,
counts as none, with one warning: then all is measured anew. Blocks on the disk; any thread may call.
"""

import contextlib
import hashlib
import logging
import math
import os
import re
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from kvstore.core.errors import ConfigError
from kvstore.core.outcome import TierKind
from policies.cost import PrefillCost, SavedCosts, StepCoefficients

_log = logging.getLogger(__name__)

_FORMAT: Final = "kvstore-costs-2"
_MAX_FILES: Final = 64
_MAX_BYTES: Final = 64 * 1024
_SUFFIX: Final = ".json"
# Whatever else lies in the folder is somebody else's.
_OURS: Final = re.compile(r".*-[0-9a-f]{12}\.json")
_LEFT_OVER: Final = re.compile(r"\..*-[0-9a-f]{12}\.json\.[a-z0-9_]{8}\.tmp")
# Nobody writes a file of this size for so long: whoever began it was killed.
_LEFT_OVER_S: Final = 3600.0
# More seconds per token, step or byte would be no measurement.
_MAX_COEFFICIENT: Final = 1e6


class SavedProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`device` names GPU or CPU, and the dtype computed in. `step` is c0, a, b, e, d0; `loads` has latency in s and s
    per byte, by tier ("ram", "ssd", "s3"). `block_bytes` are as stored, of `block_tokens` tokens; `saved_at` is Unix
    time."""

    model: str
    device: str
    host: str
    chunk_tokens: int
    block_tokens: int
    block_bytes: int
    saved_at: float
    source: str = "engine"
    step: StepCoefficients | None = None
    loads: Mapping[str, tuple[float, float]] = {}
    format: str = _FORMAT

    @property
    def costs(self) -> SavedCosts:
        return SavedCosts(self.step, {tier: self.loads[tier.label] for tier in TierKind if tier.label in self.loads})

    @property
    def prefill(self) -> PrefillCost | None:
        """None: it was not measured."""
        return None if self.step is None else PrefillCost(self.chunk_tokens, *self.step[:3])

    @property
    def file_name(self) -> str:
        """Readable, and different for everything that differs."""
        digest = hashlib.sha256("\0".join((self.model, self.device, self.host)).encode()).hexdigest()
        readable = re.sub(r"[^a-zA-Z0-9.]+", "-", self.model).strip("-.")[:60]
        return f"{readable}-{digest[:12]}{_SUFFIX}"

    def with_costs(self, costs: SavedCosts, saved_at: float, source: str) -> "SavedProfile":
        loads = {tier.label: figures for tier, figures in costs.loads.items()}
        return msgspec.structs.replace(self, step=costs.step, loads=loads, saved_at=saved_at, source=source)


def default_folder() -> Path:
    """Return where profiles are kept where nobody says otherwise. Raises ConfigError for a user without a home, as in
    some containers."""
    state = os.environ.get("XDG_STATE_HOME")
    try:
        return Path(state or Path.home() / ".local" / "state") / "kvstore" / "costs"
    except RuntimeError:
        raise ConfigError("this user has no home folder to keep costs in: name one by --profile-dir") from None


def load(folder: Path, like: SavedProfile) -> SavedProfile | None:
    """Return what was saved of the same model, device and host; None where there is nothing of use."""
    path = folder / like.file_name
    try:
        found = read(path)
    except FileNotFoundError:
        return None
    except (OSError, ConfigError) as error:
        _log.warning("the saved costs in %s are of no use, so all is measured anew: %s", path, error)
        return None
    if (found.model, found.device, found.host) != (like.model, like.device, like.host):
        _log.warning("the saved costs in %s are of another machine, so all is measured anew", path)
        return None
    return found


def read(path: Path) -> SavedProfile:
    """Return the file's profile. Raises OSError, or ConfigError where it holds something else."""
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ConfigError("it is no file")
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ConfigError("it is too large for a profile")
    try:
        found = msgspec.json.decode(data, type=SavedProfile)
    except msgspec.MsgspecError as error:
        raise ConfigError(str(error)) from None
    figures = [*(found.step or ()), *(figure for pair in found.loads.values() for figure in pair)]
    if found.format != _FORMAT:
        raise ConfigError(f"its format is {found.format!r}, not {_FORMAT!r}")
    if not all(math.isfinite(figure) and 0 <= figure < _MAX_COEFFICIENT for figure in figures):
        raise ConfigError("it has a cost that is no time")
    if (found.step is not None and not any(found.step[:3])) or not all(any(pair) for pair in found.loads.values()):
        raise ConfigError("it has a cost of nothing")
    if min(found.chunk_tokens, found.block_tokens, found.block_bytes) < 1:
        raise ConfigError("it has a size below 1")
    return found


def save(folder: Path, profile: SavedProfile) -> Path:
    """Write the profile in the place of the last one of the same machine; others see all of it or nothing.

    Raises OSError. The oldest files above a bound go, and what a writer that was killed has left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / profile.file_name
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    for old in saved_in(folder)[_MAX_FILES:]:
        with contextlib.suppress(OSError):
            old.unlink()
    _clear(folder, time.time() - _LEFT_OVER_S)
    return path


def _clear(folder: Path, before_s: float) -> None:
    """Delete what was begun before that time and never put in its place."""
    for left in folder.glob(".*.tmp"):
        if _LEFT_OVER.fullmatch(left.name) is not None:
            with contextlib.suppress(OSError):
                if left.lstat().st_mtime < before_s:
                    left.unlink()


def _open_at_once(path: str, flags: int) -> int:
    """Not waiting for a writer, where a pipe lies in the file's place."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def saved_in(folder: Path) -> list[Path]:
    """Return the profiles' files, newest first; none where there is no folder."""
    times: dict[Path, float] = {}
    for path in folder.glob(f"*{_SUFFIX}"):
        if _OURS.fullmatch(path.name) is None:
            continue
        with contextlib.suppress(OSError):
            times[path] = path.stat().st_mtime
    return sorted(times, key=lambda path: (-times[path], path.name))
