"""How much memory there is for the region, wherever something limits it: its file system, the memory cgroup (version 1
and 2, and the cgroups above it), the machine, the pool of huge pages, a NUMA node.

Covers: reading these figures. Does not cover: what is done about them (`kvstore/region_file.py`).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.core.errors import ConfigError

MIB: Final = 1 << 20
# What a cgroup and the machine must have beside the region, for the daemon's processes.
_PROCESSES_BYTES = 64 * MIB
_FILE_SYSTEM_SPARE_BYTES = 8 * MIB
# Version 1 says "unlimited" with the largest multiple of a page in 63 bits.
_UNLIMITED_BYTES = 1 << 60
# Of memory.stat: page cache, which gives way. What is in shared memory is not in these.
_RECLAIMABLE = ("inactive_file", "active_file")


@dataclass(frozen=True, slots=True)
class Limit:
    """`where` holds `total_bytes` at most and has `free_bytes` now, of which `spare_bytes` are for others; `remedy` is
    how to get more."""

    where: str
    total_bytes: int
    free_bytes: int
    spare_bytes: int
    remedy: str


@dataclass(frozen=True, slots=True)
class System:
    """Where the kernel tells of itself; other folders in tests."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")

    def limits(self, folder: Path, node: int | None = None) -> list[Limit]:
        """Return everything that limits a region file in `folder`, on the NUMA node if one is named.

        Raises ConfigError where the folder or the node does not exist.
        """
        limits = [] if node is None else self._node_limits(node)
        page_bytes = self.huge_page_bytes(folder)
        if page_bytes:
            return [*limits, *self._huge_page_limits(folder, page_bytes)]
        return [_file_system_limit(folder), *self._cgroup_limits(), *self._machine_limit(), *limits]

    def huge_page_bytes(self, folder: Path) -> int:
        """Return the page size of the hugetlbfs that `folder` lies on, 0 where it lies on something else."""
        place = folder.resolve()
        # Of two mounts on one place the later one is seen.
        covering = [mount for mount in self._mounts() if place.is_relative_to(mount.point)]
        mount = max(reversed(covering), key=lambda mount: len(mount.point.parts), default=None)
        return os.statvfs(folder).f_bsize if mount is not None and mount.type == "hugetlbfs" else 0

    # ------------------------------------------------------------ private

    def _node_limits(self, node: int) -> list[Limit]:
        nodes = self.sys / "devices/system/node"
        known = sorted(int(path.name.removeprefix("node")) for path in nodes.glob("node[0-9]*")) or [0]
        if node not in known:
            raise ConfigError(f"ram.numa_node is {node}, but this machine has only {', '.join(map(str, known))}")
        if len(known) == 1:
            return []  # the machine's limit is the same, and there need be no such folder
        figures = {}
        # "Node 0 MemTotal:       24683652 kB"
        for line in (nodes / f"node{node}/meminfo").read_text().splitlines():
            _, _, name, value, *_ = line.split()
            figures[name.rstrip(":")] = 1024 * int(value)
        free_bytes = figures["MemFree"] + figures.get("Active(file)", 0) + figures.get("Inactive(file)", 0)
        remedy = "choose another ram.numa_node, or none"
        return [Limit(f"NUMA node {node}", figures["MemTotal"], free_bytes, _FILE_SYSTEM_SPARE_BYTES, remedy)]

    def _huge_page_limits(self, folder: Path, page_bytes: int) -> Iterator[Limit]:
        pool = self.sys / f"kernel/mm/hugepages/hugepages-{page_bytes // 1024}kB"
        total, free, reserved = (int((pool / f"{name}_hugepages").read_text()) for name in ("nr", "free", "resv"))
        size = f"{page_bytes // MIB}Mi"
        remedy = (
            f"reserve more pages of {size}B (sysctl vm.nr_hugepages; Kubernetes: resources.limits.hugepages-{size})"
        )
        where = f"the pool of huge pages behind {folder}"
        yield Limit(where, total * page_bytes, (free - reserved) * page_bytes, page_bytes, remedy)
        status = os.statvfs(folder)
        if status.f_blocks:  # mounted with a size of its own
            total_bytes, free_bytes = status.f_blocks * page_bytes, status.f_bavail * page_bytes
            yield Limit(str(folder), total_bytes, free_bytes, page_bytes, "mount that hugetlbfs with a larger size")

    def _machine_limit(self) -> Iterator[Limit]:
        figures = {}
        for line in (self.proc / "meminfo").read_text().splitlines():
            name, value, *_ = line.split()
            figures[name] = 1024 * int(value)
        total_bytes, free_bytes = figures["MemTotal:"], figures["MemAvailable:"]
        yield Limit("this machine", total_bytes, free_bytes, _PROCESSES_BYTES, "use a machine with more memory")

    def _cgroup_limits(self) -> Iterator[Limit]:
        """The cgroup of this process and all above it that can be seen: each may be the one that is too small."""
        paths = dict(_cgroup_paths(_read(self.proc / "self/cgroup")))
        for mount in self._mounts():
            if mount.type == "cgroup2":
                names = ("memory.max", "memory.current", "")
            elif mount.type == "cgroup" and "memory" in mount.options:
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            else:
                continue
            path = paths.get("" if mount.type == "cgroup2" else "memory")
            if path is not None:
                for folder in _with_parents(mount, path):
                    yield from _cgroup_limit(folder, *names)

    def _mounts(self) -> list["_Mount"]:
        return [_parse_mount(line) for line in _read(self.proc / "self/mountinfo").splitlines()]


@dataclass(frozen=True, slots=True)
class _Mount:
    root: str
    point: Path
    type: str
    options: tuple[str, ...]


def _parse_mount(line: str) -> _Mount:
    # "36 35 98:0 /root /mnt/point rw,noatime shared:1 - ext4 /dev/root rw,errors=continue", see proc(5)
    own, _, file_system = line.partition(" - ")
    _, _, _, root, point, *_ = own.split(" ")
    kind, _, options = file_system.split(" ")
    return _Mount(_unescape(root), Path(_unescape(point)), kind, tuple(options.split(",")))


def _read(path: Path) -> str:
    """Return the text, or none where there is no such file: a kernel need not have cgroups."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _unescape(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def _file_system_limit(folder: Path) -> Limit:
    try:
        status = os.statvfs(folder)
    except OSError as error:
        raise ConfigError(f"cannot use ram.shm_dir {folder}: {error.strerror}") from None
    total_bytes, free_bytes = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    remedy = "give that file system more room (docker: shm_size; Kubernetes: sizeLimit)"
    return Limit(str(folder), total_bytes, free_bytes, _FILE_SYSTEM_SPARE_BYTES, remedy)


def _cgroup_paths(text: str) -> Iterator[tuple[str, str]]:
    """Yield (controller, path); version 2 has the controller ''."""
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _with_parents(mount: _Mount, path: str) -> Iterator[Path]:
    # In a container the mount may begin at our own cgroup, while the path still counts from the host's root.
    below = path[len(mount.root) :] if mount.root != "/" and path.startswith(mount.root) else path
    folder = mount.point / below.lstrip("/")
    while folder != mount.point:
        yield folder
        folder = folder.parent
    yield mount.point


def _cgroup_limit(folder: Path, maximum: str, current: str, prefix: str) -> Iterator[Limit]:
    try:
        most = (folder / maximum).read_text().strip()
        used_bytes = int((folder / current).read_text())
    except OSError:
        return  # the root has no limit, and what is above a container cannot be seen
    if most == "max" or int(most) >= _UNLIMITED_BYTES:
        return
    for line in _read(folder / "memory.stat").splitlines():
        name, value = line.split()
        if name.removeprefix(prefix) in _RECLAIMABLE and name.startswith(prefix):
            used_bytes -= int(value)
    remedy = "raise the limit (docker: --memory; Kubernetes: resources.limits.memory), in which the region counts"
    where = f"the memory cgroup {folder}"
    yield Limit(where, int(most), max(0, int(most) - used_bytes), _PROCESSES_BYTES, remedy)
