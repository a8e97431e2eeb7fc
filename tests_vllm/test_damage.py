"""Bytes that changed behind everybody's back are computed again; believed, they would change the tokens."""

import contextlib

from tests.support.daemons import DaemonProcess, until
from tests_vllm import tokens
from tests_vllm.conftest import MakeEngine
from tests_vllm.damage import flip_signs, shuffle_region
from tests_vllm.engines import BLOCK_TOKENS, with_kvstore
from tests_vllm.report import Report
from tests_vllm.sites import Site

FAILED_BLOCKS = "vllm:kvstore_failed_blocks_total"


def evict(daemon: DaemonProcess) -> None:
    """Leave RAM empty, all of it being on SSD."""
    daemon.wait_written("ssd")
    with contextlib.closing(daemon.console()) as console:
        console.evict(["ram"])
    until(lambda: daemon.stats()["tiers"]["ram"]["blocks"] == 0)


def test_flipped_bits_on_the_ssd_are_found_and_those_blocks_computed_again(site: Site, report: Report) -> None:
    engine = site.reader("async")
    evict(site.daemon)
    before = site.daemon.errors().get("ssd_corrupt", 0)
    flipped = flip_signs(site.daemon.ssd_dir, ".seg")
    engine.forget()
    answers = engine.say(site.prompts)
    found = site.daemon.errors().get("ssd_corrupt", 0) - before
    stored = sum(len(prompt.tokens) // BLOCK_TOKENS for prompt in site.prompts)
    figure = f"{flipped} flipped, {found} of {stored} blocks found out"
    report.fact("damage", "SSD: signs flipped", figure, "some, each once", 0 < found <= stored)
    compared = tokens.Comparison()
    compared.add(site.reference, answers)
    report.tokens("damage", "SSD: computed again", compared)
    # By the very requests that computed it again.
    site.wait_stored(engine)


def test_shuffled_bytes_in_ram_are_found_by_the_engine_and_would_change_the_tokens(
    site: Site, report: Report, make_engine: MakeEngine
) -> None:
    blind = make_engine(
        "blind", site.model, transfer=with_kvstore(site.daemon.run_dir, verify=False, plan="fetch", load="sync")
    )
    engine = site.reader("async")
    blind.ready()
    site.wait_stored(engine)
    shuffle_region(site.daemon.shm_dir)
    believed = tokens.Comparison()
    believed.add(site.reference, blind.say(site.prompts))
    figure = f"{believed.differ} of {believed.answers} answers differ"
    report.fact("damage", "RAM shuffled, verify: false", figure, "most (negative control)", believed.differ > 6)
    engine.forget()
    before = engine.metrics().get(FAILED_BLOCKS, 0.0)
    compared = tokens.Comparison()
    compared.add(site.reference, engine.say(site.prompts))
    found = engine.metrics().get(FAILED_BLOCKS, 0.0) - before
    report.fact("damage", "RAM shuffled, verify: true", f"{found:.0f} blocks found out", "some", found > 0)
    report.tokens("damage", "RAM: computed again", compared)
