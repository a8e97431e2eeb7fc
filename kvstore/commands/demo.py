"""`kvstore demo`: the whole path on a real model, interrupted on purpose."""

from pathlib import Path
from typing import Annotated, Final

import typer

from kvstore.commands.common import check_engine_is_installed

EXAMPLE: Final = "Example: kvstore demo --report demo-report.json"


def demo(
    report: Annotated[
        Path, typer.Option("--report", metavar="FILE", help="Where the figures are written as JSON.")
    ] = Path("demo-report.json"),
) -> None:
    """Show the whole path on a real model.

    Holds several chat sessions, takes engine, daemon and tiers away one by one, resumes, and compares every token.
    """
    check_engine_is_installed("the demo")
    from kvstore.demo.main import run
    from kvstore.s3server import find_program

    # Before a minute of answers, since it comes into play only after them.
    find_program()
    raise typer.Exit(run(report))
