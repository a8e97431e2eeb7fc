"""vLLM's OpenAI-style server as a child process, and many clients of it at once."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import httpx

from tests_vllm.engines import BLOCK_TOKENS, Answer, EngineFailed, Prompt, parse_metrics
from tests_vllm.environment import Environment

_READY_S = 300.0
_ANSWER_S = 240.0


class ApiServer:
    """One server on a free port. It begins to start at once, and is waited for when it is first asked."""

    def __init__(
        self, environment: Environment, log: Path, model: Path, transfer: dict[str, Any], *, num_blocks: int
    ) -> None:
        self.log = log
        port = _free_port()
        # `vllm serve` asks for a distribution of that name, and the CPU build's has another.
        command = [environment.python, "-P", "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", model, "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_TOKENS)]
        command += ["--max-model-len", "1024", "--max-num-batched-tokens", "256", "--max-num-seqs", "32"]
        command += ["--num-gpu-blocks-override", str(num_blocks), "--enable-prompt-tokens-details"]
        command += ["--kv-transfer-config", json.dumps(transfer)]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env=environment.variables(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # It has children of its own; all of them are to go with it.
                start_new_session=True,
            )
        # The server hangs up on who is silent for 5 s; a request on its way at that moment would be lost.
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=64, keepalive_expiry=2.0)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_ANSWER_S, limits=limits)
        self._is_ready = False

    def ready(self) -> None:
        """Wait until it serves. Raises EngineFailed."""
        deadline = time.monotonic() + _READY_S
        while not self._is_ready:
            with contextlib.suppress(httpx.TransportError):
                self._is_ready = self._client.get("/health", timeout=5.0).status_code == 200
            if self._process.poll() is not None or time.monotonic() > deadline:
                lines = self.log.read_text(errors="replace").splitlines()[-30:]
                raise EngineFailed("the server did not start:\n" + "\n".join(lines))
            time.sleep(0.2)

    def say(
        self, prompts: Sequence[Prompt], *, when_some_are_done: tuple[int, Callable[[], None]] | None = None
    ) -> list[Answer]:
        """Send all at once and return the answers in order. `when_some_are_done`: after so many of them, do that."""
        self.ready()
        with ThreadPoolExecutor(len(prompts)) as pool:
            sent = [pool.submit(self._complete, prompt) for prompt in prompts]
            for number, future in enumerate(as_completed(sent), 1):
                future.result()
                if when_some_are_done is not None and number == when_some_are_done[0]:
                    when_some_are_done[1]()
            return [future.result() for future in sent]

    def metrics(self) -> dict[str, float]:
        self.ready()
        return parse_metrics(self._client.get("/metrics").text)

    def close(self) -> None:
        """End it and all its children. Idempotent."""
        self._client.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _complete(self, prompt: Prompt) -> Answer:
        body = {
            "model": "tiny",
            "prompt": list(prompt.tokens),
            "max_tokens": prompt.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "kv_transfer_params": prompt.params or None,
        }
        started = time.perf_counter()
        answer = self._client.post("/v1/completions", json=body)
        if answer.status_code != 200:
            raise EngineFailed(f"{answer.status_code}: {answer.text[:1000]}")
        value = answer.json()
        details = value["usage"].get("prompt_tokens_details") or {}
        seconds = time.perf_counter() - started
        return Answer(value["choices"][0]["token_ids"], [], details.get("cached_tokens") or 0, seconds=seconds)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
