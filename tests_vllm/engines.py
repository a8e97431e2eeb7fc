"""vLLM engines as child processes: the tests' side of `child.py`."""

import contextlib
import json
import os
import selectors
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests_vllm.environment import HERE, Environment

BLOCK_TOKENS = 32
_READY_S = 240.0
_ANSWER_S = 300.0
_STOP_S = 20.0
_LOG_LINES = 30


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an engine is asked; `params` are the request's `kv_transfer_params`. `abort_after` so many steps its client
    is gone, and it is not among the answers; 0: never."""

    tokens: Sequence[int]
    max_tokens: int = 8
    params: dict[str, Any] = field(default_factory=dict)
    abort_after: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """`gaps[i]`: by how much token i led before the next likeliest, in nats; [] where nobody asked.
    `cached_tokens`: what the engine took from its device cache or from the connector."""

    tokens: list[int]
    gaps: list[float]
    cached_tokens: int
    ttft_s: float = 0.0
    seconds: float = 0.0


class EngineFailed(Exception):
    """The process ended, was silent or answered with an error; the message has the end of its log."""


class Engine:
    """One engine. It begins to start at once, and is waited for when it is first asked."""

    def __init__(
        self,
        environment: Environment,
        log: Path,
        model: Path,
        *,
        dtype: str = "float32",
        num_blocks: int = 512,
        chunk_tokens: int = 256,
        max_model_len: int = 2048,
        max_num_seqs: int = 64,
        tp_size: int = 1,
        transfer: dict[str, Any] | None = None,
        events: dict[str, Any] | None = None,
        with_tree: bool = False,
    ) -> None:
        """`chunk_tokens`: the most tokens of one step, so that longer prompts are prefilled in pieces. `transfer` and
        `events` are vLLM's `kv_transfer_config` and `kv_events_config`."""
        arguments: dict[str, Any] = {
            "model": str(model),
            "dtype": dtype,
            "enforce_eager": True,
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": num_blocks,
            "max_model_len": max_model_len,
            "max_num_batched_tokens": chunk_tokens,
            "max_num_seqs": min(max_num_seqs, chunk_tokens),
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "tensor_parallel_size": tp_size,
            "seed": 0,
        }
        if transfer is not None:
            arguments["kv_transfer_config"] = transfer
        if events is not None:
            arguments["kv_events_config"] = events
        self.log = log
        self._seconds_to_start: float | None = None
        variables = environment.variables(with_tree=with_tree) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [environment.python, "-P", HERE / "child.py", json.dumps(arguments)],
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._rest = b""

    def ready(self) -> float:
        """Wait until it serves; return how many seconds vLLM took to start. Raises EngineFailed."""
        if self._seconds_to_start is None:
            self._seconds_to_start = float(self._receive(_READY_S))
        return self._seconds_to_start

    def say(self, prompts: Sequence[Prompt], *, together: bool = False) -> list[Answer]:
        """Return the answers in order; `together` gives the engine all of them at once."""
        self.begin(prompts, together=together)
        return self.finish()

    def begin(self, prompts: Sequence[Prompt], *, together: bool = False) -> None:
        """Ask, and leave the answers to `finish`, so that something can happen meanwhile."""
        requests = [
            {
                "tokens": list(prompt.tokens),
                "max_tokens": prompt.max_tokens,
                "params": prompt.params,
                "abort_after": prompt.abort_after,
            }
            for prompt in prompts
        ]
        self._send({"op": "say", "requests": requests, "together": together})

    def finish(self) -> list[Answer]:
        return [Answer(**answer) for answer in self._receive(_ANSWER_S) if answer is not None]

    def forget(self) -> None:
        """Empty the device cache, so that what comes next can only come from elsewhere."""
        if not self._ask({"op": "forget"}):
            raise EngineFailed(f"the device cache cannot be emptied: blocks are still held; {self._end_of_log()}")

    def step(self) -> None:
        """Let the connector go on though there is no request."""
        self._ask({"op": "step"})

    def metrics(self) -> dict[str, float]:
        """Return vLLM's counters and gauges, each the sum over its labels."""
        return parse_metrics(str(self._ask({"op": "metrics"})))

    def digests(self) -> dict[str, str]:
        """Return a digest of the bytes of every block in the device cache, by vLLM's hash of its tokens."""
        return dict(self._ask({"op": "digests"}))

    def close(self) -> None:
        """End it, by force if need be. Idempotent."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """kill -9"""
        self._process.kill()
        self.close()

    def _ask(self, message: dict[str, Any]) -> Any:
        self._send(message)
        return self._receive(_ANSWER_S)

    def _send(self, message: dict[str, Any]) -> None:
        self.ready()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineFailed(f"the engine has ended; {self._end_of_log()}") from None

    def _receive(self, deadline_s: float) -> Any:
        answer = json.loads(self._line(deadline_s))
        if "error" in answer:
            raise EngineFailed(answer["error"])
        return answer["value"]

    def _line(self, deadline_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + deadline_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(deadline - time.monotonic()):
                    raise EngineFailed(f"no answer in {deadline_s:.0f} s; {self._end_of_log()}")
                read = os.read(self._process.stdout.fileno(), 1 << 20)
                if not read:
                    raise EngineFailed(f"the engine has ended; {self._end_of_log()}")
                self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _end_of_log(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return f"the end of {self.log}:\n" + "\n".join(lines)


def with_kvstore(run_dir: Path, **extra: Any) -> dict[str, Any]:
    """Return the `kv_transfer_config` that a user writes for the sidecar. `extra` as in the connector's docs."""
    return {
        "kv_connector": "KvstoreConnector",
        "kv_connector_module_path": "kvstore.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"run_dir": str(run_dir), **extra},
    }


def parse_metrics(text: str) -> dict[str, float]:
    """Sum Prometheus' text by name, whatever the labels."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name = line.partition("{")[0].split()[0]
            sums[name] = sums.get(name, 0.0) + float(line.rpartition(" ")[2])
    return sums
