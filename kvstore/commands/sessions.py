"""`kvstore sessions`: list, show, pin, unpin, prefetch and delete chat sessions."""

import contextlib
import time
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
import typer

from kvstore.commands.common import (
    ConfigOption,
    JsonOption,
    RunDirOption,
    TenantOption,
    clean,
    connect,
    print_json,
    print_table,
)
from kvstore.core.errors import ProtocolError
from kvstore.wire import ErrorCode, SessionView

app = typer.Typer(
    help="List, show, pin, prefetch and delete chat sessions.",
    epilog="Example: kvstore sessions list",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_UNITS: Final = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The session's id, as 'sessions list' shows it.")]
IdsArgument = Annotated[list[str], typer.Argument(metavar="ID...", help="One or several session ids.")]


@app.command("list", epilog="Example: kvstore sessions list --json | jq -r '.sessions[].id'")
def list_sessions(
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only this tenant's; default: all.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="At most this many, newest first.")] = 100,
    json: JsonOption = False,
    run_dir: RunDirOption = None,
    config: ConfigOption = None,
) -> None:
    """List sessions, without what was said in them."""
    with contextlib.closing(connect(run_dir, config)) as client:
        found = client.session_list(tenant, limit)
    if json:
        print_json({"sessions": [_summary(view) for view in found.sessions], "total": found.total})
        return
    if not found.sessions:
        typer.echo(_none_because(tenant), err=True)
        return
    columns = ["id", "tenant", "model", "messages", "tokens", "durable", "pinned", "last turn", "expires in"]
    print_table(columns, [_row(view, time.time()) for view in found.sessions])
    if found.total > len(found.sessions):
        typer.echo(f"{len(found.sessions)} of {found.total}; see more with --limit", err=True)


@app.command(epilog="Example: kvstore sessions show chat-1f2e3d4c")
def show(
    session_id: IdArgument,
    tenant: TenantOption = "",
    json: JsonOption = False,
    run_dir: RunDirOption = None,
    config: ConfigOption = None,
) -> None:
    """Show one session with what was said in it, where the engine hands over text (vLLM does not)."""
    with contextlib.closing(connect(run_dir, config)) as client:
        view = client.session_get(session_id, tenant)
    if view is None:
        raise ProtocolError(ErrorCode.NOT_FOUND, f"there is no session {session_id!r}")
    if json:
        print_json(_summary(view) | {"messages": view.messages})
        return
    for name, value in _facts(view, time.time()):
        typer.echo(f"{name + ':':<13}{clean(value)}")
    for message in view.messages:
        # vLLM's connector hands over token ids and no text.
        said = clean(message.content) if message.content else "(no text is kept)"
        typer.echo(f"\n{clean(message.role)} ({len(message.token_ids)} tokens)\n{said}")


@app.command(epilog="Example: kvstore sessions pin chat-1f2e3d4c")
def pin(
    session_ids: IdsArgument, tenant: TenantOption = "", run_dir: RunDirOption = None, config: ConfigOption = None
) -> None:
    """Keep sessions beyond their time to live, and their blocks in RAM and on SSD.

    The blocks stay for sessions.pin_for after the last turn, as far as ram.pin_share and ssd.pin_share allow.
    """
    _set_pinned(session_ids, True, tenant, run_dir, config)


@app.command(epilog="Example: kvstore sessions unpin chat-1f2e3d4c")
def unpin(
    session_ids: IdsArgument, tenant: TenantOption = "", run_dir: RunDirOption = None, config: ConfigOption = None
) -> None:
    """Undo 'pin'."""
    _set_pinned(session_ids, False, tenant, run_dir, config)


@app.command(epilog="Example: kvstore sessions prefetch chat-1f2e3d4c")
def prefetch(
    session_ids: IdsArgument, tenant: TenantOption = "", run_dir: RunDirOption = None, config: ConfigOption = None
) -> None:
    """Bring sessions into RAM that are about to go on."""
    with contextlib.closing(connect(run_dir, config)) as client:
        for session_id in session_ids:
            begun = client.session_prefetch(session_id, tenant)
            typer.echo(f"{clean(session_id)}: {begun.blocks_to_load} of {begun.blocks} blocks are brought into RAM")


@app.command(epilog="Example: kvstore sessions delete chat-1f2e3d4c")
def delete(
    session_ids: IdsArgument, tenant: TenantOption = "", run_dir: RunDirOption = None, config: ConfigOption = None
) -> None:
    """Delete sessions and their blocks, for good.

    Blocks that other sessions share stay; all others are deleted in every tier, the bucket included.
    """
    with contextlib.closing(connect(run_dir, config)) as client:
        for session_id in session_ids:
            done = client.session_delete(session_id, tenant)
            typer.echo(
                f"deleted {clean(session_id)}: {done.blocks_deleted} blocks freed, "
                f"{done.blocks_shared} kept for other sessions"
            )


def _set_pinned(
    session_ids: Sequence[str], pinned: bool, tenant: str, run_dir: RunDirOption, config: ConfigOption
) -> None:
    with contextlib.closing(connect(run_dir, config)) as client:
        for session_id in session_ids:
            client.session_pin(session_id, pinned, tenant)
            typer.echo(f"{'pinned' if pinned else 'unpinned'} {clean(session_id)}")


def _none_because(tenant: str | None) -> str:
    whose = "" if tenant is None else f" of tenant {clean(tenant)!r}"
    return (
        f"there is no session{whose}: one begins with a chat request that names a session_id ('kvstore chat' does), "
        "and ends when it is deleted or its time to live is over"
    )


def _row(view: SessionView, now_s: float) -> list[str]:
    return [
        view.id,
        view.tenant,
        view.model,
        str(view.num_messages),
        str(view.num_tokens),
        view.durable,
        "yes" if view.pinned else "no",
        f"{_span(now_s - view.last_turn_s)} ago",
        "never" if view.expires_s is None else _span(view.expires_s - now_s),
    ]


def _facts(view: SessionView, now_s: float) -> list[tuple[str, str]]:
    return [
        ("id", view.id),
        ("tenant", view.tenant or "-"),
        ("model", view.model),
        ("namespace", view.namespace),
        ("revision", str(view.revision)),
        ("tokens", f"{view.num_tokens} in {view.num_blocks} blocks"),
        ("durable", view.durable),
        ("pinned", "yes" if view.pinned else "no"),
        ("last turn", f"{_span(now_s - view.last_turn_s)} ago"),
        ("expires in", "never" if view.expires_s is None else _span(view.expires_s - now_s)),
        ("forked from", view.forked_from or "-"),
    ]


def _summary(view: SessionView) -> dict[str, Any]:
    fields = msgspec.structs.asdict(view)
    del fields["messages"]
    return fields


def _span(span_s: float) -> str:
    """A span for people, in its largest unit: `3h`."""
    for unit, unit_s in _UNITS:
        if span_s >= unit_s:
            return f"{int(span_s // unit_s)}{unit}"
    return "0s"
