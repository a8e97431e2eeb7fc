"""In bfloat16 a hit changes the shapes of a step, and so about 1% of the tokens even where everything is right.

So bytes are compared, and tokens with those of vLLM's own prefix hit at the same border, computed in the same pieces.
"""

from tests_vllm import tokens
from tests_vllm.conftest import MakeEngine
from tests_vllm.engines import Prompt, with_kvstore
from tests_vllm.report import Report
from tests_vllm.sites import CHUNK_TOKENS, LENGTHS, Site


def test_loaded_bytes_are_those_stored_and_tokens_those_of_vllms_own_prefix_hit(
    site: Site, report: Report, make_engine: MakeEngine
) -> None:
    # No whole number of blocks: all that is cached right after a load was loaded.
    prompts = [Prompt(tokens.prompt(100 + seed, length + 7), 16) for seed, length in enumerate(LENGTHS)]
    once = [Prompt(prompt.tokens, 1) for prompt in prompts]
    options = {"dtype": "bfloat16", "chunk_tokens": CHUNK_TOKENS}
    alone = make_engine("bf16-alone", site.model, **options)
    writer = make_engine("bf16-writer", site.model, **options, transfer=with_kvstore(site.daemon.run_dir))
    wanted = sum(tokens.full_blocks(len(prompt.tokens)) for prompt in prompts)
    before = site.daemon.stats()["store"]["blocks_stored"]
    writer.say(once)
    stored = writer.digests()
    site.wait_blocks(writer, before + wanted)
    writer.close()
    transfer = with_kvstore(site.daemon.run_dir, load="sync", plan="fetch")
    reader = make_engine("bf16-reader", site.model, **options, transfer=transfer)
    alone.say(prompts)
    own_hits = alone.say(prompts)
    reader.say(once)
    loaded = reader.digests()
    same = sum(stored.get(block) == digest for block, digest in loaded.items())
    figure = f"{same} of {len(loaded)} blocks equal"
    report.fact("bfloat16", "loaded bytes", figure, f"all of {wanted}", same == len(loaded) == wanted)
    reader.forget()
    answers = reader.say(prompts)
    hits = [answer.cached_tokens for answer in answers]
    borders = [answer.cached_tokens for answer in own_hits]
    report.fact("bfloat16", "border of the hit", f"{sum(hits)} tokens", f"{sum(borders)}, as vLLM's", hits == borders)
    compared = tokens.Comparison()
    # Same bytes, same shapes: nothing is left that could tip a tie.
    compared.add([tokens.without_gaps(answer) for answer in own_hits], answers)
    report.tokens("bfloat16", "beside vLLM's own hits", compared)
