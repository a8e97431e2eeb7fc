"""kill -9 in the middle of writes and deletes: what the tier shows afterwards is whole, whatever the moment."""

import random
import subprocess
import sys
import time
from pathlib import Path

from kvstore.core.outcome import Outcome
from tests.support.blocks import blank, key, payload, recovered
from tests.support.ssdwriter import MAX_BYTES
from tiers.ssd import SsdTier

KILLS = 8


def test_a_killed_writer_leaves_whole_blocks_and_all_that_it_acknowledged(tmp_path: Path) -> None:
    moments = random.Random(7)
    must_be_there: set[int] = set()
    for kill in range(KILLS):
        said = run_and_kill(tmp_path, kill * 100_000, moments.uniform(0, 0.15))
        assert any(verb == "stored" for verb, _ in said)
        for verb, number in said:
            if verb == "stored":
                must_be_there.add(number)
            else:
                must_be_there.discard(number)
        tier = SsdTier(tmp_path, max_bytes=MAX_BYTES, lock_wait_s=10.0)
        found = recovered(tier)
        into = [blank(block) for block in found]
        assert tier.read(found, into) == [Outcome.OK] * len(found)
        assert all(view == payload(block) for block, view in zip(found, into, strict=True))
        assert tier.contains([key(number) for number in must_be_there]) == [Outcome.OK] * len(must_be_there)
        assert tier.faults() == {}
        tier.check_integrity()
        tier.close()


def run_and_kill(folder: Path, first: int, after_s: float) -> list[tuple[str, int]]:
    """Run the writer until `after_s` past its first acknowledgement; return what it said."""
    command = [sys.executable, "-m", "tests.support.ssdwriter", str(folder), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        # Not to wait for anything: to be killed at a moment that has nothing to do with what it writes.
        time.sleep(after_s)
        process.kill()
        lines += process.stdout.readlines()
    words = [line.split() for line in lines if line.endswith("\n")]
    return [(verb, int(number)) for verb, number in words]
