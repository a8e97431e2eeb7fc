"""What requests asked for, as lines of a trace that names nobody: lengths, times, and numbers for blocks.

A request is asked about (its prompt's keys) and later reported (its lengths). Only what was reported becomes a line, in
the order of the questions, as the format demands. Block keys are hashes of what people wrote, and whoever guesses a
text could recognise it by them: they never leave the daemon. A file numbers its blocks in order of appearance, and the
next file begins anew.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvstore.core.key import KEY_BYTES
from kvstore.wire import Report
from policies.trace import TraceRequest, line_of

# Questions whose requests were not reported yet, and for how long that is waited for.
_MAX_OPEN = 4096
_PATIENCE_S = 120.0
# Blocks that one file numbers: about 100 bytes each in memory.
_MAX_NUMBERED = 200_000


@dataclass(slots=True)
class _Asked:
    at_s: float
    owner: int
    block_tokens: int
    keys: bytes
    report: Report | None = None


class Recording:
    """Owned by the control thread. `write(line, begins_file)` takes one line; it must not block."""

    def __init__(self, write: Callable[[bytes, bool], None], clock: Callable[[], float]) -> None:
        self._write = write
        self._clock = clock
        self._open: deque[_Asked] = deque()
        # By who asked and the last block that was asked for.
        self._by_end: dict[tuple[int, bytes], deque[_Asked]] = {}
        self._numbers: dict[int, int] = {}
        self._num_blocks = 0
        self._began_s: float | None = None

    def asked(self, owner: int, block_tokens: int, keys: bytes) -> None:
        """An engine asked which blocks of a prompt there are; joined keys, from its first block on."""
        asked = _Asked(self._clock(), owner, block_tokens, keys)
        self._open.append(asked)
        self._by_end.setdefault((owner, keys[-KEY_BYTES:]), deque()).append(asked)
        self._flush()

    def reported(self, owner: int, report: Report) -> None:
        """The request whose question ended with `report.last_block` is over."""
        waiting = self._by_end.get((owner, report.last_block))
        asked = next((asked for asked in waiting or () if asked.report is None), None)
        if asked is not None:
            asked.report = report
            self._flush()

    def file_is_full(self) -> None:
        """The next line begins another file, with numbers and times of its own."""
        self._began_s = None

    def close(self) -> None:
        """Write what was reported, whatever may still come."""
        self._flush(patience_s=0.0)

    # ------------------------------------------------------------ private

    def _flush(self, patience_s: float = _PATIENCE_S) -> None:
        """Write what is complete, as far as nothing before it may still come."""
        too_old_s = self._clock() - patience_s
        while self._open:
            asked = self._open[0]
            if asked.report is None and asked.at_s > too_old_s and len(self._open) <= _MAX_OPEN:
                return
            self._open.popleft()
            end = (asked.owner, asked.keys[-KEY_BYTES:])
            self._by_end[end].remove(asked)
            if not self._by_end[end]:
                del self._by_end[end]
            if asked.report is not None:
                self._line(asked, asked.report)

    def _line(self, asked: _Asked, report: Report) -> None:
        num_blocks = -(-report.prompt_tokens // asked.block_tokens)
        num_full = len(asked.keys) // KEY_BYTES
        if not num_full <= num_blocks <= num_full + 1:
            return  # no prompt that belongs to this question
        begins = self._began_s is None or len(self._numbers) >= _MAX_NUMBERED
        if begins:
            self._numbers, self._num_blocks, self._began_s = {}, 0, asked.at_s
        assert self._began_s is not None
        numbers = [self._number(name) for name in _names(asked.keys)]
        if num_blocks > num_full:
            # The last block is computed anew each time, so it is nobody else's.
            numbers.append(self._new_number())
        request = TraceRequest(
            max(0.0, asked.at_s - self._began_s), report.prompt_tokens, report.output_tokens, tuple(numbers)
        )
        self._write(line_of(request), begins)

    def _number(self, name: int) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self._new_number()
        return number

    def _new_number(self) -> int:
        self._num_blocks += 1
        return self._num_blocks - 1


def _names(keys: bytes) -> list[int]:
    names: list[int] = np.frombuffer(keys, dtype="<u8").reshape(-1, KEY_BYTES // 8)[:, 0].tolist()
    return names
