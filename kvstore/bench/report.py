"""The figures of `kvstore bench tiers` as one table for people."""

from collections.abc import Iterator
from typing import Any, Final

from kvstore.core.units import approximate_size

COLUMNS: Final = ("what", "blocks", "ours", "ceiling", "ratio", "ours, spread")
_HOW: Final = "medians; ratio: ours as a share of the ceiling, same run; spread: slowest to fastest round"


def rows(report: dict[str, Any]) -> list[list[str]]:
    """Return one row per figure, in the order they were measured."""
    return [row for section in ("ram", "ssd", "s3", "lookup", "daemon", "catalog") for row in _rows(section, report)]


def notes(report: dict[str, Any]) -> list[str]:
    """Return what the figures were measured on, and what was left out."""
    machine, settings = report["machine"], report["settings"]
    disk, shm = machine["ssd"], machine["shm"]
    hardware = f"{machine['cpu']}, {machine['cores']} cores, {approximate_size(machine['ram_bytes'])}"
    versions = f"Linux {machine['kernel']}, Python {machine['python']}, kvstore {machine['kvstore']}"
    pages = machine["transparent_hugepages_shm"] or "unknown"
    before, after = machine["load_average"][0], machine["load_average_after"][0]
    lines = [
        f"{hardware}; {versions}",
        f"ssd: {disk['file_system']} on {disk['device']} ({disk['options']})",
        f"region: {shm['file_system']} ({shm['options']}), huge pages: {pages}",
        f"load average {before:.2f} before, {after:.2f} after; {settings['rounds']} rounds; {_HOW}",
    ]
    for name in ("ram", "ssd", "s3", "lookup"):
        section = report.get(name, {})
        lines += [f"{name}: {key.replace('_', ' ')}: {section[key]}" for key in section if key.endswith("skipped")]
    return lines


def _rows(section: str, report: dict[str, Any]) -> Iterator[list[str]]:
    figures = report.get(section, {})
    for size, parts in figures.get("sizes", {}).items():
        for name, part in parts.items():
            if isinstance(part, dict) and "ceilings" in part:
                yield _compared(f"{section} {name}", size, part)
            elif isinstance(part, dict) and "gb_per_s" in part:
                yield [f"{section} {name}", size, _speed(part), "", "", _spread(part)]
    if section == "ssd" and "churn" in figures:
        size = approximate_size(figures["churn"]["block_bytes"])
        for name in ("churn", "churn_with_eviction"):
            yield _compared(f"ssd {name}", size, figures["churn"][name])
        yield ["ssd peak", "", approximate_size(figures["peak_bytes"]), approximate_size(figures["max_bytes"]), "", ""]
    if section == "lookup" and figures:
        for key in ("p50_ms", "p99_ms", "keys_p50_ms", "ping_p50_ms", "loaded_p50_ms", "loaded_p99_ms"):
            if key in figures:
                yield [f"lookup {key.removesuffix('_ms')}", "", f"{figures[key]:.3f} ms", "", "", ""]
    if section == "catalog" and figures:
        blocks = f"{figures['blocks']:,}"
        yield ["catalog recovered after", blocks, f"{figures['recover_s']:.2f} s", "", "", ""]
        yield ["catalog memory", blocks, f"{figures['rss_mib']:.0f} MiB", "", "", ""]


def _compared(name: str, size: str, part: dict[str, Any]) -> list[str]:
    ceiling = part["ceilings"][part["ceiling"]]
    return [
        name,
        size,
        _speed(part["ours"]),
        f"{_speed(ceiling)} {part['ceiling']}",
        f"{part['ratio']:.2f}",
        _spread(part["ours"]),
    ]


def _speed(timing: dict[str, Any]) -> str:
    return f"{timing['gb_per_s']:.3f} GB/s"


def _spread(timing: dict[str, Any]) -> str:
    slowest, fastest = (timing["bytes"] / timing[key] / 1e9 for key in ("max_s", "min_s"))
    return f"{slowest:.3f} to {fastest:.3f}"
