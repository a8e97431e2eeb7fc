"""The peer LMCache as a daemon: `lmcache server` with L1 in shared memory, and the client of LMCache's own benchmark.

`paged_*`: STORE and RETRIEVE between the client's paged KV cache (pool blocks of 16 tokens, 8 heads of 128 in
bfloat16) and the server; the LOOKUP that must come before a RETRIEVE is timed with it, as ours finds and pins in one
request. `lookup`: LOOKUP of the prompt and its status, asked again without a pause until it is known, on a second
server whose chunks are small; the read locks that a lookup takes are released afterwards, untimed.
"""

import argparse
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker import Task, end_with_parent, prompt, serve

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

from lmcache.cli.commands.bench.server_bench import config as bench_config
from lmcache.cli.commands.bench.server_bench import helpers
from lmcache.cli.commands.bench.server_bench.client import RequestContext, ServerBenchClient
from lmcache.cli.commands.bench.server_bench.command import add_server_arguments

_READY_S = 120.0
_TIMEOUT_S = 120.0
_POOL_BLOCK_TOKENS = 16
_LAYER_BYTES = 1 << 20


class Daemon:
    """Implements worker.Contender."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.about = f"lmcache {importlib.metadata.version('lmcache')}, server, L1 in shared memory, engine-driven"
        self._processes: list[subprocess.Popen[bytes]] = []
        layers = max(1, task.block_bytes // _LAYER_BYTES)
        heads, head_dim = _heads(task.block_bytes // (layers * 2 * task.block_tokens * 2))
        num_tokens = task.num_blocks * task.block_tokens
        # What a round stored stays until it is evicted; room for all of them, so that nothing is.
        l1_bytes = (task.rounds + 3) * task.total_bytes * 4 // 3 + (1 << 30)
        self._client = self._start("blocks", num_tokens, (heads, head_dim, layers), l1_bytes)
        self._small = self._start("lookup", task.lookup_tokens, (1, 8, 1), 1 << 30)
        self._tokens = tuple(prompt(task.lookup_tokens))
        self._lookups = 0
        self._stored: dict[int, RequestContext] = {}
        self._store_prompt()
        self.ops: dict[str, Callable[[int], float]] = {
            "paged_store": self._store,
            "paged_fetch": self._fetch,
            "lookup": self._lookup,
            "ping": self._ping,
        }

    def close(self) -> None:
        for client in (self._client, self._small):
            client.close()
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, name: str, num_tokens: int, shape: tuple[int, int, int], l1_bytes: int) -> Any:
        port, http_port = _free_port(), _free_port()
        url = f"http://127.0.0.1:{http_port}"
        command = [str(Path(sys.executable).parent / "lmcache"), "server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--http-host", "127.0.0.1", "--http-port", str(http_port)]
        command += ["--l1-size-gb", f"{l1_bytes / (1 << 30):.2f}", "--eviction-policy", "LRU", "--no-l1-use-lazy"]
        command += ["--supported-transfer-mode", "auto", "--shm-name", f"peers-{name}-{os.getpid()}"]
        self._processes.append(
            subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr, preexec_fn=end_with_parent)
        )
        _wait_for(f"{url}/healthcheck", self._processes[-1])
        heads, head_dim, layers = shape
        pool_blocks = num_tokens // _POOL_BLOCK_TOKENS + 16
        spec = f"(2,{pool_blocks},{_POOL_BLOCK_TOKENS},{heads},{head_dim}):bfloat16:{layers}"
        parser = argparse.ArgumentParser()
        add_server_arguments(parser)
        arguments = ["--rpc-url", f"tcp://127.0.0.1:{port}", "--url", url, "--mode", "cpu"]
        arguments += ["--transfer-mode", "engine_driven", "--num-tokens", str(num_tokens), "--kvcache-shape-spec", spec]
        client = ServerBenchClient(bench_config.parse_args_to_config(parser.parse_args(arguments)), lambda _: None)
        client.start()
        return client

    # ------------------------------------------------------------ blocks

    def _store(self, number: int) -> float:
        request = self._client.create_request(1000 + number, f"store-{number}", "bench")
        self._stored[number] = request
        started = time.perf_counter()
        stored = self._client.store(request, 0, request.num_full_tokens)
        taken_s = time.perf_counter() - started
        self._client.end_session(request)
        if not stored.succeeded:
            raise ValueError("the server did not store the blocks")
        # Its answer comes before the blocks can be found.
        for attempt in range(1000):
            again = self._client.create_request(1000 + number, f"seen-{number}-{attempt}", "bench")
            found = _asked(self._client, helpers._make_key(again.token_ids, again.request_id, 0, again.num_full_tokens))
            self._client.end_session(again)
            if found == self._task.num_blocks:
                return taken_s
            time.sleep(0.01)
        raise TimeoutError("the blocks were stored and are not found")

    def _fetch(self, number: int) -> float:
        request = self._client.create_request(1000 + number, f"fetch-{number}", "bench")
        key = helpers._make_key(request.token_ids, request.request_id, 0, request.num_full_tokens)
        started = time.perf_counter()
        found = _asked(self._client, key)
        got = self._client.retrieve(request, 0, found * self._task.block_tokens)
        taken_s = time.perf_counter() - started
        self._client.end_session(request)
        if found != self._task.num_blocks or not got.succeeded:
            raise ValueError(f"only {found} blocks came back")
        return taken_s

    # ------------------------------------------------------------ control path

    def _store_prompt(self) -> None:
        request = self._small.create_request(1, "prompt", "bench")
        # The bench's own prompt repeats one token; ours has the same tokens as everybody's.
        request = RequestContext(
            **{name: getattr(request, name) for name in request.__dataclass_fields__ if name != "token_ids"},
            token_ids=self._tokens,
        )
        if not self._small.store(request, 0, request.num_full_tokens).succeeded:
            raise ValueError("the server did not store the prompt")
        self._small.end_session(request)
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                self._lookup(0)
                return
            except ValueError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _lookup(self, _: int) -> float:
        self._lookups += 1
        request_id = f"lookup-{self._lookups}"
        started = time.perf_counter()
        key = helpers._make_key(self._tokens, request_id, 0, len(self._tokens))
        found = _asked(self._small, key)
        taken_s = time.perf_counter() - started
        self._small._req_client.end_session(request_id).result(timeout=_TIMEOUT_S)
        if found != self._task.lookup_tokens // self._task.block_tokens:
            raise ValueError(f"only {found} blocks were found")
        return taken_s

    def _ping(self, _: int) -> float:
        started = time.perf_counter()
        self._small._req_client.ping(None).result(timeout=_TIMEOUT_S)
        return time.perf_counter() - started


def _asked(client: Any, key: Any) -> int:
    """LOOKUP, and its status without a pause in between: the bench's own client would sleep."""
    requests = client._req_client
    requests.lookup(key, 1).result(timeout=_TIMEOUT_S)
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        found = requests.query_prefetch_status(key.request_id).result(timeout=_TIMEOUT_S)
        if found is not None:
            return int(getattr(found, "hit_chunks", found))
    raise TimeoutError("the lookup did not end")


def _heads(numbers: int) -> tuple[int, int]:
    return (8, numbers // 8) if numbers % 8 == 0 else (1, numbers)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _READY_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server did not start; see the log") from None
            time.sleep(0.2)


if __name__ == "__main__":
    serve(Daemon)
