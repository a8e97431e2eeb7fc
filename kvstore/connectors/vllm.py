"""vLLM's connector: what vLLM loads and calls, and nothing else; the work is done in `vllm_parts`.

    --kv-transfer-config '{"kv_connector": "KvstoreConnector", "kv_connector_module_path": "kvstore.connectors.vllm",
                           "kv_role": "kv_both"}'

For vLLM 0.32 and 0.33. Every fault inside ends here: it is counted, and vLLM goes on as if nothing were cached.
"""

import atexit
import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.version import __version__ as vllm_version

from kvstore.client import Client
from kvstore.connectors.vllm_parts import identity, pages, settings
from kvstore.connectors.vllm_parts.consult import Shard
from kvstore.connectors.vllm_parts.costs import Costs, blank_profile
from kvstore.connectors.vllm_parts.metrics import KvstorePromMetrics, KvstoreStats
from kvstore.connectors.vllm_parts.orders import News, Step
from kvstore.connectors.vllm_parts.scheduler import Scheduler
from kvstore.connectors.vllm_parts.stats import Counters
from kvstore.connectors.vllm_parts.worker import Worker
from kvstore.core.errors import ConfigError
from kvstore.core.key import Namespace
from kvstore.core.outcome import TierKind

_log = logging.getLogger("vllm.kvstore")
_P = ParamSpec("_P")
_R = TypeVar("_R")

_SOURCES = {TierKind.RAM: CacheHitSource.HOST, TierKind.SSD: CacheHitSource.DISK}
_ATTACH_DEADLINE_S = 1.0


@dataclass
class KvstoreMetadata(KVConnectorMetadata):  # type: ignore[misc]
    step: Step


@dataclass
class KvstoreWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    news: News = field(default_factory=News)

    def aggregate(self, other: "KvstoreWorkerMetadata") -> "KvstoreWorkerMetadata":
        both = News()
        both.add([self.news, other.news])
        return KvstoreWorkerMetadata(both)


@dataclass
class KvstoreHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Which namespace a rank's blocks are in."""

    namespace: Namespace


def _guarded(default: Callable[[], Any]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a hook that never raises; where it fails it answers `default()`."""

    def wrap(hook: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(hook)
        def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return hook(*args, **kwargs)
            except Exception:
                connector = args[0]
                assert isinstance(connector, KvstoreConnector)
                connector.failed(hook.__name__)
                answer: _R = default()
                return answer

        return guarded

    return wrap


class KvstoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module. The scheduler has one, each worker another."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises ConfigError where the model or the configuration cannot be served."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = settings.parse(transfer.kv_connector_extra_config)
        identity.refuse_what_cannot_be_right(
            vllm_config, kv_cache_config, hears_of_sleep=hasattr(KVConnectorBase_V1, "supports_sleep_mode")
        )
        self._counters = Counters()
        self._told: set[str] = set()
        self._worker: Worker | None = None
        self._scheduler: Scheduler | None = None
        self._namespace: Namespace | None = None
        self._rank = identity.Rank()
        self._failed_blocks: set[int] = set()
        if not transfer.is_kv_consumer:
            # Followed and stored like any other request, but never asked for.
            self._settings = replace(self._settings, plan="recompute")
        self._block_pool: Any = None
        if role == KVConnectorRole.SCHEDULER:
            _recompute_what_does_not_come(transfer)
        # vLLM does not always say when a process ends, and what waits to be stored would be lost.
        atexit.register(self.shutdown)

    @property
    def requires_kv_delivery(self) -> bool:
        # A cache: what is not stored is a miss later on.
        return False

    def failed(self, hook: str) -> None:
        """A hook has met a fault of ours."""
        self._counters.add("faults", hook)
        if hook not in self._told:
            self._told.add(hook)
            _log.exception("kvstore: %s failed; vLLM goes on without it", hook)

    # ------------------------------------------------------------ both sides

    def shutdown(self) -> None:
        atexit.unregister(self.shutdown)
        worker, self._worker = self._worker, None
        scheduler, self._scheduler = self._scheduler, None
        try:
            if worker is not None:
                worker.close()
            if scheduler is not None:
                scheduler.close()
        except Exception:
            self.failed("shutdown")

    @_guarded(lambda: None)
    def get_kv_connector_stats(self) -> KvstoreStats | None:
        report = self._counters.take()
        return None if report is None else KvstoreStats(data=dict(report))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvstoreStats:
        return KvstoreStats() if data is None else KvstoreStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvstorePromMetrics:
        return KvstorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Raises ConfigError where a block's bytes cannot be copied."""
        groups = self._kv_cache_config.kv_cache_groups
        layers = pages.describe_all(kv_caches, groups[0].layer_names, self._kv_cache_config.num_blocks)
        device = str(next(iter(kv_caches.values())).device)
        self._rank = _rank(self._kv_cache_config)
        self._namespace = identity.namespace_of(
            self._vllm_config,
            self._kv_cache_config,
            layers,
            self._rank,
            version=vllm_version,
            backends=[each.full_cls_name() for each in _backends(self._vllm_config, groups[0].layer_names)],
            device=device,
            packing=_packing(self._vllm_config, groups[0].layer_names),
            weights=self._settings.weights or self._weights(),
            tenant=self._settings.tenant,
        )
        self._worker = Worker(
            self._settings,
            self._namespace,
            _pages_on(device, layers, kv_caches),
            self._client,
            self._counters,
            may_store=self._rank.stores and self._kv_transfer_config.is_kv_producer,
        )
        self._worker.begin()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return True

    def unregister_kv_caches(self) -> None:
        """Before sleep. Not guarded: what still read the memory that goes would be worse than no sleep."""
        if self._worker is not None:
            self._worker.pause()

    def restore_kv_caches(self) -> None:
        if self._worker is not None:
            self._worker.resume()

    @_guarded(lambda: None)
    def get_handshake_metadata(self) -> KvstoreHandshake | None:
        return None if self._namespace is None else KvstoreHandshake(self._namespace)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._worker is None:
            return
        try:
            self._worker.clear(_step(kv_connector_metadata))
        except Exception:
            # What may be overwritten under a store must not be stored.
            self._worker.stop_storing()
            self.failed("handle_preemptions")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        # Not guarded: it takes its own faults for failed loads, and raises only where blocks may be overwritten still.
        if self._worker is not None and self._connector_metadata is not None:
            self._worker.load(_step(self._connector_metadata))

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    @_guarded(lambda: None)
    def wait_for_save(self) -> None:
        if self._worker is not None and self._connector_metadata is not None:
            self._worker.store(_step(self._connector_metadata))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    @_guarded(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        step = Step() if self._connector_metadata is None else _step(self._connector_metadata)
        ended = self._worker.take(step)
        self._failed_blocks |= ended.failed_blocks
        return KVConnectorTransferResults(finished_sending=ended.stored, finished_recving=ended.loaded)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    @_guarded(lambda: None)
    def build_connector_worker_meta(self) -> KvstoreWorkerMetadata | None:
        news = None if self._worker is None else self._worker.take_news()
        return None if news is None else KvstoreWorkerMetadata(news)

    # ------------------------------------------------------------ scheduler

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        self._begin([metadata[rank] for rank in sorted(metadata)])

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        self._begin([metadata[rank] for rank in sorted(metadata)])

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """vLLM calls this before any worker answers the handshake."""
        self._block_pool = gpu_block_pool

    @_guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        # Not guarded: a load that vLLM waits for and that nobody ordered would never end.
        if self._scheduler is not None and num_external_tokens > 0:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvstoreMetadata:
        if self._scheduler is None:
            self._say_that_no_worker_came()
            return KvstoreMetadata(Step())
        try:
            return KvstoreMetadata(self._scheduler.begin_step(scheduler_output))
        except Exception:
            # Not an empty step: loads would be lost, and stores would read what the step overwrites.
            self.failed("build_connector_meta")
            return KvstoreMetadata(self._scheduler.begin_step_after_fault(scheduler_output))

    @_guarded(lambda: None)
    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    @_guarded(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            meta = connector_output.kv_connector_worker_meta
            news = meta.news if isinstance(meta, KvstoreWorkerMetadata) else None
            self._scheduler.end_step(news, set(connector_output.finished_sending or ()))

    @_guarded(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        held = self._scheduler is not None and self._scheduler.finished(request, block_ids)
        return held, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.is_holding

    @_guarded(dict)
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        counts: dict[CacheHitSource, int] = {}
        if self._scheduler is not None and num_external_tokens:
            for tier, tokens in self._scheduler.sources(request.request_id).items():
                source = _SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
                counts[source] = counts.get(source, 0) + tokens
        return counts if sum(counts.values()) == num_external_tokens else {}

    def take_events(self) -> Iterable[Any]:
        return ()

    @_guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        """Nothing stored so far is found again: vLLM calls this when its weights have changed."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    # ------------------------------------------------------------ helpers

    def _begin(self, handshakes: Sequence[Any]) -> None:
        namespaces = [each.namespace for each in handshakes if isinstance(each, KvstoreHandshake)]
        if not namespaces:
            return
        config = self._vllm_config
        distinct = list(dict.fromkeys(namespaces))
        first = distinct[0]
        per_block = first.block_tokens // (
            getattr(self._kv_cache_config, "hash_block_size", None) or first.block_tokens
        )
        profile = blank_profile(
            first.model,
            f"{_device_name()}, {first.dtype}, vllm",
            int(config.scheduler_config.max_num_batched_tokens),
            first.block_tokens,
            max(each.block_bytes for each in distinct),
        )
        self._namespace = first
        evict = getattr(self._block_pool, "evict_blocks", None)
        if self._settings.load == "sync" and (why := _why_not_sync(config, evict)):
            _log.warning('kvstore: "load" is "async" and not "sync": %s', why)
            self._settings = replace(self._settings, load="async")
        self._scheduler = Scheduler(
            self._settings,
            first.block_tokens,
            max(1, per_block),
            max(each.block_bytes for each in distinct),
            len(namespaces),
            lambda: [Shard(namespace, self._client_of(namespace, "vllm scheduler")) for namespace in distinct],
            Costs(profile, self._settings.profile_dir, time.monotonic),
            self._counters,
            may_store=self._kv_transfer_config.is_kv_producer,
            evict=evict or (lambda _: None),
            has_cached_blocks=self._has_cached_blocks,
        )
        self._scheduler.begin()

    def _has_cached_blocks(self) -> bool:
        """Whether vLLM's prefix cache has any block; also where that cannot be told."""
        cached = getattr(self._block_pool, "cached_block_hash_to_block", None)
        return cached is None or len(cached) > 0

    def _client(self) -> Client:
        assert self._namespace is not None
        return self._client_of(self._namespace, f"vllm worker {self._rank.pp_rank}.{self._rank.tp_rank}")

    def _client_of(self, namespace: Namespace, name: str) -> Client:
        return Client(self._settings.run_dir, namespace=namespace, name=name, deadline_s=_ATTACH_DEADLINE_S)

    def _weights(self) -> str:
        model = self._vllm_config.model_config
        files = identity.weight_files(model, _in_hub)
        if not files:
            _log.warning(
                "kvstore: no weights of %s lie on this machine, so they are known by name and revision alone: "
                'set "weights" in kv_connector_extra_config to something else whenever they change',
                identity.model_name(model),
            )
        return identity.weights_digest(model, files)

    def _say_that_no_worker_came(self) -> None:
        if "handshake" not in self._told:
            self._told.add("handshake")
            self._counters.add("faults", "handshake")
            _log.warning(
                "kvstore: no worker has said what its blocks are, so nothing is loaded and nothing is stored; the "
                "workers' logs say why"
            )


def _recompute_what_does_not_come(transfer: Any) -> None:
    """Set vLLM's policy, which its scheduler reads once it has made the connector: under its default a request fails
    whenever a cached block was evicted, late or damaged."""
    if transfer.kv_load_failure_policy != "recompute":
        _log.info(
            "kvstore: kv_load_failure_policy is set from %r to 'recompute': blocks that do not come are computed",
            transfer.kv_load_failure_policy,
        )
        transfer.kv_load_failure_policy = "recompute"


def _why_not_sync(config: Any, evict: object) -> str:
    """Return why a failed load before a step would not be noticed in time; "" where it is."""
    if config.max_concurrent_batches > 1:
        return "vLLM has more than one step under way (async scheduling, pipeline parallelism)"
    if getattr(config, "use_v2_model_runner", False):
        return "vLLM's V2 model runner computes on from where a failed load had left it (its issue 49250)"
    # Of requests that share failed blocks one computes them again, and the others run beside its first part.
    parts = {
        "long_prefill_token_threshold": getattr(config.scheduler_config, "long_prefill_token_threshold", 0) > 0,
        "images or audio": getattr(config.model_config, "is_multimodal_model", False),
        "data parallelism": getattr(config.parallel_config, "data_parallel_size", 1) > 1,
        "speculative decoding": getattr(config, "speculative_config", None) is not None,
    }
    if cut := [name for name, is_so in parts.items() if is_so]:
        return f"with {' and '.join(cut)} others may run before failed blocks are computed"
    if evict is None:
        return "this vLLM offers no way to take blocks out of its prefix cache"
    return ""


def _step(metadata: Any) -> Step:
    return metadata.step if isinstance(metadata, KvstoreMetadata) else Step()


def _rank(kv_cache_config: Any) -> identity.Rank:
    tp, pp = get_tp_group(), get_pp_group()
    replicas = int(getattr(kv_cache_config, "kv_tp_replicas", 1) or 1)
    return identity.Rank(tp.rank_in_group, tp.world_size, pp.rank_in_group, pp.world_size, replicas)


def _backends(config: Any, layer_names: Sequence[str]) -> Sequence[Any]:
    found: Sequence[Any] = get_current_attn_backends(config, list(layer_names))
    return found


def _pages_on(device: str, layers: Sequence[pages.Layer], kv_caches: Mapping[str, Any]) -> pages.Pages:
    if device == "cpu":
        return pages.HostPages(layers, kv_caches)
    if not device.startswith("cuda"):
        raise ConfigError(f"kvstore cannot copy blocks of a KV cache on {device}: it knows CPUs and CUDA devices")
    # Only here, so that a machine without a GPU needs no triton.
    from kvstore.connectors.vllm_parts.device import DevicePages

    on_device = DevicePages(layers, kv_caches)
    on_device.try_out()
    return on_device


def _packing(config: Any, layer_names: Sequence[str]) -> str:
    """Return how the layers of vLLM's CPU backend pack K and V, which is decided by more than the instruction sets."""
    layers = config.compilation_config.static_forward_context
    return " ".join(sorted({str(getattr(layers.get(name), "isa", "")) for name in layer_names}))


def _in_hub(name: str, file: str, revision: str | None) -> object:
    from huggingface_hub import try_to_load_from_cache

    return try_to_load_from_cache(name, file, revision=revision)


def _device_name() -> str:
    try:
        return f"{current_platform.get_device_name()} {identity.instruction_sets()}, {os.cpu_count()} cores"
    except Exception:  # a platform that has no name for its devices
        return f"{identity.instruction_sets()}, {os.cpu_count()} cores"
