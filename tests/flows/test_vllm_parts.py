"""Both sides of the vLLM connector beside a real daemon that is killed, stopped or too small, under an engine that
checks every block it reads and must come to the end of every request."""

import contextlib
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client
from kvstore.connectors.vllm_parts.settings import Settings
from kvstore.connectors.vllm_parts.stats import Counters
from kvstore.core.key import Namespace, engine_keys
from tests.support.daemons import DaemonProcess, until
from tests.support.vllm import FakeRequest, hashes_of, namespace
from tests.support.vllm_engine import FakeEngine, start_engine

MakeDaemon = Callable[..., DaemonProcess]


class Rig:
    """Engines beside one daemon."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        self.counters = Counters()
        self._engines = contextlib.ExitStack()

    def start(self, settings: Settings | None = None, **options: int) -> FakeEngine:
        chosen = settings or Settings(self.daemon.run_dir, num_loaders=2)
        engine = start_engine(chosen, self._client, self.counters, **options)
        self._engines.callback(engine.close)
        return engine

    def close(self) -> None:
        self._engines.close()

    def stored(self, tokens: list[int]) -> int:
        """How many leading blocks of a prompt the daemon has."""
        with contextlib.closing(self._client(namespace())) as client:
            return len(client.lookup(engine_keys(namespace().root(), hashes_of(tokens)), 5.0).tiers)

    def _client(self, space: Namespace) -> Client:
        return Client(self.daemon.run_dir, namespace=space, name="vllm", deadline_s=1.0)


@pytest.fixture
def make(make_daemon: MakeDaemon) -> Iterator[Callable[..., Rig]]:
    with contextlib.ExitStack() as rigs:

        def start(**settings: Any) -> Rig:
            rig = Rig(make_daemon(**settings))
            rigs.callback(rig.close)
            return rig

        yield start


def prompt(num_tokens: int, seed: int) -> list[int]:
    choice = random.Random(seed)
    return [choice.randrange(97) for _ in range(num_tokens)]


def ask(engine: FakeEngine, *prompts: list[int], first: str = "r", params: object = None) -> None:
    for number, tokens in enumerate(prompts):
        engine.add(FakeRequest(f"{first}{number}", tokens, params))


def test_a_prompt_that_is_larger_than_the_region_is_stored_and_loaded_all_the_same(make: Callable[..., Rig]) -> None:
    rig = make(ram_size="2MiB")
    tokens = prompt(4 * 700, seed=1)
    first = rig.start(num_blocks=900, budget=256)
    ask(first, tokens)
    first.run()
    with contextlib.closing(rig.daemon.console()) as console:
        capacity = dict(console.stats())["tiers"]["ram"]["capacity_bytes"]
    assert capacity < 700 * 4096
    # What found no room at first is offered again by who asks next.
    for turn in range(20):
        if rig.stored(tokens) == 700:
            break
        rig.daemon.wait_written()
        again = rig.start(num_blocks=900, budget=256)
        ask(again, tokens, first=f"again{turn}-")
        again.run()
        again.close()
    second = rig.start(Settings(rig.daemon.run_dir, plan="fetch"), num_blocks=900, budget=256)
    ask(second, tokens)
    second.run()
    assert second.external_tokens == 4 * 700
    assert second.recomputed < 4 * 700


def test_a_daemon_that_stands_still_in_the_middle_holds_no_request_up(make: Callable[..., Rig]) -> None:
    rig = make()
    prompts = [prompt(60, seed) for seed in range(8)]
    first = rig.start()
    ask(first, *prompts)
    first.run()
    first.close()
    second = rig.start(num_blocks=80, budget=16)
    ask(second, *prompts, params={"session_id": "chat", "hints": {"expect_followup": True}})
    for _ in range(3):
        second.step()
    rig.daemon.process.send_signal(signal.SIGSTOP)
    try:
        ask(second, *[prompt(50, 100 + seed) for seed in range(8)], first="new", params={"session_id": "other"})
        second.run()
    finally:
        rig.daemon.process.send_signal(signal.SIGCONT)
    assert len(second.outputs) == 16

    def is_used_again() -> bool:
        second.drop_prefix_cache()
        before = second.external_tokens
        ask(second, prompts[0], first=f"after{second.num_steps}-")
        second.run()
        return second.external_tokens > before

    until(is_used_again)


@pytest.mark.parametrize("seed", range(2))
def test_a_daemon_that_is_killed_wherever_it_is_costs_no_request_and_no_byte(
    make: Callable[..., Rig], seed: int
) -> None:
    rig = make()
    choice = random.Random(seed)
    prompts = [prompt(choice.randrange(20, 80), seed=10 * seed + number % 5) for number in range(20)]
    for round_ in range(3):
        engine = rig.start(num_blocks=100, budget=32, ranks=1 + seed, depth=2)
        ask(engine, *prompts, first=f"{round_}-", params={"session_id": f"chat-{round_}"})
        for _ in range(choice.randrange(1, 12)):
            engine.step()
        rig.daemon.kill()
        for _ in range(choice.randrange(4)):
            engine.step()
        rig.daemon.start()
        engine.run()
        assert len(engine.outputs) == len(prompts)
        engine.close()
    engine = rig.start(num_blocks=200, ranks=1 + seed)
    ask(engine, *prompts, first="last-")
    engine.run()
    assert engine.external_tokens > 0


def test_what_the_disk_spoils_is_computed_again_and_stored_by_the_same_request(make: Callable[..., Rig]) -> None:
    """It was said to be stored only with the next request for the same prompt."""
    rig = make()
    tokens = prompt(203, seed=3)
    first = rig.start()
    ask(first, tokens)
    first.run()
    first.close()
    rig.daemon.wait_written()
    with contextlib.closing(rig.daemon.console()) as console:
        console.evict(["ram"])
    _spoil(rig.daemon.ssd_dir)
    engine = rig.start(Settings(rig.daemon.run_dir, plan="fetch"))
    ask(engine, tokens)
    engine.run()
    assert engine.recomputed > 0
    engine.close()
    assert rig.stored(tokens) == 50


def _spoil(folder: Path) -> None:
    """Change a bit at the head of every page: of records and of payloads."""
    for path in folder.rglob("*.seg"):
        data = bytearray(path.read_bytes())
        for place in range(20, len(data), 4096):
            data[place] ^= 1
        path.write_bytes(data)
