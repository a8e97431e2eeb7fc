"""Compares kvstore with what one would use instead: LMCache (its storage manager and its daemon), Redis, plain files.

    make bench-peers            or    .venv/bin/python benchmarks/peers/run.py --json peers.json

Every contender is a process of its own, in an environment of its own, and all take turns at every operation of every
round, so that only ratios count and noise hits all alike; who is not on turn is held. The first round does not count.
Durability is the same on both sides of a row. What each does exactly is said at the top of its file.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import table
from contenders import CEILING, ENTRIES, OURS, Entry, Running
from environments import CACHE

from kvstore.bench import machine
from kvstore.commands.common import print_table

_SIZES = {2 << 20: 64, 32 << 20: 8}
# Operations that are over in a moment are done so often in each turn, after one that does not count. The first ones
# find cold caches, by which both sides come closer to each other; an engine that is busy asks all the time.
_AT_ONCE = {"lookup": 20, "ping": 50}
# Threads that slept through their alarms while their process was held get this long to calm down.
_SETTLE_S = 0.02
_BLOCK_TOKENS = 256
_LOOKUP_TOKENS = 131_072


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    report: dict[str, Any] = {"sizes": {}, "left_out": {}}
    with _folders(options.dir, options.shm_dir) as (folder, shm_dir):
        report["machine"] = machine.describe(folder, shm_dir)
        for block_bytes in options.block_bytes or _SIZES:
            num_blocks = options.blocks or _SIZES.get(block_bytes, 64)
            rows, about, left_out = compare(folder, shm_dir, block_bytes, num_blocks, options)
            report["sizes"][str(block_bytes)] = {"blocks": num_blocks, "rows": rows}
            report["about"] = about
            report["left_out"] |= left_out
            print(f"\n{num_blocks} blocks of {block_bytes} bytes, {options.rounds} rounds, medians")
            print_table(*table.lines(rows))
    for name, words in report["about"].items():
        print(f"{name}: {words}")
    for name, why in report["left_out"].items():
        print(f"left out: {name}: {why.splitlines()[0]}")
    report["machine"]["load_average_after"] = list(os.getloadavg())
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def compare(
    folder: Path, shm_dir: Path, block_bytes: int, num_blocks: int, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, str], dict[str, str]]:
    """Return the rows, what each contender is, and why which one was left out."""
    left_out: dict[str, str] = {}
    task = {
        "block_bytes": block_bytes,
        "num_blocks": num_blocks,
        "threads": options.threads,
        "lookup_tokens": options.lookup_tokens,
        "block_tokens": _BLOCK_TOKENS,
        "rounds": options.rounds,
    }
    with contextlib.ExitStack() as stack:
        running = []
        for number, entry in enumerate(_chosen(options.only)):
            name = f"{number}-{block_bytes}"
            one = Running(entry, folder / name, shm_dir / name)
            stack.callback(one.close)
            print(f"starting {entry.column}: {entry.name}", file=sys.stderr, flush=True)
            try:
                one.start(task)
            except (RuntimeError, subprocess.CalledProcessError) as error:
                left_out[entry.name] = str(error)
                continue
            one.hold()
            running.append(one)
        seconds = _in_turns(running, options.rounds, options.pause_s, left_out)
    about = {one.entry.name: one.about for one in running}
    return table.as_json(seconds, block_bytes * num_blocks), about, left_out


def _in_turns(
    running: list[Running], rounds: int, pause_s: float, left_out: dict[str, str]
) -> dict[str, dict[str, list[float]]]:
    seconds: dict[str, dict[str, list[float]]] = {}
    failed: set[tuple[str, str]] = set()
    for group in table.GROUPS:
        print(f"measuring {', '.join(row.title for row in group)}", file=sys.stderr, flush=True)
        for number in range(rounds + 1):
            first = number % max(1, len(running))
            for row in group:
                for one in [*running[first:], *running[:first]]:
                    name = one.entry.name
                    if row.op not in one.ops or (name, group[0].op) in failed:
                        continue
                    try:
                        taken_s = _turn(one, row.op, number, pause_s)
                    except RuntimeError as error:
                        failed.add((name, group[0].op))
                        left_out[f"{name}, {row.title}"] = str(error)
                        seconds.get(row.op, {}).pop(name, None)
                        continue
                    if number:
                        seconds.setdefault(row.op, {}).setdefault(name, []).extend(taken_s)
    return seconds


def _turn(one: Running, op: str, number: int, pause_s: float) -> list[float]:
    """Let that contender alone run, for the operation; return its seconds, several for a quick one, with a pause before
    each."""
    one.go_on()
    try:
        time.sleep(_SETTLE_S)
        if op not in _AT_ONCE:
            return one.run(op, number)
        return one.run(op, number, 1 + _AT_ONCE[op], pause_s)[1:]
    finally:
        one.hold()


def _chosen(only: str) -> list[Entry]:
    columns = [name for name in only.split(",") if name]
    return [entry for entry in ENTRIES if not columns or entry.column in (CEILING, OURS, *columns)]


@contextlib.contextmanager
def _folders(parent: Path, shm_parent: Path) -> Iterator[tuple[Path, Path]]:
    parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="run-", dir=parent) as folder,
        tempfile.TemporaryDirectory(prefix="peers-", dir=shm_parent) as shm_dir,
    ):
        yield Path(folder), Path(shm_dir)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--block-bytes", type=int, action="append", help="default: 2 MiB and 32 MiB")
    parser.add_argument("--blocks", type=int, help="blocks per round; default: 64 of 2 MiB, 8 of 32 MiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=6, help="readers of the disk, on all sides")
    parser.add_argument("--lookup-tokens", type=int, default=_LOOKUP_TOKENS)
    parser.add_argument("--pause-s", type=float, default=0.0, help="quiet before each lookup and each round trip")
    parser.add_argument("--only", default="", help="these peers alone: lmcache, redis, files")
    parser.add_argument("--dir", type=Path, default=CACHE / "runs", help="a folder on the disk to measure")
    parser.add_argument("--shm-dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--json", type=Path, help="where the figures are written for programs")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
