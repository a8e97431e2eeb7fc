"""The command line: help, usage, exit codes, and the commands that ask a daemon."""

import json
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.commands import common
from kvstore.commands import stats as stats_command
from kvstore.core.errors import ConfigError, CorruptBlock, KVStoreError, ProtocolError, TierUnavailable
from kvstore.version import VERSION
from kvstore.wire import ErrorCode
from tests.support.commands import Run, client, run
from tests.support.consoles import SNAPSHOT, FakeClient, session

__all__ = ["client", "run"]

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


def test_of_blocks_that_are_kept_it_is_said_what_frees_them(run: Run, client: FakeClient) -> None:
    """Naming both tiers that hold a block freed neither copy, and nothing told why."""
    said = run("evict", "--tier", "ram,ssd").out.splitlines()[-1]
    assert said == "Kept is what is in use, and what has no copy but in ram, ssd; --drop frees the latter, too."
    assert "Kept" not in run("evict", "--tier", "ram,ssd", "--drop").out


def test_the_demo_looks_for_its_s3_server_before_it_begins(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answered for a minute and then ended, since the server was not installed."""
    begun: list[object] = []

    def missing() -> None:
        raise ConfigError("the S3 server is not installed")

    monkeypatch.setattr("kvstore.commands.demo.check_engine_is_installed", lambda _: None)
    monkeypatch.setattr("kvstore.s3server.find_program", missing)
    monkeypatch.setattr("kvstore.demo.main.run", begun.append)
    ran = run("demo")
    assert ran.code == 2 and "the S3 server is not installed" in ran.err
    assert not begun


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
