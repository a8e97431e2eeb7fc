"""A prompt whose blocks all lie in RAM: the time to its first token with `--layer-overlap` off and on, in turns.

    python benchmarks/layer_overlap.py [--model DIR] [--tokens 2048] [--new 64] [--rounds 12]

Two reference engines beside one daemon without SSD. Prints one line of JSON: medians and spreads in seconds, what was
compared, and on which machine. Every answer is compared with the first. Takes about a minute with the small model.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from kvstore.bench import machine
from kvstore.bench.site import wait
from kvstore.client import Client
from kvstore.core.errors import KVStoreError
from kvstore.demo.processes import Daemon, EngineProcess

_MODES = ("off", "on")
_DEADLINE_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare copying blocks whole with copying them behind a pass.")
    parser.add_argument("--model", help="a Hugging Face folder; default: SmolLM2-135M")
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt that are cached")
    parser.add_argument("--new", type=int, default=64, help="tokens behind them, at most a chunk")
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--hbm-bytes", default="1GiB")
    parser.add_argument("--ram-size", default="1GiB")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvstore-layers-") as folder, contextlib.ExitStack() as stack:
        report = _run(options, Path(folder), stack)
    print(json.dumps(report))
    return 0


def _run(options: argparse.Namespace, folder: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    settings = {"KVSTORE_RAM_SIZE": options.ram_size, "KVSTORE_SSD_ENABLED": "false", "KVSTORE_HTTP_ENABLED": "false"}
    daemon = Daemon(folder / "run", folder / "daemon.log", settings)
    stack.callback(daemon.kill)
    daemon.start()
    console = stack.enter_context(contextlib.closing(daemon.console()))
    arguments = ["--hbm-bytes", options.hbm_bytes, "--block-tokens", str(options.block_tokens)]
    arguments += ["--run-dir", str(daemon.run_dir), *(["--model", options.model] if options.model else [])]
    engines = {}
    for mode in _MODES:
        engines[mode] = EngineProcess([*arguments, "--layer-overlap", mode], folder / f"engine-{mode}.log")
        stack.callback(engines[mode].kill)
        engines[mode].start()
    prompt = [(7 * at * at + 3 * at) % 250 for at in range(options.tokens + options.new)]
    num_blocks = options.tokens // options.block_tokens
    _ask(engines["off"], prompt[: options.tokens], "auto")
    wait(lambda: _blocks_in_ram(console) >= num_blocks, "the prompt is not in RAM", _DEADLINE_S, 0.1)
    seconds: dict[str, list[float]] = {mode: [] for mode in _MODES}
    answers = []
    # The first round warms up and does not count.
    for number in range(options.rounds + 1):
        for mode in _MODES if number % 2 else reversed(_MODES):
            httpx.post(f"{engines[mode].url}/v1/hbm/drop", json={}).raise_for_status()
            told = _ask(engines[mode], prompt, "fetch")
            if told["served_tokens"]["ram"] < num_blocks * options.block_tokens:
                raise KVStoreError(f"not everything came from RAM: {told['served_tokens']}")
            answers.append(told["token_ids"])
            if number:
                seconds[mode].append(told["ttft_s"])
            # A block that an engine stored again must not be under way in the next run.
            time.sleep(0.05)
    if any(answer != answers[0] for answer in answers):
        raise KVStoreError("the answers differ")
    return {
        mode: {"median_s": median(each), "min_s": min(each), "max_s": max(each)} for mode, each in seconds.items()
    } | {
        "ratio": median(seconds["on"]) / median(seconds["off"]),
        "overlapped_share": _overlapped(engines["on"]) / (options.rounds + 1),
        "settings": vars(options),
        "machine": machine.describe(folder, Path("/dev/shm")),
    }


def _blocks_in_ram(console: Client) -> int:
    tiers: Any = console.stats()["tiers"]
    return int(tiers["ram"]["blocks"])


def _overlapped(engine: EngineProcess) -> float:
    name = 'kvstore_engine_events_total{kind="overlapped_steps"} '
    lines = httpx.get(f"{engine.url}/metrics").text.splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def _ask(engine: EngineProcess, prompt: list[int], plan: str) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, "plan": plan}
    answer = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=_DEADLINE_S)
    answer.raise_for_status()
    return dict(answer.json()["kvstore"])


if __name__ == "__main__":
    sys.exit(main())
