"""The engine's own metrics in Prometheus' form; those of the tiers come from the daemon."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.request import Request
from engine.service import Engine

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """`ended` is called once per request, on the event loop."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self._requests = Counter(
            "kvstore_engine_requests", "Requests by how they ended.", ["finish"], registry=self._registry
        )
        self._prompt_tokens = Counter(
            "kvstore_engine_prompt_tokens", "Prompt tokens by where their KV came from.", ["source"],
            registry=self._registry,
        )  # fmt: skip
        self._reply_tokens = Counter("kvstore_engine_reply_tokens", "Tokens generated.", registry=self._registry)
        self._ttft = Histogram(
            "kvstore_engine_ttft_seconds", "Time to first token.", buckets=_SECONDS, registry=self._registry
        )

    def ended(self, request: Request | None, finish: str) -> None:
        self._requests.labels(finish).inc()
        if request is None or request.result is None:
            return
        self._ttft.observe(request.result.ttft_s)
        self._reply_tokens.inc(len(request.output))
        self._prompt_tokens.labels("recomputed").inc(request.result.recomputed)
        for tier, count in request.result.tokens.items():
            self._prompt_tokens.labels(tier.label).inc(count)

    def text(self) -> bytes:
        """Return the exposition format, text version 0.0.4."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reads what the engine counts anyway."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        pool = GaugeMetricFamily("kvstore_engine_hbm_pool_blocks", "Pool blocks by state.", labels=["state"])
        state = engine.hbm_state()
        for name in ("free", "cached", "held", "in_use"):
            pool.add_metric([name], state[name])
        yield pool
        requests = GaugeMetricFamily("kvstore_engine_requests_now", "Requests in the scheduler.", labels=["state"])
        requests.add_metric(["waiting"], engine.scheduler.num_waiting)
        requests.add_metric(["active"], engine.scheduler.num_active)
        yield requests
        yield CounterMetricFamily(
            "kvstore_engine_preemptions", "Requests put back for want of HBM.", value=engine.scheduler.num_preemptions
        )
        for name, text, counts in (
            ("events", "What the engine did, by kind.", engine.counters.snapshot()),
            ("faults", "What went wrong with kvstore, by kind.", engine.faults.snapshot()),
        ):
            family = CounterMetricFamily(f"kvstore_engine_{name}", text, labels=["kind"])
            for kind, count in sorted(counts.items()):
                family.add_metric([kind], count)
            yield family
