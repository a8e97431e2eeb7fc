"""How long one plan takes to find: `policies.interval.compare`, by number of blocks, for latency and with a price.

python benchmarks/planner.py
"""

import os
import platform
import sys
import time

from kvstore.core.outcome import TierKind
from policies.cost import LoadCost
from policies.interval import Question, compare
from policies.profiles import machine

_ROUNDS = 300
_LOADS = {
    TierKind.RAM: LoadCost(1e-4, 1 / 50e9, 0.01),
    TierKind.SSD: LoadCost(1e-3, 1 / 7e9, 0.05),
    TierKind.S3: LoadCost(0.1, 1 / 1e9, 0.2),
}


def main() -> int:
    h100 = machine("H100", "Llama-3.1-8B")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {_ROUNDS} rounds")
    print("blocks  price  p50 ms  p99 ms")
    for count in (10, 100, 1000, 4000):
        tiers = [TierKind.RAM] * (count // 2) + [TierKind.SSD] * (count // 5) + [TierKind.S3] * (count * 3 // 10)
        question = Question(len(tiers) * 16 + 200, 16, 16 * h100.model.kv_bytes_per_token, 0, tiers, 0.1)
        for price in (0.0, 4.0):
            times_s = []
            for _ in range(_ROUNDS):
                began = time.perf_counter()
                compare(question, h100.prefill, _LOADS, price)
                times_s.append(time.perf_counter() - began)
            times_s.sort()
            p50, p99 = times_s[_ROUNDS // 2] * 1e3, times_s[_ROUNDS * 99 // 100] * 1e3
            print(f"{count:6}  {price:5.1f}  {p50:6.3f}  {p99:6.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
