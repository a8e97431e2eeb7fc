"""One vLLM engine in a process of its own, told what to do by lines of JSON on stdin; it answers with one line each.

Runs in vLLM's environment and imports nothing of ours: what it knows of kvstore is the `kv_transfer_config` that a user
would write. The first argument is the JSON of LLM's arguments. vLLM's own output goes to stderr.

    {"op": "say", "requests": [{"tokens": [5, 7], "max_tokens": 8, "params": {…}, "abort_after": 0}], "together": true}
    {"op": "forget"}      empty the device cache       {"op": "metrics"}   Prometheus' text
    {"op": "digests"}     of each cached block's bytes {"op": "step"}      let the connector go on
"""

import hashlib
import json
import os
import sys
import time
import traceback
from typing import Any

_FORGET_S = 20.0


class Served:
    """The engine, and what can be asked of it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        if "kv_events_config" in arguments:
            from vllm.config import KVEventsConfig

            arguments["kv_events_config"] = KVEventsConfig(**arguments["kv_events_config"])
        self._llm = LLM(**arguments)
        self._engine = self._llm.llm_engine
        self._next = 0

    def say(self, requests: list[dict[str, Any]], together: bool) -> list[dict[str, Any] | None]:
        """Answer all at once, or one after the other; greedy, to the last of `max_tokens`. None for one that was
        aborted, which is after `abort_after` steps unless that is 0."""
        if together:
            return self._run(requests)
        return [answer for request in requests for answer in self._run([request])]

    def forget(self) -> bool:
        """Empty the device cache; blocks that the connector still holds are waited for."""
        deadline = time.monotonic() + _FORGET_S
        while not self._engine.reset_prefix_cache():
            if time.monotonic() > deadline:
                return False
            self._engine.step()
            time.sleep(0.01)
        return True

    def step(self) -> bool:
        """One step without a request, as the engine's own loop makes while a connector has something to do."""
        self._engine.step()
        return True

    def metrics(self) -> str:
        from prometheus_client import REGISTRY, generate_latest

        return generate_latest(REGISTRY).decode()

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of every cached block, K and V of all layers, by vLLM's hash of its tokens."""
        core: Any = self._engine.engine_core
        layers = self._llm.collective_rpc(_kv_caches)[0]
        found = {}
        for block in core.engine_core.scheduler.kv_cache_manager.block_pool.blocks:
            if block.block_hash is not None:
                digest = hashlib.sha256()
                for layer in layers:
                    digest.update(_bytes_of(layer[block.block_id]))
                found[block.block_hash.hex()] = digest.hexdigest()
        return found

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _run(self, requests: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
        from vllm import SamplingParams

        begun: dict[str, float] = {}
        first: dict[str, float] = {}
        answers: dict[str, dict[str, Any]] = {}
        to_abort: dict[str, int] = {}
        for request in requests:
            name = f"r{self._next}"
            self._next += 1
            given = request.get("params")
            params = SamplingParams(
                temperature=0.0,
                max_tokens=request["max_tokens"],
                ignore_eos=True,
                logprobs=2,
                detokenize=False,
                extra_args={"kv_transfer_params": given} if given else None,
            )
            begun[name] = time.perf_counter()
            if request.get("abort_after"):
                to_abort[name] = request["abort_after"]
            self._engine.add_request(name, {"prompt_token_ids": request["tokens"]}, params)
        num_steps = 0
        while self._engine.has_unfinished_requests():
            self._engine.abort_request([name for name, steps in to_abort.items() if steps == num_steps])
            num_steps += 1
            for output in self._engine.step():
                now = time.perf_counter()
                if output.outputs[0].token_ids:
                    first.setdefault(output.request_id, now)
                if output.finished:
                    answers[output.request_id] = _answer(output, begun, first, now)
        return [answers.get(name) for name in begun]


def _answer(output: Any, begun: dict[str, float], first: dict[str, float], now: float) -> dict[str, Any]:
    name = output.request_id
    return {
        "tokens": list(output.outputs[0].token_ids),
        "gaps": [_gap(step) for step in output.outputs[0].logprobs],
        "cached_tokens": output.num_cached_tokens or 0,
        "ttft_s": first[name] - begun[name],
        "seconds": now - begun[name],
    }


def _gap(step: dict[int, Any]) -> float:
    """By how much the likeliest token leads before the next one, in nats."""
    best = sorted((entry.logprob for entry in step.values()), reverse=True)
    return float(best[0] - best[1])


def _kv_caches(worker: Any) -> list[Any]:
    # The wrapper around the worker is what an executor in this process hands over.
    return list(getattr(worker, "worker", worker).model_runner.kv_caches)


def _bytes_of(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # vLLM writes to stdout as well.
    os.dup2(2, 1)
    started = time.perf_counter()
    served = Served(json.loads(sys.argv[1]))
    print(json.dumps({"value": time.perf_counter() - started}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            value = getattr(served, asked.pop("op"))(**asked)
            print(json.dumps({"value": value}), file=answers)
        # Whatever it was, the test is to hear of it.
        except Exception:
            print(json.dumps({"error": traceback.format_exc()}), file=answers)
    served.close()


if __name__ == "__main__":
    main()
