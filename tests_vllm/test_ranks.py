"""Two ranks of one model: each stores and loads its own half, and nobody takes a half for a whole."""

from tests_vllm import tokens
from tests_vllm.conftest import MakeEngine
from tests_vllm.engines import Prompt, with_kvstore
from tests_vllm.report import Report
from tests_vllm.sites import LENGTHS, Site


def test_both_ranks_load_what_they_stored_and_another_number_of_ranks_finds_nothing_of_it(
    site: Site, report: Report, make_engine: MakeEngine
) -> None:
    prompts = [Prompt(tokens.prompt(200 + seed, length), 16) for seed, length in enumerate(LENGTHS)]
    transfer = with_kvstore(site.daemon.run_dir, plan="fetch")
    ranks = make_engine("ranks", site.model, tp_size=2, transfer=transfer)
    single = site.reader("async")
    wanted = sum(tokens.full_blocks(len(prompt.tokens)) for prompt in prompts)
    before = site.daemon.stats()["store"]["blocks_stored"]
    first = ranks.say(prompts)
    site.wait_blocks(ranks, before + 2 * wanted)
    ranks.forget()
    second = ranks.say(prompts)
    short = sum(
        answer.cached_tokens < 32 * tokens.full_blocks(len(prompt.tokens))
        for answer, prompt in zip(second, prompts, strict=True)
    )
    report.fact("two ranks", "full blocks loaded", f"{short} prompts short", "none", short == 0)
    compared = tokens.Comparison()
    reference = site.ask_reference(prompts)
    compared.add(reference, first)
    compared.add(reference, second)
    report.tokens("two ranks", "computed, then loaded", compared)
    single.forget()
    answers = single.say(prompts)
    found = sum(answer.cached_tokens for answer in answers)
    report.fact("two ranks", "found by one rank", f"{found} tokens", "none", found == 0)
    compared = tokens.Comparison()
    compared.add(reference, answers)
    report.tokens("two ranks", "one rank after them", compared)
