"""`kvstore bench return`: whether sessions are back in RAM before their users are."""

import signal
import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer

from kvstore.bench.returns import ReturnSettings, run
from kvstore.commands.common import JsonOption, print_json, print_table

EXAMPLE: Final = "Example: kvstore bench return --users 3 --turns 2 --json"


def bench_return(
    users: Annotated[
        int, typer.Option("--users", min=1, max=6, help="Users who are predicted; as many announced.")
    ] = 3,
    turns: Annotated[int, typer.Option("--turns", min=1, help="Turns of each that count, after three to learn.")] = 2,
    share: Annotated[
        float, typer.Option("--ram-share", min=0.01, max=0.9, help="prefetch.ram_share of the daemon.")
    ] = 0.25,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="A Hugging Face folder; default: SmolLM2-135M.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure how often a session that lies in S3 alone is in RAM before its user's next turn.

    Runs the reference engine on a real model, a daemon and a real S3 server; takes two minutes, most of it pauses.
    """
    # What was started is ended, too, where somebody ends us.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        settings = ReturnSettings(
            Path(folder),
            num_users=users,
            turns=turns,
            prefetch_share=share,
            engine_arguments=("--model", str(model)) if model is not None else (),
        )
        report = run(settings, lambda text: typer.echo(text, err=True))
    if json:
        print_json(report)
        return
    rows = [[kind, str(report[kind]["turns"]), f"{100 * report[kind]['ready_share']:.0f}%"] for kind in _KINDS]
    print_table(("users", "turns", "in RAM before"), rows)
    typer.echo(
        f"at most {100 * report['most_held_share_of_ram']:.1f}% of RAM waited for users; "
        f"the budget is {100 * report['budget_share_of_ram']:.0f}%"
    )


_KINDS: Final = ("predicted", "announced")
