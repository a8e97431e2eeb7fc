"""The names that `kvstore.connectors.vllm` takes from vLLM, where vLLM is not installed: enough to call its hooks."""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

_MODULE = "kvstore.connectors.vllm"
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"


class _Connector:
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._vllm_config, self._role, self._kv_cache_config = vllm_config, role, kv_cache_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._connector_metadata = None


class _Metric:
    """One metric, or one of its children; what it is set to goes into `values`, by its name and labels."""

    def __init__(self, values: dict[tuple[str, ...], float], path: tuple[str, ...]) -> None:
        self._values, self._path = values, path

    def labels(self, *labels: str) -> "_Metric":
        return _Metric(self._values, (*self._path, *labels))

    def set(self, value: float) -> None:
        self._values[self._path] = value


class _PromMetrics:
    """`metric_types` takes the values."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        def make(name: str, **_: Any) -> _Metric:
            return _Metric(metric_types, (name,))

        self._counter_cls = self._gauge_cls = self._histogram_cls = make
        self.per_engine_labelvalues = per_engine_labelvalues


class _Anything(SimpleNamespace):
    pass


_NAMES: dict[str, dict[str, Any]] = {
    _BASE: {
        "KVConnectorBase_V1": _Connector,
        "KVConnectorHandshakeMetadata": type("KVConnectorHandshakeMetadata", (), {}),
        "KVConnectorMetadata": type("KVConnectorMetadata", (), {}),
        "KVConnectorRole": SimpleNamespace(SCHEDULER="scheduler", WORKER="worker"),
        "KVConnectorTransferResults": _Anything,
        "KVConnectorWorkerMetadata": type("KVConnectorWorkerMetadata", (), {}),
        "SupportsHMA": type("SupportsHMA", (), {}),
    },
    _METRICS: {
        "KVConnectorPromMetrics": _PromMetrics,
        "KVConnectorStats": type("KVConnectorStats", (SimpleNamespace,), {}),
    },
    "vllm.distributed.kv_transfer.kv_connector.utils": {"get_current_attn_backends": lambda *_: []},
    "vllm.distributed.parallel_state": {"get_pp_group": None, "get_tp_group": None},
    "vllm.platforms": {"current_platform": SimpleNamespace(get_device_name=lambda: "cpu")},
    "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": SimpleNamespace(HOST=1, DISK=2, EXTERNAL_UNSPECIFIED=3)},
    "vllm.version": {"__version__": "0.32.0"},
}


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the connector's module as it is imported with these names; all is as before at the test's end."""
    for name, values in _NAMES.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        for key, value in values.items():
            monkeypatch.setattr(sys.modules[name], key, value, raising=False)
    for name in (_MODULE, "kvstore.connectors.vllm_parts.metrics"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(_MODULE)
    for name in (_MODULE, "kvstore.connectors.vllm_parts.metrics"):
        monkeypatch.setitem(sys.modules, name, sys.modules.pop(name))
    return module


def config_of(**transfer: Any) -> Any:
    """What the connector reads when it is made."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            **{
                "kv_connector_extra_config": {"run_dir": "/nowhere"},
                "kv_load_failure_policy": "recompute",
                "is_kv_consumer": True,
                "is_kv_producer": True,
                **transfer,
            }
        ),
        model_config=SimpleNamespace(model="org/model"),
        parallel_config=SimpleNamespace(),
        cache_config=SimpleNamespace(),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=256),
        max_concurrent_batches=1,
    )


class FullAttentionSpec:
    block_size = 32


def caches() -> Any:
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=["layer"])], num_blocks=8
    )
