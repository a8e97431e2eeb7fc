"""Finds what a test left open in this process: files and sockets, threads, children, mapped shared memory."""

import os
import threading
from dataclasses import dataclass
from pathlib import Path

# Opened once by libraries and kept for the life of the process.
_IGNORED_FILES = ("/dev/urandom", "/dev/random", "/dev/null", "/proc/", "/sys/")
# tqdm's monitor and the standard library's pools keep idle daemon threads by design.
_IGNORED_THREADS = ("TMonitor",)


@dataclass(frozen=True, slots=True)
class Opened:
    """What this process holds open at one moment, by name; `files` counts equal ones apart, `children` go by their
    process with the command as its description."""

    files: frozenset[str]
    threads: frozenset[str]
    children: dict[str, str]
    mappings: frozenset[str]

    def beyond(self, before: "Opened") -> list[str]:
        """Return a line for each thing that is open now and was not `before`."""
        left = [
            f"{kind}: {name}"
            for kind in ("files", "threads", "mappings")
            for name in sorted(getattr(self, kind) - getattr(before, kind))
        ]
        return left + [f"children: {pid} {name}" for pid, name in self.children.items() if pid not in before.children]


def look() -> Opened:
    """Return what is open now; a thread or a child that has ended is not counted."""
    return Opened(_files(), _threads(), _children(), _mappings())


def _files() -> frozenset[str]:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the listing's own descriptor
        if not target.startswith(_IGNORED_FILES):
            names.append(f"{fd} -> {target}")
    return frozenset(names)


def _threads() -> frozenset[str]:
    return frozenset(
        f"{thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if type(thread).__name__ not in _IGNORED_THREADS
    )


def _children() -> dict[str, str]:
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:
            continue
        for pid in pids:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                # By its start: whether it sleeps or runs changes, and a command line is another after an exec.
                started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
            except OSError:
                continue
            found[f"{pid} since {started}"] = command[:120]
    return found


def _mappings() -> frozenset[str]:
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        # Shared and backed by a file: regions and LMDB maps. Libraries are mapped private.
        if (
            len(fields) == 6
            and "s" in fields[1]
            and not fields[5].startswith(("/dev/nvidia", "/SYSV", "/memfd", "/dev/zero"))
        ):
            found.add(fields[5])
    return frozenset(found)


def regions() -> set[Path]:
    """Return the RAM tiers of daemons that run, or that were killed: those have nobody to remove theirs."""
    return set(Path("/dev/shm").glob("kvstore-*.region"))
