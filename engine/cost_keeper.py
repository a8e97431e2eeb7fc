"""Keeps what the engine learns of its costs between runs: loaded at its start, written now and then and at its end."""

import logging
import os
import platform
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

import torch

from policies import saved_profile
from policies.cost import SavedCosts
from policies.saved_profile import SavedProfile

_log = logging.getLogger(__name__)

_SAVE_EVERY_S = 300.0
_SNAPSHOT_S = 10.0
# For a disk that hangs; a file is written in a moment.
_WRITE_S = 1.0


def device_name(device: torch.device, dtype: str) -> str:
    """Name what computes, so that figures of another GPU, CPU or dtype are not taken for ours."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {dtype}"
    return f"{_cpu_model()}, {os.cpu_count()} cores, {dtype}"


def blank_profile(
    model: str, device: str, chunk_tokens: int, block_tokens: int, block_bytes: int, host: str = ""
) -> SavedProfile:
    """Return a profile of this host with nothing measured in it."""
    return SavedProfile(model, device, host or socket.gethostname(), chunk_tokens, block_tokens, block_bytes, 0.0)


class CostKeeper:
    """`snapshot` asks the step loop for what it knows. `saved` is what an earlier run left."""

    def __init__(
        self,
        folder: Path,
        profile: SavedProfile,
        snapshot: Callable[[], "Future[SavedCosts]"],
        wall_clock: Callable[[], float] = time.time,
        save_every_s: float = _SAVE_EVERY_S,
    ) -> None:
        self._folder = folder
        self._profile = profile
        self._snapshot = snapshot
        self._wall_clock = wall_clock
        self._save_every_s = save_every_s
        self._is_ending = threading.Event()
        self._asked: Future[SavedCosts] | None = None
        self._thread = threading.Thread(target=self._run, name="engine-costs", daemon=True)
        self._may_warn = True
        found = saved_profile.load(folder, profile)
        self.saved = SavedCosts() if found is None else found.costs

    def start(self) -> None:
        self._thread.start()

    def close(self, costs: SavedCosts | None) -> None:
        """End, and write `costs`, the last word of the step loop, which has ended; None: it may not have. Waits for no
        answer of the step loop."""
        self._is_ending.set()
        if self._asked is not None:
            self._asked.cancel()
        if self._thread.is_alive():
            self._thread.join(_WRITE_S)
        if costs is not None:
            self.save(costs)

    def save(self, costs: SavedCosts) -> None:
        """Write what was measured, if anything was; where that fails the engine goes on without, and says so once."""
        if costs.step is None and not costs.loads:
            return
        try:
            saved_profile.save(self._folder, self._profile.with_costs(costs, self._wall_clock(), "engine"))
        except OSError as error:
            if self._may_warn:
                _log.warning("what was measured cannot be kept in %s: %s", self._folder, error)
            self._may_warn = False

    def _run(self) -> None:
        while not self._is_ending.wait(self._save_every_s):
            try:
                self._asked = self._snapshot()
                # Either we see that the end has begun, or whoever began it sees what was asked, and cancels it.
                if self._is_ending.is_set():
                    return
                self.save(self._asked.result(_SNAPSHOT_S))
            except (FutureTimeout, CancelledError):
                # The step loop has better things to do, or is gone.
                continue
            except Exception:
                # The root of this thread: the engine goes on, and what it measures is lost with it.
                _log.exception("keeping the measured costs met a fault")
                return


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
