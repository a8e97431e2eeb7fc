"""What limits the region: read from cgroup, machine, node and huge page files that the tests write."""

from pathlib import Path

import pytest

from kvstore.config import RamConfig
from kvstore.core.errors import ConfigError
from kvstore.memory import MIB, Limit, System
from kvstore.region_file import create_region

GIB = 1 << 30


@pytest.fixture
def system(tmp_path: Path) -> System:
    system = System(tmp_path / "proc", tmp_path / "sys")
    write(system.proc / "meminfo", f"MemTotal: {64 * MIB} kB\nMemAvailable: {32 * MIB} kB\nHugePages_Total: 0")
    write(system.proc / "self/cgroup", "0::/")
    write(system.proc / "self/mountinfo", mount("/", "ext4"))
    return system


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def mount(point: Path | str, kind: str, options: str = "rw", root: str = "/") -> str:
    return f"36 35 98:0 {root} {point} rw,noatime shared:1 - {kind} /dev/x {options}"


def add_mount(system: System, line: str) -> None:
    with (system.proc / "self/mountinfo").open("a") as file:
        file.write(f"{line}\n")


def cgroup2(folder: Path, most: str, current: int, cache: int = 0) -> None:
    write(folder / "memory.max", most)
    write(folder / "memory.current", str(current))
    write(folder / "memory.stat", f"anon 5\ninactive_file {cache}\nactive_file 0\nshmem 7")


def limit(system: System, folder: Path, where: str) -> Limit | None:
    return next((limit for limit in system.limits(folder) if where in limit.where), None)


def test_the_machine_and_the_file_system_are_limits(system: System, tmp_path: Path) -> None:
    assert [limit.where for limit in system.limits(tmp_path)] == [str(tmp_path), "this machine"]
    found = limit(system, tmp_path, "this machine")
    assert found is not None
    assert (found.total_bytes, found.free_bytes) == (64 * GIB, 32 * GIB)


def test_a_cgroup_has_its_limit_less_what_is_used_and_does_not_give_way(system: System, tmp_path: Path) -> None:
    group = tmp_path / "cg/pod"
    write(system.proc / "self/cgroup", "0::/pod")
    add_mount(system, mount(tmp_path / "cg", "cgroup2"))
    cgroup2(group, str(4 * GIB), 3 * GIB, cache=2 * GIB)
    found = limit(system, tmp_path, "memory cgroup")
    assert found is not None
    assert (found.where, found.total_bytes, found.free_bytes) == (f"the memory cgroup {group}", 4 * GIB, 3 * GIB)


def test_a_cgroup_above_ours_counts_too(system: System, tmp_path: Path) -> None:
    write(system.proc / "self/cgroup", "0::/pod/container/init")
    add_mount(system, mount(tmp_path / "cg", "cgroup2"))
    cgroup2(tmp_path / "cg/pod/container", "max", 0)
    cgroup2(tmp_path / "cg/pod", str(2 * GIB), GIB)
    assert [found.where for found in system.limits(tmp_path) if "memory cgroup" in found.where] == [
        f"the memory cgroup {tmp_path / 'cg/pod'}"
    ]


def test_the_first_version_of_cgroups_counts_as_well(system: System, tmp_path: Path) -> None:
    write(system.proc / "self/cgroup", "5:cpu,cpuacct:/other\n4:memory:/docker/abc\n0::/")
    add_mount(system, mount(tmp_path / "cpu", "cgroup", "rw,cpu,cpuacct"))
    # In a container the mount begins at its own cgroup.
    add_mount(system, mount(tmp_path / "memory", "cgroup", "rw,memory", root="/docker/abc"))
    write(tmp_path / "memory/memory.limit_in_bytes", str(GIB))
    write(tmp_path / "memory/memory.usage_in_bytes", str(700 * MIB))
    write(tmp_path / "memory/memory.stat", f"inactive_file 1\ntotal_inactive_file {100 * MIB}\ntotal_active_file 0")
    found = limit(system, tmp_path, "memory cgroup")
    assert found is not None
    assert (found.total_bytes, found.free_bytes) == (GIB, GIB - 600 * MIB)


@pytest.mark.parametrize("most", [str(9223372036854771712), "max"])
def test_no_limit_is_none(system: System, tmp_path: Path, most: str) -> None:
    write(system.proc / "self/cgroup", "0::/")
    add_mount(system, mount(tmp_path / "cg", "cgroup2"))
    cgroup2(tmp_path / "cg", most, GIB)
    assert limit(system, tmp_path, "memory cgroup") is None


def test_a_kernel_without_cgroups_has_no_such_limit(system: System, tmp_path: Path) -> None:
    (system.proc / "self/cgroup").unlink()
    assert limit(system, tmp_path, "memory cgroup") is None
    (system.proc / "self/mountinfo").unlink()
    assert limit(system, tmp_path, "this machine") is not None


def test_a_node_that_is_not_there_is_refused_with_those_that_are(system: System, tmp_path: Path) -> None:
    for node in (0, 1):
        text = f"Node {node} MemTotal:  {4 * MIB} kB\nNode {node} MemFree: {MIB} kB\nNode {node} Dirty: 0 kB"
        write(system.sys / f"devices/system/node/node{node}/meminfo", text)
    with pytest.raises(ConfigError, match=r"numa_node is 2, .* only 0, 1"):
        system.limits(tmp_path, 2)
    (found,) = [limit for limit in system.limits(tmp_path, 1) if limit.where == "NUMA node 1"]
    assert (found.total_bytes, found.free_bytes) == (4 * GIB, GIB)


def test_without_numa_all_memory_is_node_zero(system: System, tmp_path: Path) -> None:
    assert len(system.limits(tmp_path, 0)) == 2
    with pytest.raises(ConfigError, match="only 0"):
        system.limits(tmp_path, 1)


def huge(system: System, folder: Path, num_pages: int, free: int, reserved: int) -> None:
    """The folder is on a hugetlbfs, whose pages are as large as this file system's blocks."""
    add_mount(system, mount(folder, "hugetlbfs"))
    page_bytes = folder.stat().st_blksize
    pool = system.sys / f"kernel/mm/hugepages/hugepages-{page_bytes // 1024}kB"
    for name, count in (("nr", num_pages), ("free", free), ("resv", reserved)):
        write(pool / f"{name}_hugepages", str(count))


def test_on_a_hugetlbfs_the_pool_is_the_limit(system: System, tmp_path: Path) -> None:
    assert system.huge_page_bytes(tmp_path) == 0
    huge(system, tmp_path, 10, 8, 3)
    page_bytes = system.huge_page_bytes(tmp_path)
    found = limit(system, tmp_path, "pool of huge pages")
    assert found is not None
    assert (found.total_bytes, found.free_bytes) == (10 * page_bytes, 5 * page_bytes)
    assert limit(system, tmp_path, "this machine") is None


# ---------------------------------------------------------------- what the daemon makes of it


def start(system: System, shm_dir: Path, size_bytes: int, **more: bool | int) -> list[float]:
    """Try to make a region and return for how long was waited."""
    slept: list[float] = []
    config = RamConfig(size_bytes=size_bytes, shm_dir=str(shm_dir), prefault=False, **more)  # type: ignore[arg-type]
    region = create_region(config, shm_dir, 1, system, clock=lambda: sum(slept), sleep=slept.append)
    sizes.append(region.data_bytes)
    region.unlink()
    region.close()
    return slept


sizes: list[int] = []


def test_a_cgroup_too_small_for_the_size_is_refused_at_once_with_both_figures(
    system: System, tmp_path: Path, shm_dir: Path
) -> None:
    add_mount(system, mount(tmp_path / "cg", "cgroup2"))
    cgroup2(tmp_path / "cg", str(GIB), 0)
    with pytest.raises(
        ConfigError, match=rf"ram.size is {GIB} .*cgroup .* {GIB} free of {GIB}.*resources.limits.memory"
    ):
        start(system, shm_dir, GIB)


def test_memory_that_may_come_free_is_waited_for_and_then_done_without(
    system: System, tmp_path: Path, shm_dir: Path
) -> None:
    add_mount(system, mount(tmp_path / "cg", "cgroup2"))
    cgroup2(tmp_path / "cg", str(200 * MIB), 120 * MIB)
    slept = start(system, shm_dir, 32 * MIB)
    assert sum(slept) == pytest.approx(10.0, abs=0.2)
    assert 15 * MIB < sizes[-1] < 16 * MIB
    cgroup2(tmp_path / "cg", str(200 * MIB), 0)
    assert start(system, shm_dir, 32 * MIB) == []
    assert sizes[-1] == 32 * MIB


def test_huge_pages_that_are_not_reserved_are_named(system: System, shm_dir: Path) -> None:
    huge(system, shm_dir, 0, 0, 0)
    with pytest.raises(ConfigError, match=r"pool of huge pages .* 0 free of 0.*vm\.nr_hugepages"):
        start(system, shm_dir, MIB, hugetlb=True)


def test_hugetlb_elsewhere_than_on_a_hugetlbfs_is_refused(system: System, shm_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"ram\.hugetlb needs ram\.shm_dir on a hugetlbfs"):
        start(system, shm_dir, MIB, hugetlb=True)


def test_a_region_may_come_from_node_zero_of_any_machine(system: System, shm_dir: Path) -> None:
    assert start(system, shm_dir, MIB, numa_node=0) == []
