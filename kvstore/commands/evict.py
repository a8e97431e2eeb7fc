"""`kvstore evict`: empty tiers by hand."""

import contextlib
from typing import Annotated, Final

import typer

from kvstore.commands.common import ConfigOption, JsonOption, RunDirOption, connect, print_json, print_table

EXAMPLE: Final = "Example: kvstore evict --tier ram,ssd"
_TIERS: Final = ("ram", "ssd", "s3")


def evict(
    tier: Annotated[str, typer.Option("--tier", metavar="TIERS", help="ram, ssd, s3, or several with commas.")],
    drop: Annotated[bool, typer.Option("--drop", help="Also free blocks that have no other copy.")] = False,
    json: JsonOption = False,
    run_dir: RunDirOption = None,
    config: ConfigOption = None,
) -> None:
    """Free every copy in these tiers.

    A block that has no copy elsewhere is kept, unless --drop; one that is being read is kept, too. In a bucket that
    several daemons share, s3 takes what this daemon knows of it from all of them: their sessions stay, and what they
    have no copy of is computed anew. To make a bucket smaller, set s3.max_bytes instead.
    """
    tiers = list(dict.fromkeys(name.strip() for name in tier.split(",") if name.strip()))
    wrong = [name for name in tiers if name not in _TIERS]
    if wrong or not tiers:
        raise typer.BadParameter(f"{tier!r} is not one or several of {', '.join(_TIERS)}", param_hint="--tier")
    with contextlib.closing(connect(run_dir, config)) as client:
        done = client.evict(tiers, drop)
    if json:
        print_json({"freed": done.freed, "kept": done.kept})
        return
    rows = [[name, str(done.freed.get(name, 0)), str(done.kept.get(name, 0))] for name in tiers]
    print_table(["tier", "blocks freed", "blocks kept"], rows)
    if any(done.kept.values()) and not drop:
        where = ", ".join(tiers)
        typer.echo(f"Kept is what is in use, and what has no copy but in {where}; --drop frees the latter, too.")
