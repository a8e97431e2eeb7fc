"""SmolLM2 on three engines side by side, vLLM alone, with its own tiering and with the sidecar, taking turns at every
request, so that only ratios count and noise hits all alike. The device cache has room for one talk and a half.

Over their first turns all three compute. In the second each talk comes back after all the others: from RAM (sidecar),
from files (native). In the third RAM is emptied before every request, so that both read from the disk.
"""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import pytest
from tokenizers import Tokenizer

from kvstore.demo.texts import talks
from tests.support.daemons import DaemonProcess, until
from tests_vllm.conftest import MakeDaemon, MakeEngine
from tests_vllm.engines import BLOCK_TOKENS, Answer, Engine, Prompt, with_kvstore
from tests_vllm.native import files_bytes, with_native_tiering
from tests_vllm.report import Report
from tests_vllm.tokens import Comparison

NUM_TALKS = 5
OPENING_CHARS = 3600
REPLY_TOKENS = 6
DEVICE_BLOCKS = 48
# Bytes of one token's KV: 30 layers, K and V, 3 heads of 64 numbers of 4 bytes.
TOKEN_BYTES = 46_080
PRIMARY_BYTES = 48 * BLOCK_TOKENS * TOKEN_BYTES
# More where the median is close to what is asked, since a round scatters by some percent on a machine that others use.
ROUNDS, MOST_ROUNDS = 10, 24
CLOSE = 0.02
LEAST_KEPT = 0.97
ROUND_PROMPTS = 4
ROUND_TOKENS = 129
_STILL_S = 0.15
_SETTLE_S = 60.0


@dataclass(frozen=True, slots=True)
class Race:
    daemon: DaemonProcess
    alone: Engine
    sidecar: Engine
    native: Engine
    files: Path
    tokenizer: Tokenizer

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def settle(self) -> None:
        """Until nobody has anything to do for a request that was answered: engines step as they would by themselves."""
        deadline = time.monotonic() + _SETTLE_S
        still_since, seen = time.monotonic(), -1
        while time.monotonic() < still_since + _STILL_S:
            assert time.monotonic() < deadline, "somebody never comes to rest"
            for engine in (self.sidecar, self.native):
                engine.step()
            # vLLM's files come to rest when there are no more of them.
            if (bytes_now := files_bytes(self.files)) != seen:
                still_since, seen = time.monotonic(), bytes_now
            time.sleep(0.01)
        self.daemon.wait_written("ssd")

    def empty_ram(self) -> None:
        with contextlib.closing(self.daemon.console()) as console:
            console.evict(["ram"])
        until(lambda: self.daemon.stats()["tiers"]["ram"]["blocks"] == 0)


@pytest.fixture(scope="module")
def race(make_daemon: MakeDaemon, make_engine: MakeEngine, smollm: Path, folder: Path) -> Race:
    daemon = make_daemon("race", ram_size="768MiB", ssd_max_bytes="3GiB", ssd_segment_bytes="64MiB")
    shape = {"num_blocks": DEVICE_BLOCKS, "chunk_tokens": 512, "max_model_len": 1408}
    sidecar = make_engine("race-sidecar", smollm, **shape, transfer=with_kvstore(daemon.run_dir))
    alone = make_engine("race-alone", smollm, **shape)
    files = folder / "race-native" / "files"
    transfer = with_native_tiering(files, PRIMARY_BYTES)
    native = make_engine("race-native", smollm, **shape, transfer=transfer, with_tree=True)
    for engine in (alone, sidecar, native):
        engine.ready()
    return Race(daemon, alone, sidecar, native, files, Tokenizer.from_file(str(smollm / "tokenizer.json")))


def test_later_turns_begin_in_a_third_of_the_time_and_from_ssd_no_later_than_with_vllms_own_tiering(
    race: Race, report: Report
) -> None:
    histories = [race.tokens(talk.opening) for talk in talks(NUM_TALKS, OPENING_CHARS)]
    spoken = talks(NUM_TALKS, OPENING_CHARS)
    compared = Comparison()
    figures: list[dict[str, list[Answer]]] = []
    for turn in range(3):
        answers: dict[str, list[Answer]] = {"alone": [], "sidecar": [], "native": []}
        for number, talk in enumerate(spoken):
            if turn:
                histories[number] += race.tokens(" " + talk.questions[turn - 1])
            prompt = [Prompt(list(histories[number]), REPLY_TOKENS)]
            race.settle()
            if turn == 2:
                race.empty_ram()
            order = ["alone", "sidecar", "native"]
            first = (number + turn) % 3
            for name in order[first:] + order[:first]:
                answers[name] += getattr(race, name).say(prompt)
            compared.add(answers["alone"][-1:], answers["sidecar"][-1:])
            histories[number] += answers["alone"][-1].tokens
        figures.append(answers)
    lengths = [len(history) for history in histories]
    report.about["talks"] = f"{NUM_TALKS}, {min(lengths)} to {max(lengths)} tokens at the end"
    alone, sidecar = (ttft_s(name, figures[1:]) for name in ("alone", "sidecar"))
    figure = f"{mean(sidecar):.3f} s of {mean(alone):.3f} s: {mean(sidecar) / mean(alone):.2f}"
    report.fact("SmolLM2", "TTFT of later turns", figure, "1/3", mean(sidecar) <= mean(alone) / 3)
    for title, turn in (("from RAM", 1), ("from SSD", 2)):
        one = {name: mean(ttft_s(name, figures[turn : turn + 1])) for name in ("alone", "sidecar", "native")}
        figure = ", ".join(f"{name} {seconds:.3f}" for name, seconds in one.items())
        cached = sum(answer.cached_tokens for answer in figures[turn]["native"])
        ours = sum(answer.cached_tokens for answer in figures[turn]["sidecar"])
        holds = title == "from RAM" or one["sidecar"] <= one["native"]
        report.fact("SmolLM2", f"TTFT {title}, s", figure, "sidecar ≤ native" if turn == 2 else "", holds)
        report.about[f"tokens loaded {title}"] = f"sidecar {ours}, native {cached}"
    report.tokens("SmolLM2", "sidecar beside alone", compared)


def test_no_more_than_three_percent_of_throughput_is_lost_where_nothing_ever_hits(race: Race, report: Report) -> None:
    """Each round goes there and back, so that a machine that gets slower or faster meanwhile favours nobody."""
    ratios, seconds = [], {"alone": 0.0, "sidecar": 0.0}
    for number in range(MOST_ROUNDS + 1):
        if len(ratios) >= ROUNDS and abs(median(ratios) - LEAST_KEPT) > CLOSE:
            break
        taken_s = {"alone": 0.0, "sidecar": 0.0}
        order = ("alone", "sidecar", "sidecar", "alone") if number % 2 else ("sidecar", "alone", "alone", "sidecar")
        for place, name in enumerate(order):
            # New words every time: nobody has a prefix of them.
            seed = 4 * number + place
            prompts = [
                Prompt([(7 * i * i + 31 * seed + 1009 * row + 3) % 40_000 + 100 for i in range(ROUND_TOKENS)], 16)
                for row in range(ROUND_PROMPTS)
            ]
            race.settle()
            answers = getattr(race, name).say(prompts, together=True)
            assert not any(answer.cached_tokens for answer in answers)
            taken_s[name] += max(answer.seconds for answer in answers)
        if number:
            ratios.append(taken_s["alone"] / taken_s["sidecar"])
            seconds = {name: seconds[name] + taken_s[name] for name in seconds}
    kept = median(ratios)
    num_tokens = 2 * len(ratios) * ROUND_PROMPTS * (ROUND_TOKENS + 16)
    figure = (
        f"{num_tokens / seconds['sidecar']:.0f} of {num_tokens / seconds['alone']:.0f} tokens/s: {kept:.3f}"
        f" ({min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} rounds of four)"
    )
    report.fact("SmolLM2", "throughput without hits", figure, str(LEAST_KEPT), kept >= LEAST_KEPT)


def ttft_s(name: str, turns: list[dict[str, list[Answer]]]) -> list[float]:
    return [answer.ttft_s for turn in turns for answer in turn[name]]
