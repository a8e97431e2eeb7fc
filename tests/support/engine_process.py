"""An engine in a process of its own that takes something from the daemon and then does nothing until it is killed.

    python -m tests.support.engine_process RUN_DIR grants|leases SEED NUM_BLOCKS

prints `holding N` when it has N grants (none committed, half of them half written) or N pinned blocks.
"""

import sys
import time
from pathlib import Path

from kvstore.client import Client
from kvstore.core.outcome import Outcome
from tests.support.chats import Prefix, namespace
from tests.support.waiting import PATIENCE_S


def main(run_dir: str, what: str, seed: str, num_blocks: str) -> None:
    prefix = Prefix(namespace(), int(seed), int(num_blocks))
    client = Client(Path(run_dir), namespace=prefix.namespace, name="to be killed", deadline_s=PATIENCE_S)
    if what == "grants":
        granted = [b for b in client.store(prefix.keys, prefix.namespace.root(), 0).blocks if b.outcome == Outcome.OK]
        for block in granted[::2]:
            assert block.view is not None
            block.view[:100] = b"x" * 100
        held = len(granted)
    else:
        stream = client.fetch(prefix.keys, 500.0)
        held = 0
        while not stream.done:
            held += sum(block.outcome == Outcome.OK for block in stream.landed(PATIENCE_S))
    print("holding", held, flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
