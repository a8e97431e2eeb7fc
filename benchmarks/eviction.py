"""The default eviction policy against the best of `lru`, `s3fifo` and `arc`, on loads that are made up.

    python -m benchmarks.eviction --seeds 1,2,3 [--whole-blocks]

Prints for each load the token hit ratios of the best of the three at 1, 3 and 10% of its unique blocks, each the best
for that figure alone, and by how many points `gittins` is ahead. Takes some minutes for a seed on two cores.
Deterministic: the hardware it runs on does not matter.
"""

import argparse
import difflib
import json
import os
import statistics
import sys
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final

import numpy as np

from benchmarks.made_up_loads import CHATS_AND_AGENTS, TEMPLATES, in_whole_blocks
from policies.eviction.choice import make
from policies.replay import Accesses, accesses_of, replay

_KINDS: Final = CHATS_AND_AGENTS | TEMPLATES
_OWN: Final = "gittins"
_RIVALS: Final = ("lru", "s3fifo", "arc")
_CAPACITIES: Final = (0.01, 0.03, 0.1)
# So many points behind count as a figure that falls short.
_SHORT_POINTS: Final = 0.3


@dataclass(frozen=True, slots=True)
class Result:
    """Of one load; one figure per capacity. Hit ratios and how far we are ahead in points, of 100."""

    kind: str
    seed: int
    num_requests: int
    num_blocks: int
    best: tuple[float, ...]
    ahead: tuple[float, ...]


def result_of(kind: str, seed: int, *, whole_blocks: bool = False) -> Result:
    load = _KINDS[kind](np.random.default_rng([seed, zlib.crc32(kind.encode())]))
    accesses = accesses_of(in_whole_blocks(load) if whole_blocks else load)
    best = [max(_points(accesses, share, name) for name in _RIVALS) for share in _CAPACITIES]
    ahead = [_points(accesses, share, _OWN) - rival for share, rival in zip(_CAPACITIES, best, strict=True)]
    return Result(kind, seed, len(accesses.prompt_tokens), accesses.num_blocks, tuple(best), tuple(ahead))


def summary(results: Sequence[Result], kinds: Mapping[str, object]) -> dict[str, float]:
    """Return what holds of all figures of these kinds; nothing where there are none."""
    ahead = [points for one in results if one.kind in kinds for points in one.ahead]
    if not ahead:
        return {}
    return {
        "figures": len(ahead),
        "short": sum(points < -_SHORT_POINTS for points in ahead),
        "worst": min(ahead),
        "mean": statistics.mean(ahead),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare eviction policies on made-up loads.")
    parser.add_argument(
        "--seeds", type=_seeds, default=[1], help="comma-separated; each makes other loads of the same kinds"
    )
    parser.add_argument("--kinds", default="", help=f"comma-separated, default: all of {', '.join(_KINDS)}")
    parser.add_argument("--whole-blocks", action="store_true", help="leave out the last block of each prompt")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    kinds = [name.strip() for name in options.kinds.split(",") if name.strip()] or list(_KINDS)
    unknown = [name for name in kinds if name not in _KINDS]
    if unknown:
        close = difflib.get_close_matches(unknown[0], _KINDS, 1)
        parser.error(f"there is no load {unknown[0]!r}" + (f"; the nearest is {close[0]!r}" if close else ""))
    jobs = [(kind, seed) for kind in kinds for seed in options.seeds]
    results = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        compare = partial(result_of, whole_blocks=options.whole_blocks)
        for result in pool.map(compare, *zip(*jobs, strict=True)):
            results.append(result)
            if not options.json:
                print(_line(result), flush=True)
    sums = {"chats and agents": summary(results, CHATS_AND_AGENTS), "templates": summary(results, TEMPLATES)}
    if options.json:
        print(json.dumps({"loads": [asdict(one) for one in results], "all": sums}, indent=2))
        return 0
    for name, found in sums.items():
        if found:
            print(
                f"{name}: {found['figures']} figures, {found['short']} more than {_SHORT_POINTS} behind, "
                f"worst {found['worst']:+.2f}, mean {found['mean']:+.2f}"
            )
    return 0


def _seeds(text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} are no whole numbers, separated by commas") from None


def _points(accesses: Accesses, share: float, name: str) -> float:
    capacity = int(share * accesses.num_blocks)
    return 100 * replay(accesses, capacity, lambda tier, _: make(name, tier, tier.clock)).token_hit_ratio


def _line(result: Result) -> str:
    best = " / ".join(f"{points:4.1f}" for points in result.best)
    ahead = " / ".join(f"{points:+5.2f}" for points in result.ahead)
    sizes = f"{result.num_requests:6} requests {result.num_blocks:7} blocks"
    return f"{result.kind:32} {result.seed:3} {sizes}   best {best}   ahead {ahead}"


if __name__ == "__main__":
    sys.exit(main())
