"""The connector's counts in vLLM's own /metrics, as `vllm:kvstore_…`."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvstore.connectors.vllm_parts import stats

_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class KvstoreStats(KVConnectorStats):  # type: ignore[misc]
    """`data` is a `stats.Report`."""

    def reset(self) -> None:
        self.data = dict(stats.empty())

    def aggregate(self, other: KVConnectorStats) -> "KvstoreStats":
        return KvstoreStats(data=dict(stats.merged(stats.sound(self.data), stats.sound(other.data))))

    def reduce(self) -> dict[str, int | float]:
        return stats.summary(stats.sound(self.data))

    def is_empty(self) -> bool:
        return stats.is_empty(stats.sound(self.data))


class KvstorePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._children: dict[tuple[object, ...], Any] = {}
        self._counts = {
            name: self._counter_cls(
                name=f"vllm:kvstore_{name}", documentation=text, labelnames=[*labelnames, *([label] if label else [])]
            )
            for name, (label, text) in stats.COUNTS.items()
        }
        self._levels = {
            name: self._gauge_cls(
                name=f"vllm:kvstore_{name}", documentation=text, labelnames=[*labelnames, *([label] if label else [])]
            )
            for name, (label, text) in stats.LEVELS.items()
        }
        self._seconds = {
            name: self._histogram_cls(
                name=f"vllm:kvstore_{name}_seconds", documentation=text, labelnames=labelnames, buckets=_BUCKETS
            )
            for name, text in stats.SECONDS.items()
        }
        # An engine reports with its steps; without a value nothing would say that it is not attached until then.
        for engine in per_engine_labelvalues.values():
            for side in ("scheduler", "worker"):
                self._child(self._levels, f"attached|{side}", engine).set(0)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        report = stats.sound(transfer_stats_data)
        engine = self.per_engine_labelvalues[engine_idx]
        for key, count in report["counts"].items():
            self._child(self._counts, key, engine).inc(count)
        for key, value in report["levels"].items():
            self._child(self._levels, key, engine).set(value)
        for key, samples in report["seconds"].items():
            child = self._child(self._seconds, key, engine)
            for seconds in samples:
                child.observe(seconds)

    def _child(self, metrics: dict[str, Any], key: str, engine: list[object]) -> Any:
        """Return the metric with its labels; remembered, since finding it by them takes long for every step."""
        found = self._children.get((key, *engine))
        if found is None:
            name, _, label = key.partition("|")
            found = metrics[name].labels(*engine, *([label] if label else []))
            self._children[key, *engine] = found
        return found
