"""`kvstore explain`: what was decided for a request, why, and what came of it."""

import contextlib
import time
from collections.abc import Sequence
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from kvstore.client import Client
from kvstore.commands.common import (
    ConfigOption,
    JsonOption,
    RunDirOption,
    Unknown,
    clean,
    connect,
    print_json,
    print_table,
)
from kvstore.commands.decision_text import explained, seconds
from kvstore.core.errors import ProtocolError
from kvstore.decision_json import as_json
from kvstore.wire import DecisionView, ErrorCode
from policies.decision import Decision

EXAMPLE: Final = "Example: kvstore explain chatcmpl-5f0c1e2d3b4a59687786950a"
_COLUMNS: Final = (
    "request", "age", "tokens", "cached blocks", "chosen", "why", "predicted", "real", "ttft", "regret", "saved"
)  # fmt: skip


def explain(
    request: Annotated[
        str | None,
        typer.Argument(
            metavar="[REQUEST]",
            help="The 'id' of the engine's answer, or as much of it as no other has; none: the last ones.",
        ),
    ] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only this tenant's; default: all.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="At most this many, newest first.")] = 20,
    json: JsonOption = False,
    run_dir: RunDirOption = None,
    config: ConfigOption = None,
) -> None:
    """Explain what the engine did for a request: load cached blocks, compute them, or both at once.

    Shows where the prompt's blocks lay, which plans were compared with their predicted seconds, what was chosen and
    why, what happened, and the regret: how much sooner the first token would have come by the best plan, with what is
    known now. Without REQUEST the last requests as a table, in seconds: predicted and real from the decision on,
    ttft from the arrival. The daemon knows the last 1,000 since it began.
    """
    with contextlib.closing(connect(run_dir, config)) as client:
        if request is not None:
            _show(_get(client, request, tenant), json)
            return
        views, total = client.decision_list(tenant, limit)
    if json:
        print_json({"decisions": [as_json(view) for view in views], "total": total})
        return
    if not views:
        typer.echo(_none_because(tenant), err=True)
        return
    now_s = time.time()
    print_table(_COLUMNS, [_row(view, now_s) for view in views])
    if total > len(views):
        typer.echo(f"{len(views)} of {total}; see more with --limit", err=True)


def _get(client: Client, request: str, tenant: str | None) -> DecisionView:
    try:
        return client.decision_get(request, tenant)
    except ProtocolError as error:
        if error.code != ErrorCode.NOT_FOUND:
            raise
        raise Unknown(str(error), "See 'kvstore explain' for the requests that it knows.") from None


def _none_because(tenant: str | None) -> str:
    whose = "" if tenant is None else f" of tenant {clean(tenant)!r}"
    return (
        f"no request{whose} is known: an engine tells of each a moment after its first token, but not of those that "
        "were pinned to 'recompute', and a daemon forgets them when it ends"
    )


def _show(view: DecisionView, json: bool) -> None:
    console = Console(soft_wrap=True)
    if json:
        print_json(as_json(view))
    elif console.is_terminal:
        console.print(_coloured(explained(view)), end="")
    else:
        typer.echo(explained(view), nl=False)


def _coloured(text: str) -> Text:
    """Return the text with its bars and what matters most in colour."""
    shown = Text(text)
    shown.highlight_regex(r"(?m)(?<=^  lay in   ).*$", "cyan")
    shown.highlight_regex(r"(?m)(?<=^  planned  ).*$", "yellow")
    shown.highlight_regex(r"(?m)(?<=^  done     ).*$", "green")
    shown.highlight_regex(r"(?m)^.*<- chosen$|^Chosen: .*$|^  regret: .*$", "bold")
    return shown


def _row(view: DecisionView, now_s: float) -> list[str]:
    age = f"{max(0.0, now_s - view.reported_s):.0f}s"
    decision = view.decision
    if decision is None:
        return [view.id, age, str(view.prompt_tokens), "", "", "", "", "", seconds(view.ttft_s, ""), "", ""]
    chosen, happened = decision.chosen, decision.happened
    return [
        view.id,
        age,
        str(view.prompt_tokens),
        _cached(decision),
        chosen.kind,
        decision.why,
        seconds(chosen.seconds, "") if chosen.seconds > 0 else "",
        "" if happened is None else seconds(happened.ttft_s - happened.waited_s, ""),
        seconds(view.ttft_s, ""),
        "" if decision.regret_s is None else seconds(decision.regret_s, ""),
        seconds(view.saved_prefill_s, ""),
    ]


def _cached(decision: Decision) -> str:
    situation = decision.situation
    parts: Sequence[str] = [f"{run.blocks} {run.tier.label}" for run in situation.cached[:4]]
    more = ["…"] if len(situation.cached) > len(parts) else []
    resident = [f"{situation.resident_blocks} hbm"] if situation.resident_blocks else []
    return " + ".join([*resident, *parts, *more])
