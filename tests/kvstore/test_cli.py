import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvstore import cli, wire
from kvstore.commands import chat as chat_command
from kvstore.commands import common, evict, sessions
from kvstore.commands import explain as explain_command
from kvstore.commands import stats as stats_command
from kvstore.connectors.vllm_parts.wishes import Wishes, read
from kvstore.core.errors import ConfigError, CorruptBlock, KVStoreError, ProtocolError, TierUnavailable
from kvstore.version import VERSION
from kvstore.wire import ErrorCode
from tests.support.consoles import SNAPSHOT, FakeClient, session

Run = Callable[..., "Ran"]
COMMANDS = [
    ["serve"],
    ["stats"],
    ["sessions", "list"],
    ["sessions", "show"],
    ["sessions", "pin"],
    ["sessions", "unpin"],
    ["sessions", "prefetch"],
    ["sessions", "delete"],
    ["explain"],
    ["evict"],
    ["verify"],
    ["replay"],
    ["simulate"],
    ["calibrate"],
    ["plan"],
    ["chat"],
    ["demo"],
    ["bench", "tiers"],
    ["bench", "plan"],
    ["bench", "return"],
    ["version"],
]


class Ran:
    """What one command left."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err


@pytest.fixture
def client() -> FakeClient:
    return FakeClient(session("a"), session("b", tenant="t", pinned=True, expires_s=2_000.0))


@pytest.fixture
def run(client: FakeClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process, with a client that answers from memory."""
    for module in (stats_command, sessions, evict, explain_command, chat_command):
        monkeypatch.setattr(module, "connect", lambda *_: client)
    for variable in [name for name in os.environ if name.startswith("KVSTORE_")]:
        monkeypatch.delenv(variable)

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["kvstore", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        code = ended.value.code
        return Ran(code if isinstance(code, int) else int(bool(code)), out, err)

    return run


# ---------------------------------------------------------------- every command


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself_with_an_example(run: Run, command: list[str]) -> None:
    ran = run(*command, "--help")
    assert ran.code == 0
    assert (
        f"Example: {'KVSTORE_RAM_SIZE=8GiB ' if command == ['serve'] else ''}kvstore {' '.join(command)}"
        in " ".join(ran.out.split())
    )


def test_the_list_of_commands_here_is_complete(run: Run) -> None:
    def names(*group: str) -> set[str]:
        listed = run(*group, "--help").out.partition("Commands:")[2]
        return set(re.findall(r"^  ([a-z]+) ", listed, flags=re.MULTILINE))

    assert names() == {command[0] for command in COMMANDS}
    for group in ("sessions", "bench"):
        assert names(group) == {command[1] for command in COMMANDS if command[0] == group and len(command) > 1}


@pytest.mark.parametrize(
    ("fault", "code", "advice"),
    [
        (ConfigError("unknown key"), 2, ""),
        (TierUnavailable("no daemon runs here"), 3, "kvstore serve"),
        (ProtocolError(ErrorCode.NOT_FOUND, "there is no session"), 4, "sessions list"),
        (ProtocolError(ErrorCode.VERSION, "version 2"), 1, "another version"),
        (ProtocolError(ErrorCode.BUSY, "busy"), 1, "try again"),
        (ProtocolError(ErrorCode.CONFLICT, "ambiguous"), 1, ""),
        (CorruptBlock("damaged"), 1, ""),
    ],
)
def test_a_fault_becomes_an_exit_code_and_advice_on_stderr(
    run: Run, client: FakeClient, fault: KVStoreError, code: int, advice: str
) -> None:
    client.fault = fault
    ran = run("stats")
    assert ran.code == code
    assert ran.out == ""
    assert ran.err.startswith(f"kvstore: {fault}\n")
    assert advice in ran.err
    assert client.closed


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["stats", "--nonsense"],
        ["evict"],
        ["sessions", "show"],
        ["evict", "--tier", "hbm"],
        ["evict", "--tier", ","],
    ],
)
def test_wrong_usage_ends_with_2_and_says_where_help_is(run: Run, arguments: list[str]) -> None:
    ran = run(*arguments)
    assert ran.code == 2
    assert "--help" in ran.err


def test_the_daemon_that_is_not_there_is_named_with_its_folder(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "kvstore", "stats", "--run-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 3
    assert str(tmp_path) in ran.stderr


def test_a_reader_that_has_seen_enough_ends_it_quietly() -> None:
    command = [sys.executable, "-m", "kvstore", "serve", "--print-config"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={"PATH": ""}) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


def test_version_is_the_packages(run: Run) -> None:
    assert run("version").out == f"{VERSION}\n"
    assert run("--version").out == f"{VERSION}\n"


# ---------------------------------------------------------------- serve


@pytest.mark.parametrize("name", ["nowhere/trace.jsonl", "."])
def test_a_recording_that_cannot_be_is_refused_before_the_daemon_begins(run: Run, tmp_path: Path, name: str) -> None:
    ran = run("serve", "--run-dir", str(tmp_path / "run"), "--record", str(tmp_path / name))
    assert ran.code == 2
    assert "choose another file" in ran.err
    assert not (tmp_path / "run").exists()


def test_print_config_shows_values_and_where_each_is_from(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_text('[ram]\nsize = "2GiB"\n')
    monkeypatch.setenv("KVSTORE_SSD_ENABLED", "false")
    ran = run("serve", "--print-config", "--config", str(path), "--run-dir", str(tmp_path))
    assert ran.code == 0
    shown = {line.partition(" = ")[0]: line for line in ran.out.splitlines() if " = " in line}
    assert re.fullmatch(rf'size = "2GiB" +# {path}', shown["size"])
    assert re.fullmatch(r'ttl = "7d" +# default', shown["ttl"])
    assert re.fullmatch(rf'run_dir = "{tmp_path}" +# --run-dir', shown["run_dir"])
    assert "KVSTORE_SSD_ENABLED" in ran.out


def test_print_config_does_not_show_what_the_secret_files_hold(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("S3_ACCESS_KEY_FILE", "S3_SECRET_KEY_FILE", "HTTP_TOKEN_FILE"):
        (tmp_path / name).write_text("hunter2hunter2hunter2")
        monkeypatch.setenv(f"KVSTORE_{name}", str(tmp_path / name))
    assert "hunter2" not in run("serve", "--print-config").out


def test_serve_refuses_a_token_file_that_is_no_use_before_it_starts_anything(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_HTTP_TOKEN_FILE", str(tmp_path / "none"))
    ran = run("serve", "--run-dir", str(tmp_path / "run"))
    assert ran.code == 2
    assert "http.token_file" in ran.err
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- stats


def test_stats_show_each_tier_on_a_line_and_why_it_missed(run: Run) -> None:
    lines = run("stats").out.splitlines()
    assert lines[0].split()[:2] == ["tier", "state"]
    assert [line.split()[0] for line in lines[1:4]] == ["hbm", "ram", "s3"]
    assert "25.0%" in lines[2]
    assert "s3: no route to the bucket" in lines
    assert "missed tokens: evicted 50, never_stored 600" in lines
    assert "errors: corrupt 2" in lines


def test_stats_of_a_daemon_that_has_served_nothing_are_shown_too(run: Run, client: FakeClient) -> None:
    client.snapshot = {"tiers": {"ram": {"state": "ok"}}}
    ran = run("stats")
    assert ran.code == 0
    assert "requests: 0" in ran.out


def test_stats_say_what_is_pinned_and_what_was_brought_before_its_turn(run: Run, client: FakeClient) -> None:
    client.snapshot = {
        "pins": {"owners": 1, "refused": 2, "ram_bytes": 1 << 20, "ssd_bytes": 2 << 20},
        "prefetch": {"asked": 1, "begun_blocks": 5, "useful_blocks": 4, "wasted_blocks": 0, "ready_sessions": 1},
    }
    lines = run("stats").out.splitlines()
    assert "pins: 1 MiB in ram, 2 MiB on ssd, owners 1, refused 2" in lines
    assert "prefetched blocks: begun 5, useful 4; sessions in time: 1" in lines
    client.snapshot = {"pins": {"owners": 0, "refused": 0}, "prefetch": {"begun_blocks": 0}}
    assert "p" not in {line[0] for line in run("stats").out.splitlines()}


def test_stats_as_json_are_the_snapshot(run: Run) -> None:
    assert json.loads(run("stats", "--json").out) == SNAPSHOT


def test_watching_goes_on_when_the_daemon_is_away_for_a_moment(
    run: Run, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(_: float) -> None:
        looks = len(client.calls)
        client.fault = TierUnavailable("no daemon") if looks == 1 else None
        if looks == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(stats_command.time, "sleep", sleep)
    ran = run("stats", "--watch", "--json")
    assert ran.code == 130
    assert [json.loads(line) for line in ran.out.splitlines()] == [SNAPSHOT, SNAPSHOT]
    assert "no daemon; trying again" in ran.err


# ---------------------------------------------------------------- sessions and eviction


def test_sessions_are_listed_without_what_was_said(run: Run) -> None:
    ran = run("sessions", "list")
    assert [line.split()[0] for line in ran.out.splitlines()] == ["id", "a", "b"]
    as_json = run("sessions", "list", "--json").out
    assert [view["id"] for view in json.loads(as_json)["sessions"]] == ["a", "b"]
    assert "secret" not in ran.out + as_json


def test_a_session_is_shown_with_what_was_said(run: Run) -> None:
    ran = run("sessions", "show", "a")
    assert re.search(r"^durable: +ssd$", ran.out, flags=re.MULTILINE)
    assert "user (3 tokens)\na secret\n" in ran.out
    assert json.loads(run("sessions", "show", "a", "--json").out)["messages"][1]["content"] == "hush"


def test_a_turn_without_text_is_shown_as_such(run: Run, client: FakeClient) -> None:
    client.sessions["a"] = session("a", messages=[wire.ChatMessage("turn", "", [1, 2, 3])], num_messages=1)
    assert "turn (3 tokens)\n(no text is kept)\n" in run("sessions", "show", "a").out


def test_where_there_is_no_session_it_says_how_one_begins(run: Run, client: FakeClient) -> None:
    client.sessions = {}
    ran = run("sessions", "list")
    assert (ran.code, ran.out) == (0, "")
    assert "there is no session:" in ran.err and "session_id" in ran.err
    assert "no session of tenant 't'" in run("sessions", "list", "--tenant", "t").err
    assert json.loads(run("sessions", "list", "--json").out) == {"sessions": [], "total": 0}


@pytest.mark.parametrize("command", ["show", "pin", "unpin", "prefetch", "delete"])
def test_a_session_that_does_not_exist_ends_with_4(run: Run, command: str) -> None:
    ran = run("sessions", command, "nobody")
    assert ran.code == 4
    assert "kvstore sessions list" in ran.err and "explain" not in ran.err


def test_sessions_are_pinned_unpinned_and_deleted(run: Run, client: FakeClient) -> None:
    assert run("sessions", "pin", "a", "b", "--tenant", "t").out == "pinned a\npinned b\n"
    assert run("sessions", "unpin", "a").out == "unpinned a\n"
    assert run("sessions", "delete", "a").out == "deleted a: 5 blocks freed, 2 kept for other sessions\n"
    assert client.calls[0] == ("session_pin", "a", True, "t")
    assert client.calls[2] == ("session_pin", "a", False, "")


def test_sessions_are_brought_into_ram(run: Run, client: FakeClient) -> None:
    ran = run("sessions", "prefetch", "a", "--tenant", "t")
    assert ran.out == "a: 3 of 5 blocks are brought into RAM\n"
    assert client.calls == [("session_prefetch", "a", "t")]


def test_tiers_are_emptied_and_the_blocks_counted(run: Run, client: FakeClient) -> None:
    ran = run("evict", "--tier", "ram, ssd,ram", "--drop")
    assert [line.split() for line in ran.out.splitlines()[1:]] == [["ram", "3", "1"], ["ssd", "3", "1"]]
    assert client.calls == [("evict", ("ram", "ssd"), True)]
    assert json.loads(run("evict", "--tier", "s3", "--json").out) == {"freed": {"s3": 3}, "kept": {"s3": 1}}


# ---------------------------------------------------------------- output


def test_text_from_others_cannot_steer_the_terminal(run: Run, client: FakeClient) -> None:
    bad = wire.ChatMessage("user", "\x1b[2Jgone\x9b31m\rover[bold]", [1])
    client.sessions = {"x": session("x", model="m\x1b[31m", messages=[bad])}
    for ran in (run("sessions", "list"), run("sessions", "show", "x")):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", ran.out)
    assert "[bold]" in run("sessions", "show", "x").out


def test_a_table_on_a_terminal_is_drawn_and_elsewhere_each_row_is_one_line() -> None:
    rows = [["a" * 200, "1"], ["b\nc", "23"], ["", ""]]
    plain = common.plain_table(["name", "number"], rows).splitlines()
    assert plain == [f"{'name':<200}  number", f"{'a' * 200}       1", f"{'b c':<200}      23", f"{'-':<200}       -"]
    primary, secondary = pty.openpty()
    with open(primary, "rb", buffering=0) as screen, open(secondary, "w") as terminal:
        common.print_table(["name", "number"], [["[red]x", "1"]], console=common.Console(file=terminal, width=40))
        terminal.flush()
        drawn = screen.read(4096).decode()
    assert "[red]x" in drawn
    assert "┃" in drawn


# ---------------------------------------------------------------- chat


class Engine(BaseHTTPRequestHandler):
    """Answers chats as the engine does: streamed words, then a chunk with the session and the figures."""

    asked: list[dict[str, Any]]
    authorizations: list[str | None]
    status = 200
    # vLLM's answers say nothing of sessions and caches.
    reports = True

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
        self.send_header("content-length", str(len(data.encode())))
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
