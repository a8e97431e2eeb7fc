"""`kvstore chat`: a chat in the terminal that shows, turn by turn, where the prompt's KV came from.

Covers: reading lines, streaming replies over the engine's OpenAI-style API. Does not cover: sessions themselves,
which the engine and the daemon keep: the reference engine is sent nothing but the new message and the session's id.
vLLM keeps no text; it reads the id in `kv_transfer_params` and is sent the whole conversation, which ends with us.
"""

import contextlib
import secrets
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import msgspec
import typer

from kvstore.client import Client
from kvstore.commands.common import ConfigOption, RunDirOption, TenantOption, clean, connect
from kvstore.core.errors import ConfigError, KVStoreError, ProtocolError, TierUnavailable
from kvstore.wire import ErrorCode

EXAMPLE: Final = "Example: kvstore chat --session chat-1f2e3d4c"
DEFAULT_ENGINE: Final = "http://127.0.0.1:8000"
_TIERS: Final = ("hbm", "ram", "ssd", "s3")
# The first token of a long prompt on a CPU takes a while; between tokens it is quicker.
_TIMEOUT: Final = httpx.Timeout(connect=5.0, read=600.0, write=10.0, pool=5.0)


class EngineUnreachable(TierUnavailable):
    """Nobody answers at the engine's address. The daemon may well run."""


@dataclass(slots=True)
class _Talk:
    """`said`: the messages of this chat. `is_kept`: as far as we know the engine has them and wants but the new one."""

    session: str
    said: list[dict[str, str]] = field(default_factory=list)
    is_kept: bool = True


def chat(
    engine: Annotated[str, typer.Option("--engine", metavar="URL", help="The engine's address.")] = DEFAULT_ENGINE,
    session: Annotated[
        str, typer.Option("--session", metavar="ID", help="Resume this session; default: a new one.")
    ] = "",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="The longest reply.")] = 256,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help="Holds the engine's API key, if it wants one.")
    ] = None,
    tenant: TenantOption = "",
    run_dir: RunDirOption = None,
    config: ConfigOption = None,
) -> None:
    """Chat with the model.

    Each reply is followed by how many prompt tokens came from which tier, how many were recomputed, and the time
    to the first token. Ctrl-C stops a reply; at the prompt it ends the chat, as Ctrl-D does.
    """
    if not engine.startswith(("http://", "https://")):
        raise typer.BadParameter(f"{engine!r} is no address; example: {DEFAULT_ENGINE}", param_hint="--engine")
    headers = {"accept": "text/event-stream"}
    if api_key_file is not None:
        headers["authorization"] = f"Bearer {_read_key(api_key_file)}"
    if session:
        _recall(session, tenant, connect(run_dir, config))
    session = session or f"chat-{secrets.token_hex(4)}"
    typer.echo(f"session {clean(session)}", err=True)
    with httpx.Client(base_url=engine, timeout=_TIMEOUT, headers=headers) as http:
        talk = _Talk(session)
        for message in _messages():
            _turn(http, talk, message, max_tokens)
    session = talk.session
    if not talk.is_kept:
        typer.echo(f"session {clean(session)} keeps no text with this engine: this chat cannot be resumed", err=True)
        return
    options = {"--session": session, "--engine": "" if engine == DEFAULT_ENGINE else engine, "--tenant": tenant}
    options |= {
        "--run-dir": str(run_dir or ""),
        "--config": str(config or ""),
        "--api-key-file": str(api_key_file or ""),
    }
    given = shlex.join(word for name, value in options.items() if value for word in (name, clean(value)))
    typer.echo(f"resume with: kvstore chat {given}", err=True)


def _read_key(path: Path) -> str:
    """Return the first key of a file such as the engine reads: a key a line, with its tenant if it has one."""
    try:
        lines = path.read_text("ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file: cannot read {path}: {error}") from None
    for line in lines:
        if words := line.partition("#")[0].split():
            return words[0]
    raise ConfigError(f"--api-key-file: {path} holds no key")


def _recall(session: str, tenant: str, client: Client) -> None:
    """Say what the session is; that it is unknown or the daemon is down stops nobody."""
    try:
        view = client.session_get(session, tenant)
    except KVStoreError as error:
        typer.echo(f"the daemon cannot be asked about the session: {error}", err=True)
        return
    finally:
        client.close()
    if view is None:
        typer.echo(f"there is no session {session!r} yet: it begins now", err=True)
        return
    typer.echo(f"{view.num_messages} messages, {view.num_tokens} tokens, durable: {view.durable}", err=True)
    if any(not message.content for message in view.messages):
        typer.echo("its engine keeps no text: the model knows nothing of what was said, and begins anew", err=True)
    for message in view.messages[-2:]:
        typer.echo(f"{clean(message.role)}> {clean(message.content)}")


def _messages() -> Iterator[str]:
    """Yield what the user says until the end of input; on a terminal with line editing."""
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() its history and editing
    while True:
        try:
            line = input("you> " if interactive else "")
        except (EOFError, KeyboardInterrupt):
            if interactive:
                typer.echo()
            return
        if line.strip():
            yield line


def _turn(http: httpx.Client, talk: _Talk, message: str, max_tokens: int) -> None:
    """Send one message, print the reply as it comes; keep in `talk` what was said and where the session goes on."""
    new = {"role": "user", "content": message}
    body = {
        "messages": [new] if talk.is_kept else [*talk.said, new],
        "session_id": talk.session,
        "session_mode": "append",
        # Where vLLM looks for it.
        "kv_transfer_params": {"session_id": talk.session, "hints": {"expect_followup": True}},
        "max_tokens": max_tokens,
        "stream": True,
    }
    report: dict[str, Any] = {}
    reply: list[str] = []
    try:
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise _refusal(response)
            for event in _events(response):
                if "error" in event:
                    raise ProtocolError(ErrorCode.INTERNAL, f"the engine failed: {_message(event)}")
                for choice in event.get("choices", []):
                    reply.append((choice.get("delta") or {}).get("content") or "")
                    typer.echo(clean(reply[-1]), nl=False)
                report = event.get("kvstore") or report
    except KeyboardInterrupt:
        typer.echo("\n(stopped; this turn is not part of the session)", err=True)
        return
    except httpx.TransportError as error:
        if reply:
            typer.echo("\n(cut off; say it again, this turn may not be part of the session)", err=True)
        raise EngineUnreachable(f"the engine at {http.base_url} does not answer: {error}") from None
    typer.echo()
    typer.echo(_summary(report))
    talk.said += [new, {"role": "assistant", "content": "".join(reply)}]
    talk.is_kept = bool(report)
    talk.session = _follow(report, talk.session)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the JSON of each server-sent event."""
    for line in response.iter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            try:
                yield msgspec.json.decode(data, type=dict[str, Any])
            except msgspec.DecodeError:
                raise ProtocolError(ErrorCode.MALFORMED, "the engine sent an event that is no JSON") from None


def _refusal(response: httpx.Response) -> ProtocolError:
    try:
        message = _message(msgspec.json.decode(response.content, type=dict[str, Any]))
    except msgspec.DecodeError:
        message = response.reason_phrase
    if response.status_code == 404 and message == response.reason_phrase:
        # Not a word about the session: there is no such route.
        host = f"{response.url.scheme}://{response.url.netloc.decode()}"
        raise ProtocolError(
            ErrorCode.BAD_REQUEST, f"{host} has no {response.url.path}: is --engine an engine's address?"
        )
    code = ErrorCode.NOT_FOUND if response.status_code == 404 else ErrorCode.BAD_REQUEST
    return ProtocolError(code, f"the engine refused ({response.status_code}): {clean(message)}")


def _message(body: dict[str, Any]) -> str:
    error = body.get("error")
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _summary(report: dict[str, Any]) -> str:
    if not report:
        return "[the engine reported nothing about its cache; 'kvstore explain' may know more]"
    served = report.get("served_tokens") or {}
    tiers = ", ".join(f"{tier} {served.get(tier, 0)}" for tier in _TIERS)
    return (
        f"[prompt {report.get('prompt_tokens', 0)} tokens: {tiers}; recomputed {report.get('recomputed_tokens', 0)}; "
        f"first token {float(report.get('ttft_s') or 0):.2f} s]"
    )


def _follow(report: dict[str, Any], session: str) -> str:
    if report.get("session_saved") is False:
        typer.echo("this turn could not be saved: after a restart the session ends before it", err=True)
    following = str(report.get("session_id") or session)
    if following != session:
        typer.echo(f"the session went on elsewhere meanwhile; this branch is now {clean(following)}", err=True)
    return following
