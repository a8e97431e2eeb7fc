"""The daemon's KV events beside vLLM's own of the same blocks, both read with vLLM's classes."""

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import DaemonProcess, until
from tests_vllm import tokens
from tests_vllm.engines import BLOCK_TOKENS, Engine, Prompt, with_kvstore
from tests_vllm.environment import HERE, Environment
from tests_vllm.report import Report

_LENGTH = 300
Event = dict[str, Any]


class Reader:
    """A process of vLLM's environment that asks a publisher for all its events."""

    def __init__(self, environment: Environment, replay: str, log: Path) -> None:
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [environment.python, "-P", HERE / "read_events.py", replay],
                env=environment.variables(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
            )

    def read(self) -> list[Event]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        events = []
        for line in self._process.stdout:
            if not line.strip():
                return events
            events.append(json.loads(line))
        raise AssertionError("the reader has ended")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def make_reader(environment: Environment, tmp_path: Path) -> Iterator[Callable[[str], Reader]]:
    with contextlib.ExitStack() as stack:

        def make(replay: str) -> Reader:
            reader = Reader(environment, replay, tmp_path / "reader.log")
            stack.callback(reader.close)
            return reader

        yield make


def copies(events: list[Event]) -> dict[tuple[int, str], Event]:
    """What a router knows in the end: by hash and owner, the event that told of the copy."""
    known: dict[tuple[int, str], Event] = {}
    for event in events:
        if event["type"] == "AllBlocksCleared":
            known.clear()
            continue
        for name in event["block_hashes"]:
            owner = (name, str(event["ownership"]))
            if event["type"] == "BlockStored":
                known[owner] = event
            else:
                known.pop(owner, None)
    return known


def tokens_of(events: list[Event]) -> dict[int, list[int]]:
    """The token ids of each block, by its hash."""
    found = {}
    for event in events:
        if event["type"] == "BlockStored" and event["token_ids"]:
            size = event["block_size"]
            for i, name in enumerate(event["block_hashes"]):
                found[name] = event["token_ids"][i * size : (i + 1) * size]
    return found


def test_the_daemons_events_name_blocks_and_tokens_as_vllm_names_them(
    tiny: Path,
    make_daemon: Callable[..., DaemonProcess],
    make_engine: Callable[..., Engine],
    make_reader: Callable[[str], Reader],
    tmp_path: Path,
    report: Report,
) -> None:
    """A router that follows both finds the copies in RAM and on SSD of what it knows from vLLM."""
    endpoints = {name: f"ipc://{tmp_path}/{name}" for name in ("ours", "ours-again", "theirs", "theirs-again")}
    daemon = make_daemon("events", events_endpoint=endpoints["ours"], events_replay_endpoint=endpoints["ours-again"])
    engine = make_engine(
        "events",
        tiny,
        transfer=with_kvstore(daemon.run_dir),
        events={
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoints["theirs"],
            "replay_endpoint": endpoints["theirs-again"],
        },
    )
    ours, theirs = make_reader(endpoints["ours-again"]), make_reader(endpoints["theirs-again"])
    prompt = tokens.prompt(1, _LENGTH)
    engine.say([Prompt(prompt, 1)])
    wanted = _LENGTH // BLOCK_TOKENS

    def are_stored() -> bool:
        engine.step()
        return sum(owner == "kvstore-ssd" for _, owner in copies(ours.read())) >= wanted

    until(are_stored)
    of_vllm, of_daemon = theirs.read(), ours.read()
    names = {name for name, _ in copies(of_vllm)}
    found = {owner: {name for name, of in copies(of_daemon) if of == owner} for owner in ("kvstore-ram", "kvstore-ssd")}
    same = len(names & found["kvstore-ram"] & found["kvstore-ssd"])
    report.fact("events", "blocks with vLLM's names", f"{same}", f"{wanted}", same == wanted == len(names))
    same_tokens = tokens_of(of_daemon) == tokens_of(of_vllm)
    report.fact("events", "token ids", "as vLLM's" if same_tokens else "others", "as vLLM's", same_tokens)
    with contextlib.closing(daemon.console()) as console:
        console.evict(["ram"])
    until(lambda: {owner for _, owner in copies(ours.read())} == {"kvstore-ssd"})
    mediums = {event["medium"] for event in ours.read() if event["type"] == "BlockRemoved"}
    report.fact("events", "removals name the medium", ", ".join(sorted(mediums)), "CPU", mediums == {"CPU"})
