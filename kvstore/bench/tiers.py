"""`kvstore bench tiers`: runs the parts one after the other and puts their figures together.

Form of the result: one section per part; the keys that docs/benchmarks.md names stand directly in it, and where
blocks of several sizes were measured they are the worst of them, with all under `sizes`. A part that cannot run here
says why under `skipped`, and the others go on.
"""

import importlib.util
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

from kvstore.bench import catalog, churn, flow, lookup, machine, ram, s3, ssd
from kvstore.bench.samples import Compared, worst
from kvstore.bench.settings import MIB, BenchSettings, Sizes
from kvstore.core.errors import ConfigError
from kvstore.core.units import format_size

# Of one round of a part, against each other: what the progress bar expects.
_CHURN_STEPS = 10
_CATALOG_STEPS = 30
_MAX_CHURN_BLOCK_BYTES = 2 * MIB


class Progress(Protocol):
    """Shows how far a run has come."""

    def begin(self, part: str, steps: int) -> None: ...

    def step(self, done: float = 1.0) -> None:
        """`done` more steps of the part are over."""
        ...


def run(settings: BenchSettings, progress: Progress) -> dict[str, Any]:
    """Measure the chosen parts. Raises KVStoreError where a part fails for a reason of its own."""
    report: dict[str, Any] = {
        "machine": machine.describe(settings.folder, settings.shm_dir),
        "settings": {
            "rounds": settings.rounds,
            "sizes": {format_size(one.block_bytes): one.num_blocks for one in settings.sizes},
            "ssd_threads": settings.ssd_threads,
            "s3_threads": settings.s3_threads,
            "parts": list(settings.parts),
        },
    }
    with ExitStack() as stack:
        where: dict[str, str] | None = None
        no_server = ""
        if {"s3", "lookup", "daemon"} & set(settings.parts):
            progress.begin("S3 server", 1)
            try:
                _, where = stack.enter_context(s3.server(settings.folder))
            except ConfigError as error:
                no_server = str(error)
            progress.step()
        if "ram" in settings.parts:
            report["ram"] = _ram(settings, progress)
        if "ssd" in settings.parts:
            report["ssd"] = _ssd(settings, progress)
        if "s3" in settings.parts:
            report["s3"] = {"skipped": no_server} if where is None else _s3(settings, where, progress)
        if "lookup" in settings.parts:
            halves = 1 if where is None else 2
            progress.begin("lookup", halves * (settings.lookup_rounds + 1))
            report["lookup"] = lookup.measure(settings, where, progress.step)
        if "daemon" in settings.parts:
            report["daemon"] = {"sizes": _through_daemon(settings, where, progress)}
    if "catalog" in settings.parts:
        progress.begin("catalog", _CATALOG_STEPS)
        report["catalog"] = catalog.measure(settings, _in_steps(progress, _CATALOG_STEPS))
    report["machine"]["load_average_after"] = list(os.getloadavg())
    return report


def _ram(settings: BenchSettings, progress: Progress) -> dict[str, Any]:
    results = {}
    for sizes in settings.sizes:
        progress.begin(f"ram, {format_size(sizes.block_bytes)}", settings.rounds + 1)
        results[sizes] = ram.measure(settings, sizes, progress.step)
    section = _worst_first(results)
    if importlib.util.find_spec("torch") is None:
        return section | {"paged_skipped": "torch is not installed here; only the engine has it"}
    from kvstore.bench import paged

    pools = {}
    for sizes in settings.sizes:
        progress.begin(f"paged pool, {format_size(sizes.block_bytes)}", settings.rounds + 1)
        try:
            pools[sizes] = paged.measure(settings, sizes, progress.step)
        except ValueError as error:
            return section | {"paged_skipped": str(error)}
    paged_section = _worst_first(pools)
    for name, figures in paged_section.pop("sizes").items():
        section["sizes"][name] |= figures
    ratio = min(paged_section.values())
    return section | paged_section | {"paged_ratio": ratio}


def _ssd(settings: BenchSettings, progress: Progress) -> dict[str, Any]:
    results, facts = {}, {}
    for sizes in settings.sizes:
        progress.begin(f"ssd, {format_size(sizes.block_bytes)}", settings.rounds + 1)
        results[sizes], facts[sizes] = ssd.measure(settings, sizes, progress.step)
    section = _worst_first(results)
    for sizes, known in facts.items():
        section["sizes"][format_size(sizes.block_bytes)] |= known
    progress.begin("ssd, ten turnovers", _CHURN_STEPS)
    block_bytes = min([*(one.block_bytes for one in settings.sizes), _MAX_CHURN_BLOCK_BYTES])
    turned, bytes_seen = churn.measure(settings, block_bytes, _in_steps(progress, _CHURN_STEPS))
    section |= {f"{name}_ratio": one.ratio for name, one in turned.items()}
    section |= {name: bytes_seen[name] for name in ("peak_bytes", "max_bytes")}
    return section | {"churn": bytes_seen | {name: one.as_json() for name, one in turned.items()}}


def _s3(settings: BenchSettings, where: dict[str, str], progress: Progress) -> dict[str, Any]:
    results = {}
    for sizes in settings.sizes:
        progress.begin(f"s3, {format_size(sizes.block_bytes)}", settings.rounds + 1)
        results[sizes] = s3.measure(settings, sizes, where, progress.step)
    return _worst_first(results)


def _through_daemon(settings: BenchSettings, where: dict[str, str] | None, progress: Progress) -> dict[str, Any]:
    results = {}
    for sizes in settings.sizes:
        name = format_size(sizes.block_bytes)
        progress.begin(f"daemon, {name}", settings.rounds + 1)
        results[name] = flow.as_json(flow.measure(settings, sizes, where, progress.step))
    return results


def _worst_first(results: Mapping[Sizes, Mapping[str, Compared]]) -> dict[str, Any]:
    """Return the worst ratio of each part, and all figures by size."""
    parts = next(iter(results.values()))
    section: dict[str, Any] = {
        f"{part}_ratio": worst({format_size(size.block_bytes): one[part] for size, one in results.items()})
        for part in parts
    }
    section["sizes"] = {
        format_size(sizes.block_bytes): {
            **{f"{part}_ratio": compared.ratio for part, compared in result.items()},
            **{part: compared.as_json() for part, compared in result.items()},
        }
        for sizes, result in results.items()
    }
    return section


def _in_steps(progress: Progress, steps: int) -> Callable[[float], None]:
    """Turn "so far, from 0 to 1" into steps."""
    so_far = 0.0

    def on_step(done: float) -> None:
        nonlocal so_far
        progress.step((done - so_far) * steps)
        so_far = done

    return on_step
