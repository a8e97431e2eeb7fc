"""32 talks at once through the OpenAI-style server, whose device cache has room for a quarter of them, while the daemon
is killed and started again; then a second daemon that has nothing but the bucket, and a new engine beside it."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import DaemonProcess, until
from tests_vllm import talks, tokens
from tests_vllm.conftest import MakeDaemon, MakeEngine
from tests_vllm.engines import BLOCK_TOKENS, Prompt, with_kvstore
from tests_vllm.environment import Environment
from tests_vllm.report import Report
from tests_vllm.server import ApiServer
from tests_vllm.sites import Site

NUM_TALKS = 32
NUM_TURNS = 5
DEVICE_BLOCKS = 96
RAM = "192MiB"
_DURABLE_S = 60.0
OWN_HITS = "vllm:prefix_cache_hits_total"
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"


@dataclass(frozen=True, slots=True)
class Hall:
    """A server, its daemon with a bucket, and the talks as the reference held them."""

    model: Path
    server: ApiServer
    daemon: DaemonProcess
    talks: talks.Talks

    def turn(self, number: int, **options: Any) -> tokens.Comparison:
        """Ask this turn of all talks at once."""
        compared = tokens.Comparison()
        compared.add(self.talks.answers[number], self.server.say(self.talks.prompts[number], **options))
        return compared

    def cacheable_tokens(self, number: int) -> int:
        """What the turn before has left to take up, in full blocks."""
        before = self.talks.prompts[number - 1]
        return sum((len(prompt.tokens) + talks.REPLY_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in before)


@pytest.fixture(scope="module")
def hall(
    environment: Environment, folder: Path, site: Site, make_daemon: MakeDaemon, bucket: dict[str, object]
) -> Iterator[Hall]:
    daemon = make_daemon("hall", ram_size=RAM, ssd_max_bytes="512MiB", **bucket)
    transfer = with_kvstore(daemon.run_dir, plan="fetch")
    with contextlib.closing(
        ApiServer(environment, folder / "server.log", site.model, transfer, num_blocks=DEVICE_BLOCKS)
    ) as server:
        yield Hall(site.model, server, daemon, talks.hold(site, NUM_TALKS, NUM_TURNS))


def test_talks_go_on_from_the_sidecar_where_the_device_has_no_room_for_them(hall: Hall, report: Report) -> None:
    report.tokens("32 talks", "turn 1, server", hall.turn(0))
    before = hall.server.metrics()
    report.tokens("32 talks", "turn 2, server", hall.turn(1))
    after = hall.server.metrics()
    own, external = (after.get(name, 0.0) - before.get(name, 0.0) for name in (OWN_HITS, EXTERNAL_HITS))
    cacheable = hall.cacheable_tokens(1)
    figure = f"{external:.0f} loaded + {own:.0f} in the device of {cacheable}"
    report.fact("32 talks", "taken up in turn 2", figure, "90%, most of it loaded", 0.9 * cacheable <= own + external)
    report.fact("32 talks", "loaded in turn 2", f"{external / cacheable:.0%}", "50%", external >= 0.5 * cacheable)


def test_a_daemon_that_is_killed_in_the_middle_of_a_turn_costs_no_answer_and_no_token(
    hall: Hall, report: Report
) -> None:
    compared = hall.turn(2, when_some_are_done=(NUM_TALKS // 4, hall.daemon.kill))
    report.tokens("32 talks", "turn 3, daemon killed in it", compared)


def test_the_server_attaches_again_by_itself_and_finds_what_was_on_the_ssd(hall: Hall, report: Report) -> None:
    hall.daemon.restart()
    probes = iter(range(1000))

    def attached() -> bool:
        # As any traffic would: nobody needs to attach while nothing is asked.
        hall.server.say([Prompt(tokens.prompt(90_000 + next(probes), 70), 1)])
        return bool(hall.daemon.stats()["daemon"]["engines"])

    until(attached)
    before = hall.server.metrics()
    compared = hall.turn(3)
    external = hall.server.metrics()[EXTERNAL_HITS] - before.get(EXTERNAL_HITS, 0.0)
    report.fact("32 talks", "loaded in turn 4, daemon restarted", f"{external:.0f} tokens", "some", external > 0)
    report.tokens("32 talks", "turn 4, daemon restarted", compared)


def test_a_second_daemon_that_has_only_the_bucket_gives_a_new_engine_the_talks(
    hall: Hall, report: Report, make_daemon: MakeDaemon, make_engine: MakeEngine, bucket: dict[str, object]
) -> None:
    other = make_daemon("other", ram_size=RAM, **bucket)
    engine = make_engine("resumed", hall.model, transfer=with_kvstore(other.run_dir, plan="fetch"))
    wait_durable(hall)
    hall.daemon.stop()
    prompts = hall.talks.prompts[4][:12]
    engine.ready()
    answers = engine.say(prompts)
    served = other.stats()["tiers"]["s3"]["bytes_out"]
    wanted = [
        (len(prompt.tokens) + talks.REPLY_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        for prompt in hall.talks.prompts[3][: len(prompts)]
    ]
    loaded = [answer.cached_tokens for answer in answers]
    short = {
        talk: f"{got} of {want}" for talk, (got, want) in enumerate(zip(loaded, wanted, strict=True)) if got < want
    }
    figure = f"{sum(loaded)} of {sum(wanted)} tokens, {served >> 20} MiB, short: {short or 'none'}"
    report.fact("bucket only", "loaded by a new engine", figure, "all full blocks", not short and served > 0)
    compared = tokens.Comparison()
    compared.add(hall.talks.answers[4][: len(prompts)], answers)
    report.tokens("bucket only", "turn 5, other daemon and engine", compared)


def wait_durable(hall: Hall) -> None:
    """Until the newest turn of every talk, record and blocks, is in the bucket."""
    names = {prompt.params["session_id"] for prompt in hall.talks.prompts[0]}
    deadline = time.monotonic() + _DURABLE_S
    while True:
        with contextlib.closing(hall.daemon.console()) as console:
            states = {view.id: (view.revision, view.durable) for view in console.session_list().sessions}
        if names <= states.keys() and all(states[name][1] == "s3" for name in names):
            return
        assert time.monotonic() < deadline, f"after {_DURABLE_S:.0f} s: {states}; {hall.daemon.stats()['tiers']['s3']}"
        time.sleep(0.2)
