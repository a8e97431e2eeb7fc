"""`kvstore bench`: measure this machine, and what kvstore makes of it."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvstore.bench.settings import PARTS, BenchSettings, Sizes
from kvstore.commands import benchplan, benchreturn
from kvstore.commands.common import ConfigOption, JsonOption, print_json, print_table
from kvstore.core.errors import KVStoreError, TierUnavailable
from kvstore.core.units import parse_size
from kvstore.settings import load

EXAMPLE: Final = "Example: kvstore bench tiers --only ram,ssd --block-bytes 2MiB --blocks 64"
app = typer.Typer(help="Measure this machine, and what kvstore makes of it.", epilog=EXAMPLE, no_args_is_help=True)
app.command(epilog=benchplan.EXAMPLE)(benchplan.plan)
app.command("return", epilog=benchreturn.EXAMPLE)(benchreturn.bench_return)
_DEFAULT_SIZES: Final = (("2MiB", 64), ("32MiB", 8))
_DEFAULT_BLOCKS: Final = 64


class BenchFailed(KVStoreError):
    """The machine does not have what the benchmark needs."""


@app.command(epilog=EXAMPLE)
def tiers(
    block_bytes: Annotated[
        str, typer.Option("--block-bytes", metavar="SIZE", help="Size of a block; default: 2MiB and 32MiB.")
    ] = "",
    blocks: Annotated[
        int,
        typer.Option("--blocks", min=0, show_default=False, help="Blocks per round; default: 64 of 2MiB, 8 of 32MiB."),
    ] = 0,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds that count, of each figure.")] = 7,
    only: Annotated[
        str, typer.Option("--only", metavar="PARTS", help=f"Run these parts only: {', '.join(PARTS)}.")
    ] = "",
    catalog_blocks: Annotated[
        int, typer.Option("--catalog-blocks", min=1, help="Blocks of the catalog that a daemon recovers.")
    ] = 1_000_000,
    ssd_dir: Annotated[
        Path | None,
        typer.Option("--ssd-dir", metavar="DIR", help="A folder on the disk to measure; default: where ssd.path lies."),
    ] = None,
    json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Measure every tier against the ceiling of this machine, in one run.

    Takes up to ten minutes, 5 GB of the disk and 2 GB of memory; all of it is given back. A running daemon is not
    used, but would disturb.
    """
    loaded = load(config).config
    sizes = _sizes(block_bytes, blocks)
    parts = _parts(only)
    # Only here: the other commands start faster without them.
    from kvstore.bench import report, tiers

    try:
        with _folders(ssd_dir or Path(loaded.ssd.path).parent, Path(loaded.ram.shm_dir)) as (folder, shm_dir):
            settings = BenchSettings(
                folder,
                shm_dir,
                sizes,
                rounds=rounds,
                parts=parts,
                ssd_threads=loaded.ssd.threads,
                s3_threads=loaded.s3.threads,
                catalog_blocks=catalog_blocks,
            )
            with _Bar() as bar:
                measured = tiers.run(settings, bar)
    except (OSError, MemoryError, TierUnavailable) as error:
        # No daemon of the user's has to do with it, and no fault of ours: the disk or the memory does not suffice.
        raise BenchFailed(
            f"the benchmark cannot go on: {error}; choose another --ssd-dir, or fewer --blocks"
        ) from error
    if json:
        print_json(measured)
        return
    print_table(report.COLUMNS, report.rows(measured))
    for note in report.notes(measured):
        typer.echo(note)


def _sizes(block_bytes: str, blocks: int) -> tuple[Sizes, ...]:
    if not block_bytes:
        return tuple(Sizes(parse_size(text), blocks or count) for text, count in _DEFAULT_SIZES)
    try:
        size_bytes = parse_size(block_bytes)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--block-bytes") from None
    if size_bytes < 1:
        raise typer.BadParameter("a block has at least one byte", param_hint="--block-bytes")
    return (Sizes(size_bytes, blocks or _DEFAULT_BLOCKS),)


def _parts(only: str) -> tuple[str, ...]:
    if not only:
        return PARTS
    parts = tuple(dict.fromkeys(name.strip() for name in only.split(",") if name.strip()))
    if not parts or set(parts) - set(PARTS):
        raise typer.BadParameter(f"{only!r} is not one or several of {', '.join(PARTS)}", param_hint="--only")
    return parts


@contextmanager
def _folders(ssd_parent: Path, shm_parent: Path) -> Iterator[tuple[Path, Path]]:
    """Two fresh folders, removed afterwards."""
    ssd_parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=ssd_parent) as folder,
        tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=shm_parent) as shm_dir,
    ):
        yield Path(folder), Path(shm_dir)


class _Bar:
    """The progress, on standard error, so that standard output stays what was asked for."""

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<22}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=1)

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, part: str, steps: int) -> None:
        self._progress.reset(self._task, total=steps, description=part)

    def step(self, done: float = 1.0) -> None:
        self._progress.advance(self._task, done)
