"""Loads that break in the middle: the link to the bucket falls silent or is cut, the daemon dies. Over a tiny real
model, a real daemon and a real bucket; the answers stay those of computing everything.

How long a request waits is asked of a clock of its own in `tests/engine/test_two_ends.py`, and really measured by
`kvstore bench plan --scenario cut`.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from engine.model import Model, load_model, make_pool
from engine.request import PlanMode, Request
from engine.service import Engine, EngineOptions
from engine.turn import Ask
from kvstore.bench.plan.link import Line, State
from kvstore.bench.plan.linkprocess import LinkProcess
from kvstore.core.outcome import TierKind
from kvstore.s3server import S3Server
from policies.cost import StepWork
from tests.engine.rig import Answer
from tests.engine.tiny import llama, write_folder
from tests.support.daemons import DaemonProcess
from tests.support.s3server import settings_for
from tests.support.waiting import PATIENCE_S, until
from tiers.hbm import HbmTier

MakeDaemon = Callable[..., DaemonProcess]
BLOCK_TOKENS = 16
NUM_BLOCKS = 24
PROMPT = [(7 * i * i + 3 * i) % 250 for i in range(NUM_BLOCKS * BLOCK_TOKENS + 5)]
_ids = itertools.count()


class Site:
    """An engine whose blocks lie in a bucket behind a link, and nowhere else."""

    def __init__(self, engine: Engine, daemon: DaemonProcess, link: LinkProcess) -> None:
        self.engine = engine
        self.daemon = daemon
        self.link = link

    def begin(self, plan: PlanMode = "auto") -> tuple[Answer, Request]:
        answer = Answer()
        ask = Ask(f"r{next(_ids)}", "", time.monotonic(), prompt=PROMPT, plan=plan, max_tokens=6, ignore_eos=True)
        turn, opened = self.engine.open(ask, answer)
        opened.result(PATIENCE_S)
        assert turn.request is not None
        return answer, turn.request

    def complete(self, plan: PlanMode = "auto") -> tuple[list[int], Request]:
        answer, request = self.begin(plan)
        assert answer.done.wait(PATIENCE_S)
        assert answer.error == ""
        return answer.tokens, request

    def only_in_bucket(self) -> None:
        until(lambda: not self.engine.hbm_state()["held"] and not self.engine.hbm_state()["in_use"])
        self.engine.between_steps(self.engine.pool.drop).result(PATIENCE_S)
        until(lambda: self.daemon.stats()["tiers"]["s3"]["blocks"] >= NUM_BLOCKS)
        self.daemon.wait_written()
        with contextlib.closing(self.daemon.console()) as console:
            console.evict(["ram", "ssd"])

    def slow_computing(self) -> None:
        """Let the engine believe that computing takes so long that loading is worth waiting for."""

        def observe() -> None:
            for _ in range(200):
                self.engine.costs.observe_step(StepWork.of([(64, 64)], 0), 2.0)

        self.engine.between_steps(observe).result(PATIENCE_S)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(write_folder(tmp_path_factory.mktemp("model") / "tiny", llama()), "cpu", "float32")


@pytest.fixture
def site(make_daemon: MakeDaemon, s3_server: S3Server, model: Model, tmp_path: Path) -> Iterator[Site]:
    server = urlsplit(s3_server.endpoint)
    assert server.hostname is not None and server.port is not None
    with LinkProcess(server.hostname, server.port) as link:
        bucket = settings_for(s3_server, tmp_path)
        daemon = make_daemon(
            s3_bucket=bucket.bucket,
            s3_prefix=bucket.prefix,
            s3_endpoint=link.endpoint,
            s3_access_key_file=bucket.access_key_file,
            s3_secret_key_file=bucket.secret_key_file,
            s3_request_deadline="20s",
            s3_threads=2,
            s3_write="all",
        )
        pool = make_pool(model.spec, 64, BLOCK_TOKENS, "cpu")
        options = EngineOptions(run_dir=daemon.run_dir, block_tokens=BLOCK_TOKENS, chunk_tokens=64)
        engine = Engine(model, pool, HbmTier(pool, BLOCK_TOKENS), options)
        engine.start()
        try:
            yield Site(engine, daemon, link)
        finally:
            link.be(Line())
            engine.stop(5)


@pytest.mark.parametrize("state", ["stalled", "cut"])
def test_a_link_that_breaks_in_the_middle_is_computed_around(site: Site, state: State) -> None:
    computed, _ = site.complete()
    site.only_in_bucket()
    loaded, request = site.complete("fetch")
    assert loaded == computed and request.result is not None
    assert request.result.tokens[TierKind.S3] == NUM_BLOCKS * BLOCK_TOKENS
    site.only_in_bucket()
    site.slow_computing()
    half = request.result.tokens[TierKind.S3] // 2 * model_bytes(site)
    site.link.be(Line(round_trip_s=0.002, bytes_per_s=2e6, state=state, after_bytes=half))
    broken, request = site.complete()
    assert broken == computed
    assert request.result is not None and request.decision is not None and request.decision.happened is not None
    assert 0 < request.result.tokens[TierKind.S3] < NUM_BLOCKS * BLOCK_TOKENS, "what had come is of use"
    assert sum(request.result.tokens.values()) + request.result.recomputed == len(PROMPT)
    site.engine.between_steps(site.engine.pool.check_integrity).result(PATIENCE_S)


def test_a_daemon_that_dies_in_the_middle_is_computed_around(site: Site) -> None:
    computed, _ = site.complete()
    site.only_in_bucket()
    site.link.be(Line(state="stalled"))
    answer, request = site.begin("fetch")
    until(lambda: request.block_table)
    site.daemon.kill()
    assert answer.done.wait(PATIENCE_S)
    assert answer.tokens == computed
    assert request.result is not None and request.result.miss.get("unavailable", 0) == NUM_BLOCKS * BLOCK_TOKENS
    site.link.be(Line())
    site.daemon.start()
    site.engine.between_steps(site.engine.pool.check_integrity).result(PATIENCE_S)


def test_an_engine_that_ends_in_the_middle_of_a_load_ends_its_requests(site: Site) -> None:
    site.complete()
    site.only_in_bucket()
    site.link.be(Line(state="stalled"))
    answer, request = site.begin("fetch")
    until(lambda: request.block_table)
    site.engine.stop(2)
    assert answer.finish == "error" and "shutting down" in answer.error
    site.engine.pool.check_integrity()


def model_bytes(site: Site) -> int:
    return site.engine.namespace.block_bytes // BLOCK_TOKENS
