"""Our plan against the others on a published trace, in twelve settings: mean time to first token, simulated.

    python benchmarks/simulations.py conversation_trace.jsonl

Prints one line per setting: seconds per strategy, and ours as a share of the best of the others. Takes about three
minutes. Deterministic: the hardware it runs on does not matter.
"""

import argparse
import sys
from pathlib import Path

from policies.profiles import machine
from policies.simulator.report import report
from policies.simulator.run import Simulation
from policies.simulator.setting import STRATEGIES, setting_of
from policies.trace import TraceRequest, read_trace

_GPUS = (("H100", 4, 1.0), ("H100", 2, 0.9), ("H100", 2, 1.25), ("A100", 6, 1.0))
_S3 = ((1e9, 0.1), (3e9, 0.04), (10e9, 0.02))


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare plans on a trace in twelve settings.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=None, help="only the first so many")
    options = parser.parse_args()
    trace = read_trace(options.trace, max_requests=options.requests)
    print(f"{'setting':<36}", *(f"{name:>10}" for name in STRATEGIES), " ours/best of the others")
    worst = 0.0
    for gpu, gpus, rate in _GPUS:
        requests = [
            TraceRequest(request.arrival_s / rate, request.prompt_tokens, request.output_tokens, request.hash_ids)
            for request in trace.requests
        ]
        for bytes_per_s, latency_s in _S3:
            setting = setting_of(
                machine(gpu, "Llama-3.1-8B"),
                gpus,
                trace.block_tokens,
                dram_bytes=134 * 10**9,
                ssd_bytes=1_070 * 10**9,
                ssd_bytes_per_s=7e9,
                s3_bytes_per_s=bytes_per_s,
                s3_latency_s=latency_s,
            )
            means = {name: report(Simulation(setting, name).run(requests), setting).ttft_mean_s for name in STRATEGIES}
            ratio = means["ours"] / min(seconds for name, seconds in means.items() if name != "ours")
            worst = max(worst, ratio)
            name = f"{gpus}x{gpu} rate {rate:g}, S3 {bytes_per_s / 1e9:g} GB/s {latency_s * 1e3:g} ms"
            print(f"{name:<36}", *(f"{seconds:10.3f}" for seconds in means.values()), f" {ratio:.3f}", flush=True)
    print(f"worst: {worst:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
