"""The command `kvstore`: its subcommands, and the one place where faults become exit codes and advice.

0  done
1  a fault
2  wrong usage or configuration
3  the daemon (for `chat`, the engine) does not answer
4  what was asked for does not exist
"""

import sys
from typing import Annotated, Final

import typer

from kvstore.commands import (
    bench,
    calibrate,
    chat,
    demo,
    evict,
    explain,
    plan,
    replay,
    serve,
    sessions,
    simulate,
    stats,
    verify,
)
from kvstore.commands.common import Unknown
from kvstore.core.errors import ConfigError, KVStoreError, ProtocolError, TierUnavailable
from kvstore.version import VERSION
from kvstore.wire import ErrorCode

EXIT_FAULT: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNREACHABLE: Final = 3
EXIT_NOT_FOUND: Final = 4
EXIT_INTERRUPTED: Final = 130

app = typer.Typer(
    name="kvstore",
    help="Keep the KV cache of LLM engines in RAM, SSD and S3, and resume chat sessions from it.",
    epilog="Exit codes: 0 done, 1 fault, 2 usage or configuration, 3 daemon not reachable, 4 not found.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(epilog=serve.EXAMPLE)(serve.serve)
app.command(epilog=stats.EXAMPLE)(stats.stats)
app.add_typer(sessions.app, name="sessions")
app.command(epilog=explain.EXAMPLE)(explain.explain)
app.command(epilog=evict.EXAMPLE)(evict.evict)
app.command(epilog=verify.EXAMPLE)(verify.verify)
app.command(epilog=replay.EXAMPLE)(replay.replay)
app.command(epilog=simulate.EXAMPLE)(simulate.simulate)
app.command(epilog=calibrate.EXAMPLE)(calibrate.calibrate)
app.command(epilog=plan.EXAMPLE)(plan.plan)
app.command(epilog=chat.EXAMPLE)(chat.chat)
app.command(epilog=demo.EXAMPLE)(demo.demo)
app.add_typer(bench.app, name="bench")


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(VERSION)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: kvstore version")
def version() -> None:
    """Print the version."""
    typer.echo(VERSION)


def main() -> None:
    """Run the command line and exit. A fault that nobody foresaw ends with its traceback and EXIT_FAULT."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except KVStoreError as error:
        code, advice = code_and_advice(error)
        typer.echo(f"kvstore: {error}", err=True)
        if advice:
            typer.echo(advice, err=True)
        sys.exit(code)


def code_and_advice(error: KVStoreError) -> tuple[int, str]:
    """Return the exit code of a fault and, where the message does not say it, what to do about it."""
    if isinstance(error, ConfigError):
        return EXIT_USAGE, ""
    if isinstance(error, chat.EngineUnreachable):
        ours = "the reference engine with 'python -m engine.server'"
        return EXIT_UNREACHABLE, f"Is it running? Start it, {ours}, or name it with --engine."
    if isinstance(error, TierUnavailable):
        return EXIT_UNREACHABLE, "Is it running? Start it with 'kvstore serve', or name its folder with --run-dir."
    if isinstance(error, ProtocolError):
        if isinstance(error, Unknown):
            return EXIT_NOT_FOUND, error.advice
        if error.code == ErrorCode.NOT_FOUND:
            return EXIT_NOT_FOUND, "See 'kvstore sessions list' for the sessions that there are."
        if error.code == ErrorCode.VERSION:
            return EXIT_FAULT, f"This is kvstore {VERSION}; the daemon is another version. Restart it."
        if error.code == ErrorCode.BUSY:
            return EXIT_FAULT, "The daemon is busy; try again."
    return EXIT_FAULT, ""
