"""A process that stores and deletes blocks on SSD until it is killed, saying what it does.

    python -m tests.support.ssdwriter FOLDER FIRST_BLOCK

prints `stored N` after block N was acknowledged as stored and `deleting N` before it deletes it.
"""

import itertools
import random
import sys
from pathlib import Path

from kvstore.core.outcome import Outcome
from tests.support.blocks import key, meta, payload, recovered
from tiers.ssd import SsdTier

MAX_BYTES = 6 << 20
PAYLOAD_BYTES = 20_480
BATCH_BLOCKS = 12


def main(folder: str, first: int) -> None:
    tier = SsdTier(Path(folder), max_bytes=MAX_BYTES)
    choice = random.Random(first)
    held = [block.depth for block in recovered(tier)]
    for start in itertools.count(first, BATCH_BLOCKS):
        blocks = [meta(number, PAYLOAD_BYTES) for number in range(start, start + BATCH_BLOCKS)]
        outcomes = tier.write(blocks, [payload(block) for block in blocks])
        stored = [block.depth for block, outcome in zip(blocks, outcomes, strict=True) if outcome is Outcome.OK]
        held += stored
        _say("stored", stored)
        if Outcome.FULL in outcomes or choice.random() < 0.3:
            doomed = choice.sample(held, len(held) // 2)
            _say("deleting", doomed)
            tier.delete([key(number) for number in doomed])
            held = [number for number in held if number not in set(doomed)]


def _say(verb: str, numbers: list[int]) -> None:
    sys.stdout.write("".join(f"{verb} {number}\n" for number in numbers))
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
