"""Loads that fail while the device cache is too small: blocks are evicted from it, requests preempted and aborted, and
others have taken up blocks that then did not come. vLLM computes all of that again, and what is stored meanwhile is
what another engine may load."""

import dataclasses

import pytest

from tests.support.daemons import DaemonProcess
from tests_vllm import tokens
from tests_vllm.conftest import MakeDaemon, MakeEngine
from tests_vllm.damage import flip_some
from tests_vllm.engines import BLOCK_TOKENS, Engine, Prompt, with_kvstore
from tests_vllm.report import Report
from tests_vllm.sites import Site

FAILED_BLOCKS = "vllm:kvstore_failed_blocks_total"
PREEMPTIONS = "vllm:num_preemptions_total"
# As much as two of the prompts need, and a bit.
DEVICE_BLOCKS = 40
# A block has 32 pages, so that about one in three has a flipped byte.
EVERY_PAGE = 97
ROUNDS = 4


def family(stem: int) -> list[Prompt]:
    """Prompts that begin alike, so that some run over blocks that others load."""
    begin = tokens.prompt(stem, 8 * BLOCK_TOKENS + 5)
    return [Prompt([*begin, *tokens.prompt(stem + 1 + n, 20 + 40 * n)], 16 + 24 * (n % 2)) for n in range(5)]


@pytest.mark.parametrize("load", ["sync", "async"])
def test_loads_that_fail_under_pressure_change_no_token_and_leave_nothing_wrong_behind(
    site: Site, report: Report, make_daemon: MakeDaemon, make_engine: MakeEngine, load: str
) -> None:
    daemon: DaemonProcess = make_daemon(f"pressure-{load}", ram_size="96MiB", ssd_max_bytes="192MiB")
    prompts = [prompt for stem in (5000, 5100, 5200) for prompt in family(stem)]
    options = {"num_blocks": DEVICE_BLOCKS, "max_model_len": 1024, "chunk_tokens": 128}
    transfer = with_kvstore(daemon.run_dir, load=load, plan="fetch")
    engine: Engine = make_engine(f"pressed-{load}", site.model, transfer=transfer, **options)
    reference = site.ask_reference(prompts)
    compared = tokens.Comparison()
    compared.add(reference, engine.say(prompts))
    for round_ in range(ROUNDS):
        engine.forget()
        flip_some(daemon.shm_dir, EVERY_PAGE + round_)
        # Between them some whose clients leave, in the first steps, when what they load has just failed.
        leaving = [
            dataclasses.replace(prompt, abort_after=1 + number % 4) for number, prompt in enumerate(prompts[::3])
        ]
        mixed = [each for pair in zip(leaving, prompts, strict=False) for each in pair] + prompts[len(leaving) :]
        compared.add(reference, engine.say(mixed, together=True))
    metrics = engine.metrics()
    failed, preempted = metrics.get(FAILED_BLOCKS, 0.0), metrics.get(PREEMPTIONS, 0.0)
    figure = f"{failed:.0f} blocks failed, {preempted:.0f} preemptions"
    report.fact("pressure", f"{load}: what went wrong", figure, "some of both", failed > 0 and preempted > 0)
    report.tokens("pressure", f"{load}: computed again", compared)
    engine.close()
    after = make_engine(f"after-{load}", site.model, transfer=with_kvstore(daemon.run_dir, plan="fetch"))
    compared = tokens.Comparison()
    compared.add(reference, after.say(prompts))
    loaded = after.metrics().get("vllm:external_prefix_cache_hits_total", 0.0)
    report.fact("pressure", f"{load}: loaded by another engine", f"{loaded:.0f} tokens", "some", loaded > 0)
    report.tokens("pressure", f"{load}: another engine", compared)
