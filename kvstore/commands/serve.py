"""`kvstore serve`: run the daemon."""

from pathlib import Path
from typing import Annotated, Final

import typer

from kvstore.commands.common import ConfigOption, RunDirOption
from kvstore.events.admission import read_public_keys, read_secret_key
from kvstore.guard import read_token
from kvstore.names import DAEMON_NAMES, check_import_names
from kvstore.settings import Loaded, describe, load

EXAMPLE: Final = "Example: KVSTORE_RAM_SIZE=8GiB kvstore serve --config kvstore.toml"


def serve(
    config: ConfigOption = None,
    run_dir: RunDirOption = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the effective settings as TOML, say where each is from, stop.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record", metavar="FILE", help="Write a trace of the load for 'kvstore replay': lengths and times only."
        ),
    ] = None,
) -> None:
    """Run the daemon.

    SIGTERM or Ctrl-C ends it: what is only in RAM is written down first, up to daemon.drain_deadline.
    """
    loaded = load(config, run_dir=run_dir)
    if print_config:
        typer.echo(_as_toml(loaded))
        return
    check_import_names(DAEMON_NAMES)
    http = loaded.config.http
    if http.enabled and http.token_file:
        read_token(Path(http.token_file))  # to fail here, in front of the user, and not in the API's process
    if loaded.config.events.curve_secret_key_file:
        read_secret_key(loaded.config.events.curve_secret_key_file)
        read_public_keys(loaded.config.events.curve_clients_file)
    if record is not None:
        # Before RAM is taken and tiers are opened, which takes a while.
        from kvstore.record_file import check_record

        check_record(record)
    # Only here: the other commands start faster without it.
    from kvstore.daemon import run

    raise typer.Exit(run(loaded.config, record))


def _as_toml(loaded: Loaded) -> str:
    lines: list[str] = []
    last = ""
    for section, key, value, origin in describe(loaded):
        if section != last:
            lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
            last = section
        lines.append(f"{f'{key} = {value}':<56} # {origin}")
    return "\n".join(lines)
