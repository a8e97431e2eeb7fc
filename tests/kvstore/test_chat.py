"""`kvstore chat` against an engine that answers as it is told."""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvstore import wire
from kvstore.commands import chat as chat_command
from kvstore.connectors.vllm_parts.wishes import Wishes, read
from kvstore.core.errors import TierUnavailable
from tests.engine.fakes import FakeStore
from tests.engine.serving import serving
from tests.support.commands import Run, client, run
from tests.support.consoles import FakeClient, session

__all__ = ["client", "run"]


class Engine(BaseHTTPRequestHandler):
    """Answers chats as the engine does: streamed words, then a chunk with the session and the figures."""

    asked: list[dict[str, Any]]
    authorizations: list[str | None]
    status = 200
    # vLLM's answers say nothing of sessions and caches.
    reports = True
    # The connection ends before the answer does.
    is_cut = False

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(body)
        self.authorizations.append(self.headers["authorization"])
        report = {
            "session_id": body["session_id"] if len(self.asked) == 1 else "forked",
            "prompt_tokens": 48,
            "served_tokens": {"hbm": 0, "ram": 32, "ssd": 0, "s3": 0},
            "recomputed_tokens": 16,
            "ttft_s": 0.256,
        }
        events: list[Any] = [
            {"choices": [{"delta": {"role": "assistant"}}]},
            {"choices": [{"delta": {"content": "Hello\x1b[2J"}}]},
            {"choices": [{"delta": {"content": " you"}}]},
            {"choices": [{"delta": {}, "finish_reason": "stop"}]} | ({"kvstore": report} if self.reports else {}),
        ]
        if self.status == 200:
            data = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        else:
            data = json.dumps({"error": {"message": "too many tokens"}})
        self.send_response(self.status)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(data.encode()) + (100 if self.is_cut else 0)))
        self.end_headers()
        self.wfile.write(data.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[tuple[type[Engine], str]]:
    handler = type("Handler", (Engine,), {"asked": [], "authorizations": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield handler, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[..., contextlib.AbstractContextManager[None]]:
    """Puts lines on standard input."""

    @contextlib.contextmanager
    def say(*lines: str) -> Iterator[None]:
        reading, writing = os.pipe()
        with open(writing, "w") as pipe:
            pipe.write("".join(f"{line}\n" for line in lines))
        with open(reading) as stdin, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", stdin)
            yield

    return say


def test_a_chat_streams_replies_and_shows_where_the_prompt_came_from(
    run: Run, engine: tuple[type[Engine], str], say: Any
) -> None:
    handler, url = engine
    with say("hi", "", "again"):
        ran = run("chat", "--engine", url, "--session", "a", "--max-tokens", "8")
    assert ran.code == 0
    assert ran.out.count("Hello[2J you\n") == 2
    figures = "[prompt 48 tokens: hbm 0, ram 32, ssd 0, s3 0; recomputed 16; first token 0.26 s]"
    assert figures in ran.out.splitlines()
    assert "2 messages, 4 tokens" in ran.err
    assert [body["messages"] for body in handler.asked] == [
        [{"role": "user", "content": "hi"}],
        [{"role": "user", "content": "again"}],
    ]
    assert handler.asked[0]["max_tokens"] == 8


def test_a_chat_tells_vllm_everything_each_time_and_its_session_where_it_looks(
    run: Run, engine: tuple[type[Engine], str], say: Any
) -> None:
    handler, url = engine
    handler.reports = False
    with say("one", "two"):
        ran = run("chat", "--engine", url, "--session", "new")
    assert [body["kv_transfer_params"]["session_id"] for body in handler.asked] == ["new", "new"]
    assert [message["content"] for message in handler.asked[1]["messages"]] == ["one", "Hello\x1b[2J you", "two"]
    assert [message["role"] for message in handler.asked[1]["messages"]] == ["user", "assistant", "user"]
    assert read(handler.asked[0]["kv_transfer_params"]) == (Wishes("new", expect_followup=True), [])
    assert "resume with" not in ran.err and "cannot be resumed" in ran.err


def test_the_reference_engine_takes_what_a_chat_sends(run: Run, say: Any) -> None:
    """It refused the field in which vLLM finds the session, and with it every chat."""
    store = FakeStore()
    with serving(store) as served, say("one", "two"):
        ran = run("chat", "--engine", str(served.http.base_url), "--session", "mine", "--max-tokens", "5")
        served.rest()
    assert ran.code == 0, ran.err
    assert ran.out.count("[prompt ") == 2 and "resume with: kvstore chat --session mine" in ran.err


def test_a_session_without_text_is_said_to_begin_anew(
    run: Run, client: FakeClient, engine: tuple[type[Engine], str], say: Any
) -> None:
    client.sessions["a"] = session("a", messages=[wire.ChatMessage("turn", "", [1, 2, 3])], num_messages=1)
    with say():
        assert "begins anew" in run("chat", "--engine", engine[1], "--session", "a").err
    with say():
        assert "begins anew" not in run("chat", "--engine", engine[1], "--session", "b").err


def test_a_chat_follows_its_session_into_a_fork_and_says_how_to_resume_it(
    run: Run, engine: tuple[type[Engine], str], say: Any
) -> None:
    handler, url = engine
    with say("one", "two", "three"):
        ran = run("chat", "--engine", url)
    assert handler.asked[0]["session_id"].startswith("chat-")
    assert [body["session_id"] for body in handler.asked][1:] == [handler.asked[0]["session_id"], "forked"]
    assert ran.err.rstrip().endswith(f"resume with: kvstore chat --session forked --engine {url}")


def test_a_chat_shows_the_engine_its_key(run: Run, engine: tuple[type[Engine], str], say: Any, tmp_path: Path) -> None:
    handler, url = engine
    key = tmp_path / "key"
    key.write_text("# ours\na-key tenant\n")
    with say("hi"):
        assert run("chat", "--engine", url, "--api-key-file", str(key)).code == 0
    assert handler.authorizations == ["Bearer a-key"]
    ran = run("chat", "--engine", url, "--api-key-file", str(tmp_path / "none"))
    assert ran.code == 2
    assert "--api-key-file" in ran.err


def test_a_chat_goes_on_where_the_daemon_cannot_be_asked(
    run: Run, client: FakeClient, engine: tuple[type[Engine], str], say: Any
) -> None:
    client.fault = TierUnavailable("no daemon")
    with say("hi"):
        ran = run("chat", "--engine", engine[1], "--session", "a")
    assert ran.code == 0
    assert "no daemon" in ran.err


def test_a_chat_with_an_engine_that_is_not_there_ends_with_3(run: Run, say: Any) -> None:
    with say("hi"):
        ran = run("chat", "--engine", "http://127.0.0.1:9")
    assert ran.code == 3
    assert "the engine at http://127.0.0.1:9 does not answer" in ran.err
    assert "engine.server" in ran.err and "kvstore serve" not in ran.err, "the daemon has nothing to do with it"


def test_a_reply_that_is_cut_off_is_told_from_the_error(
    run: Run, client: FakeClient, engine: tuple[type[Engine], str], say: Any
) -> None:
    """The error stood right behind the last word, and nothing said what became of the turn."""
    engine[0].is_cut = True
    with say("hi"):
        ran = run("chat", "--engine", engine[1], "--session", "a")
    assert ran.code == 3
    assert "\n(cut off; say it again, this turn may not be part of the session)\nkvstore: the engine at" in ran.err


def test_a_chat_with_an_address_that_is_none_is_wrong_usage(run: Run, say: Any) -> None:
    with say("hi"):
        ran = run("chat", "--engine", "localhost:8000")
    assert ran.code == 2
    assert "http://127.0.0.1:8000" in ran.err


def test_a_chat_with_a_server_that_is_no_engine_says_so(
    run: Run, engine: tuple[type[Engine], str], say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon's own HTTP API answers 404, which read as if a session were missing."""

    def not_found(handler: BaseHTTPRequestHandler) -> None:
        body = b'{"error": {"code": "not_found", "message": "Not Found"}}'
        handler.send_response(404)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    monkeypatch.setattr(engine[0], "do_POST", not_found)
    with say("hi"):
        ran = run("chat", "--engine", engine[1])
    assert ran.code == 1
    assert "is --engine an engine's address?" in ran.err
    assert "sessions list" not in ran.err


def test_ctrl_c_stops_a_reply_and_not_the_chat(
    run: Run, engine: tuple[type[Engine], str], say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = chat_command._events

    def interrupted_once(response: Any) -> Iterator[dict[str, Any]]:
        if len(engine[0].asked) == 1:
            raise KeyboardInterrupt
        yield from events(response)

    monkeypatch.setattr(chat_command, "_events", interrupted_once)
    with say("one", "two"):
        ran = run("chat", "--engine", engine[1])
    assert ran.code == 0
    assert "stopped" in ran.err
    assert ran.out.count("[prompt 48 tokens") == 1


@pytest.mark.parametrize(("status", "code"), [(400, 1), (404, 4), (500, 1)])
def test_a_refusal_of_the_engine_is_shown_in_its_words(
    run: Run, engine: tuple[type[Engine], str], say: Any, status: int, code: int
) -> None:
    engine[0].status = status
    with say("hi"):
        ran = run("chat", "--engine", engine[1])
    assert ran.code == code
    assert "too many tokens" in ran.err
