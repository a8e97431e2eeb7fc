"""What the commands share: options, the client, and output that is a table on a terminal and plain text elsewhere."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore.client import Client
from kvstore.core.errors import ConfigError, ProtocolError
from kvstore.settings import load
from kvstore.wire import ErrorCode

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Configuration file; default: $KVSTORE_CONFIG, or none."),
]
RunDirOption = Annotated[
    Path | None,
    typer.Option("--run-dir", metavar="DIR", help="The daemon's run folder; default: from the configuration."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
TenantOption = Annotated[str, typer.Option("--tenant", help="The tenant that the session belongs to.")]


class Unknown(ProtocolError):
    """What was asked for does not exist; `advice` says where to see what does."""

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(ErrorCode.NOT_FOUND, message)
        self.advice = advice


# Evicting or deleting many blocks takes longer than looking something up.
_DEADLINE_S: Final = 5.0


def connect(run_dir: Path | None, config: Path | None) -> Client:
    """Return a console's client; the configuration is read only where no folder is given."""
    folder = run_dir or Path(load(config).config.daemon.run_dir)
    return Client(folder, name="console", deadline_s=_DEADLINE_S)


def check_engine_is_installed(what: str) -> None:
    """Raise ConfigError where the reference engine's requirements are missing; `what` needs it."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{what} runs the engine, which needs {' and '.join(missing)}: pip install '.[engine]' in a checkout"
        )


def print_json(value: Any) -> None:
    """Print one value as JSON, and nothing else."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2)
    typer.echo(text.decode())


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, console: Console | None = None) -> None:
    """Print a drawn table on a terminal and a plain one elsewhere. Columns of numbers go to the right."""
    console = console or Console()
    if console.is_terminal:
        console.print(drawn_table(columns, rows))
    else:
        typer.echo(plain_table(columns, rows), nl=False)


def drawn_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return the table as a terminal shows it; cells are text, never markup."""
    table = Table()
    for column, right in zip(columns, _numeric(columns, rows), strict=True):
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(clean(cell)) for cell in row))
    return table


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns, each row one line, nothing cut off, '-' for an empty cell."""
    numeric = _numeric(columns, rows)
    lines = [list(columns), *([" ".join(clean(cell).split()) or "-" for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        + "\n"
        for line in lines
    )


def clean(text: str) -> str:
    """Return the text without control characters other than newline and tab: it may come from anyone."""
    return "".join(sign for sign in text if sign.isprintable() or sign in "\n\t")


def _numeric(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    return [
        bool(rows) and all(row[i][:1].isdigit() or row[i] in ("", "-") for row in rows) for i in range(len(columns))
    ]
