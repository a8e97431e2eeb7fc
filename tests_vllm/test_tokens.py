"""An engine stores, others in new processes load, and every token is that of an engine without a connector."""

import pytest

from tests_vllm import tokens
from tests_vllm.engines import BLOCK_TOKENS, Prompt
from tests_vllm.report import Report
from tests_vllm.sites import Site

EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"


def test_an_engine_that_stores_while_it_prefills_in_chunks_answers_as_one_without_a_connector(
    site: Site, report: Report
) -> None:
    compared = tokens.Comparison()
    compared.add(site.reference, site.stored)
    report.tokens("float32", "stores, prefill in chunks", compared)


@pytest.mark.parametrize("load", ["sync", "async"])
def test_another_process_loads_every_full_block_and_answers_with_the_same_tokens(
    site: Site, report: Report, load: str
) -> None:
    engine = site.reader(load)
    before = engine.metrics()
    answers = engine.say(site.prompts)
    hits = engine.metrics()[EXTERNAL_HITS] - before.get(EXTERNAL_HITS, 0.0)
    wanted = [tokens.full_blocks(len(prompt.tokens)) * BLOCK_TOKENS for prompt in site.prompts]
    missing = [i for i, answer in enumerate(answers) if answer.cached_tokens < wanted[i]]
    short = ", ".join(f"{answers[i].cached_tokens} of {len(site.prompts[i].tokens)}" for i in missing)
    figure = f"{hits:.0f} tokens hit, {len(missing)} prompts short{f' ({short})' if short else ''}"
    report.fact("float32", f"{load}: full blocks", figure, f"{sum(wanted)} tokens", not missing and hits >= sum(wanted))
    compared = tokens.Comparison()
    compared.add(site.reference, answers)
    report.tokens("float32", f"{load}: another process", compared)


@pytest.mark.parametrize("load", ["sync", "async"])
def test_loads_of_many_requests_at_once_keep_every_token(site: Site, report: Report, load: str) -> None:
    engine = site.reader(load)
    engine.say(site.prompts[:1])
    engine.forget()
    compared = tokens.Comparison()
    compared.add(site.reference, engine.say(site.prompts, together=True))
    report.tokens("float32", f"{load}: all at once", compared)


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_prompt_that_leaves_what_is_stored_loads_the_part_that_they_share(
    site: Site, report: Report, load: str
) -> None:
    """Of half of it the device has the first blocks itself, so that the load begins behind them."""
    engine = site.reader(load)
    engine.say(site.prompts[:1])
    engine.forget()
    offset = 0 if load == "sync" else 500
    forked = [
        Prompt([*prompt.tokens[: 32 * (1 + seed) + 5], *tokens.prompt(1000 + offset + seed, 70)], 16)
        for seed, prompt in enumerate(site.prompts[5:])
    ]
    begun = [Prompt(prompt.tokens[:65], 1) for prompt in site.prompts[9:]]
    engine.say(begun)
    before = engine.metrics()
    answers = engine.say(forked)
    hits = engine.metrics()[EXTERNAL_HITS] - before.get(EXTERNAL_HITS, 0.0)
    wanted = sum(32 * (1 + seed) for seed in range(len(forked)))
    ours = wanted - sum(64 for _ in begun)
    report.fact("float32", f"{load}: shared part", f"{hits:.0f} tokens hit", f"{ours} tokens", hits >= ours)
    compared = tokens.Comparison()
    compared.add(site.ask_reference(forked), answers)
    report.tokens("float32", f"{load}: forked prompts", compared)
