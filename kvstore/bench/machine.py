"""What the figures were measured on: without it they mean nothing."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from kvstore.version import VERSION

_PACKAGES = ("numpy", "lmdb", "boto3", "botocore", "pyzmq", "msgspec", "xxhash", "torch")


def describe(ssd_folder: Path, shm_folder: Path) -> dict[str, Any]:
    """Return hardware, system and versions; `ssd_folder` must exist."""
    return {
        "kvstore": VERSION,
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "kernel": platform.release(),
        "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "ssd": mount_of(ssd_folder),
        "shm": mount_of(shm_folder),
        "transparent_hugepages": _chosen(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "transparent_hugepages_shm": _chosen(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
        "load_average": list(os.getloadavg()),
    }


def mount_of(folder: Path) -> dict[str, str]:
    """Return device, file system and options of the mount that the folder lies on."""
    number = os.stat(folder).st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    for line in _read(Path("/proc/self/mountinfo")).splitlines():
        fields, _, rest = line.partition(" - ")
        words = fields.split()
        if len(words) > 5 and words[2] == wanted:
            kind, device, _ = f"{rest} ? ?".split(" ", 2)
            return {"file_system": kind, "device": device, "options": words[5]}
    return {"file_system": "unknown", "device": "unknown", "options": ""}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _field(path: Path, name: str) -> str:
    for line in _read(path).splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return ""


def _chosen(path: Path) -> str:
    """Return the word in brackets."""
    return _read(path).partition("[")[2].partition("]")[0]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
