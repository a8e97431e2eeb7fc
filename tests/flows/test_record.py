"""`kvstore serve --record`: what a daemon's load was, as a trace that the replay reads."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from kvstore import wire
from policies.trace import read_trace
from tests.support.chats import BLOCK_TOKENS, Prefix, namespace
from tests.support.daemons import DaemonProcess

NAMESPACE = namespace()


def test_a_daemon_records_its_load_and_ends_with_all_of_it_written(
    make_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    daemon = make_daemon(is_started=False, ssd_enabled="false")
    daemon.arguments = ["--record", str(path)]
    daemon.start()
    with contextlib.closing(daemon.engine(NAMESPACE)) as engine:
        for number in range(3):
            prefix = Prefix(NAMESPACE, number % 2, 4)
            engine.lookup(prefix.keys)
            tokens = 4 * BLOCK_TOKENS + 1
            engine.report(
                wire.Report(
                    *("r", tokens, 0, 0, 0, 0, tokens, {}, "prefill", 0.1),
                    output_tokens=9,
                    last_block=prefix.keys[-1],
                )
            )
    assert daemon.stop() == 0
    trace = read_trace(path)
    assert [(request.prompt_tokens, request.output_tokens) for request in trace.requests] == [(17, 9)] * 3
    first, other, again = (request.hash_ids for request in trace.requests)
    assert first[:4] == again[:4] and not set(first) & set(other)


def test_a_file_that_cannot_be_written_stops_the_start_with_a_word(
    make_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    daemon = make_daemon(is_started=False, ssd_enabled="false")
    daemon.arguments = ["--record", str(tmp_path / "nowhere" / "trace.jsonl")]
    assert "choose another file" in daemon.start_refused()
