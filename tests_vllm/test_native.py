"""vLLM's own tiering over files, on the same work: what it does with damaged bytes, and with a disk that fills up.

The first engine's process ends before its files are damaged, so that nothing comes from its memory.
"""

from pathlib import Path

from tests.support.daemons import until
from tests_vllm import tokens
from tests_vllm.conftest import MakeDaemon, MakeEngine
from tests_vllm.damage import flip_signs
from tests_vllm.engines import BLOCK_TOKENS, Engine, Prompt, with_kvstore
from tests_vllm.native import files_bytes, with_native_tiering
from tests_vllm.report import Report
from tests_vllm.sites import Site
from tests_vllm.tiny import kv_bytes_per_token

# What the flood writes is four times what our SSD tier may hold.
CAP_BYTES = 32 << 20
FLOOD_PROMPTS = 32
FLOOD_TOKENS = 1024


def test_the_file_tier_serves_flipped_bits_as_they_are(
    site: Site, report: Report, make_engine: MakeEngine, folder: Path
) -> None:
    """Our own answer to the same damage is in test_damage.py."""
    files = folder / "native" / "files"
    transfer = with_native_tiering(files, 64 << 20)
    writer = make_engine("native-writer", site.model, transfer=transfer, with_tree=True)
    reader = make_engine("native-reader", site.model, transfer=transfer, with_tree=True)
    compared = tokens.Comparison()
    compared.add(site.reference, writer.say(site.prompts))
    wanted = sum(tokens.full_blocks(len(prompt.tokens)) for prompt in site.prompts)
    until(lambda: stepped(writer) and len(list(files.rglob("*.bin"))) >= wanted)
    writer.close()
    answers = reader.say(site.prompts)
    hits = sum(answer.cached_tokens for answer in answers)
    compared.add(site.reference, answers)
    figure = f"{hits} tokens hit; {compared}"
    report.fact("native", "undamaged files", figure, "hits, none differs", hits > 0 and not compared.differ)
    reader.close()
    flip_signs(files, ".bin")
    again = make_engine("native-again", site.model, transfer=transfer, with_tree=True)
    believed = tokens.Comparison()
    believed.add(site.reference, again.say(site.prompts))
    figure = f"{believed.differ} of {believed.answers} answers differ"
    report.fact("native", "signs flipped in its files", figure, "some: not noticed", believed.differ > 0)


def test_the_file_tier_grows_without_a_limit_where_ours_keeps_to_its_own(
    site: Site, report: Report, make_engine: MakeEngine, make_daemon: MakeDaemon, folder: Path
) -> None:
    files = folder / "native-flood" / "files"
    daemon = make_daemon(
        "flood", ram_size="16MiB", ssd_max_bytes=CAP_BYTES, ssd_segment_bytes="4MiB", ssd_admission="always"
    )
    # Each writes 4 MiB, more than either keeps in memory by far.
    prompts = [Prompt(tokens.prompt(5000 + seed, FLOOD_TOKENS), 1) for seed in range(FLOOD_PROMPTS)]
    total = FLOOD_PROMPTS * FLOOD_TOKENS * kv_bytes_per_token(4)
    native = make_engine("native-flood", site.model, transfer=with_native_tiering(files, 16 << 20), with_tree=True)
    ours = make_engine("our-flood", site.model, transfer=with_kvstore(daemon.run_dir))
    largest = 0
    for prompt in prompts:
        native.say([prompt])
        ours.say([prompt])
        largest = max(largest, disk_bytes(daemon.ssd_dir))
    until(lambda: stepped(native) and files_bytes(files) >= total * 0.9)
    daemon.wait_written("ssd")
    largest = max(largest, disk_bytes(daemon.ssd_dir))
    written = daemon.stats()["tiers"]["ssd"]["bytes_in"]
    figure = f"{files_bytes(files) >> 20} MiB after {total >> 20} MiB of KV"
    report.fact("native", "its files", figure, "all of it: no limit", files_bytes(files) > 2 * CAP_BYTES)
    figure = f"{largest >> 20} MiB, {written >> 20} MiB went through it"
    is_kept = largest <= CAP_BYTES < written
    report.fact("native", "our SSD tier", figure, f"at most {CAP_BYTES >> 20} MiB", is_kept)


def stepped(engine: Engine) -> bool:
    engine.step()
    return True


def disk_bytes(folder: Path) -> int:
    """What the folder takes of its disk, holes not counted."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            total += path.stat().st_blocks * 512
    return total


assert FLOOD_TOKENS % BLOCK_TOKENS == 0
