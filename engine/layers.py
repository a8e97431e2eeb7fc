"""Computing a layer while later layers of the same cached blocks are still on their way from the host into the pool.

    mover      | layers 0-7 of all blocks | 8-15       | 16-23      | 24-31      | are all slots still valid? |
    step loop                             | layers 0-7 | 8-15       | 16-23      | 24-31      | take over, or drop |

It begins only once every block that is left of a fetch lies in host memory, so nothing slower than a copy is waited
for. What was computed counts only once every block was found valid after its copy; else it is dropped, and computed
again as if nothing had been.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

LayerOverlap = Literal["auto", "on", "off"]

# Where no layer comes for so long the copy counts as stuck. 256 MiB through 5 GB/s of unpinned memory take 0.05 s.
_PATIENCE_S = 0.5
# The pass can begin after the first group and ends a group behind the last copy: an eighth of either is lost.
_MOST_GROUPS = 8
# Shorter transfers are bound by their set-up, not by the bus.
_LEAST_TRANSFER_BYTES = 256 << 10


class LayerGate:
    """How many layers of some blocks are in the pool. The mover opens it layer by layer and closes it once, the step
    loop waits in it; neither ever waits for long for the other."""

    def __init__(self, patience_s: float = _PATIENCE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._changed = threading.Condition()
        self._num_there = 0
        self._is_over = False
        self._is_whole = False
        self._gave_up = False
        # How long the step loop stood here.
        self.waited_s = 0.0

    # ------------------------------------------------------------ the mover's

    def open(self, num_layers: int) -> None:
        """The first `num_layers` layers of every block are in the pool."""
        with self._changed:
            self._num_there = num_layers
            self._changed.notify_all()

    def close(self, *, is_whole: bool) -> None:
        """It is over: `is_whole` where every layer of every block is there and valid. Idempotent: the first counts."""
        with self._changed:
            if not self._is_over:
                self._is_whole, self._is_over = is_whole, True
                self._changed.notify_all()

    # ------------------------------------------------------------ the step loop's

    def wait_for(self, layer: int) -> None:
        """Return once this layer is there, or is certain not to count: then what is in its place is read for
        nothing, and `came_whole` will say so."""
        self._wait(lambda: self._num_there > layer)

    def came_whole(self) -> bool:
        """After the pass: wait for the mover's last word. False: nothing of the pass may be used."""
        self._wait(lambda: False)
        return self._is_whole and not self._gave_up

    def _wait(self, is_there: Callable[[], bool]) -> None:
        if is_there() or self._is_over or self._gave_up:
            return
        began_s = self._clock()
        with self._changed:
            while not (is_there() or self._is_over):
                before = self._num_there
                if not self._changed.wait(self._patience_s) and self._num_there == before and not self._is_over:
                    self._gave_up = True
                    break
        self.waited_s += self._clock() - began_s


def layer_ends(mode: LayerOverlap, *, is_cuda: bool, num_layers: int, payload_bytes: int) -> Sequence[int]:
    """Return up to which layer each turn of a copy goes, the last one `num_layers`; () where blocks are copied whole.

    auto: on a GPU only. On a CPU the pass needs the cores that copy.
    """
    if mode == "off" or (mode == "auto" and not is_cuda) or num_layers < 2:
        return ()
    least_layers = -(-_LEAST_TRANSFER_BYTES * num_layers // payload_bytes)
    stride = max(-(-num_layers // _MOST_GROUPS), least_layers)
    if stride >= num_layers and mode == "auto":
        return ()
    # Asked for, blocks are divided however small they are.
    stride = min(stride, -(-num_layers // 2))
    return [*range(stride, num_layers, stride), num_layers]
