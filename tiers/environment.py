"""Opens an LMDB environment in one file, and says where that file cannot be one."""

import os
from pathlib import Path
from typing import Final

import lmdb

from kvstore.core.errors import TierUnavailable


class DamagedEnvironment(TierUnavailable):
    """The file is no LMDB environment, or not a whole one; nothing in it can be trusted."""


DAMAGE: Final = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.IncompatibleError,
    lmdb.CursorFullError,
    lmdb.PageFullError,
    lmdb.BadValsizeError,
)
"""What LMDB raises where a page does not hold what it must: the content is at fault, not the disk."""


def open_environment(path: Path, map_bytes: int) -> lmdb.Environment:
    """Open or create the environment (mode 0600), with every commit synced.

    Raises DamagedEnvironment where the file's content is at fault, TierUnavailable where the disk is.
    The caller must be the only process that has it open.
    """
    try:
        environment = lmdb.open(
            str(path),
            subdir=False,
            map_size=map_bytes,
            mode=0o600,
            max_dbs=0,
            # The index is read at random, and payloads are elsewhere.
            readahead=False,
            meminit=False,
        )
    except (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError) as error:
        raise DamagedEnvironment(f"{path.name} is not an LMDB environment: {error}") from error
    except (lmdb.Error, OSError) as error:
        raise TierUnavailable(f"cannot open {path}: {error}") from error
    # LMDB maps the file; reading a page behind its end would kill the process with SIGBUS.
    used_bytes = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if path.stat().st_size < used_bytes:
        environment.close()
        raise DamagedEnvironment(f"{path.name} is shorter than the {used_bytes} bytes it should hold")
    # Readers of a killed predecessor would keep freed pages from being used again.
    environment.reader_check()
    return environment


def remove_environment(path: Path) -> None:
    """Delete the file of a closed environment and its lock file."""
    path.unlink(missing_ok=True)
    lock_path(path).unlink(missing_ok=True)


def lock_path(path: Path) -> Path:
    """Return the lock file that LMDB keeps beside an environment's file."""
    return path.with_name(path.name + "-lock")


def sync_folder(path: Path) -> None:
    """Make names that were created or removed in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
