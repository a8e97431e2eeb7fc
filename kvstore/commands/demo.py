"""`kvstore demo`: the whole path on a real model, interrupted on purpose."""

import importlib.util
from pathlib import Path
from typing import Annotated, Final

import typer

from kvstore.core.errors import ConfigError

EXAMPLE: Final = "Example: kvstore demo --report demo-report.json"


def demo(
    report: Annotated[
        Path, typer.Option("--report", metavar="FILE", help="Where the figures are written as JSON.")
    ] = Path("demo-report.json"),
) -> None:
    """Show the whole path on a real model.

    Holds several chat sessions, takes engine, daemon and tiers away one by one, resumes, and compares every token.
    """
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the demo runs the engine, which needs {' and '.join(missing)}: pip install 'tiered-kvstore[engine]', "
            "or run 'make demo' in a checkout"
        )
    from kvstore.demo.main import run

    raise typer.Exit(run(report))
