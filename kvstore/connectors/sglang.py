"""SGLang's HiCache storage backend: the third level of its cache, behind GPU and host memory, kept by the daemon.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "kvstore", "module_path": "kvstore.connectors.sglang", "class_name": "KvstoreStorage",
      "interface_v1": 1, "kvstore": {"run_dir": "/run/kvstore"}}'

Written against `HiCacheStorage` of SGLang 0.5.23 (srt/mem_cache/hicache_storage.py). Every method answers: what fails
is a miss, or was not stored. For SGLang's threads end with an exception and are never started again.
Does not cover: what is asked of the daemon, and deadlines (kvstore/connectors/sglang_parts/pages.py).
"""

import functools
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvstore.connectors.sglang_parts.identity import Model, model_of
from kvstore.connectors.sglang_parts.pages import Pages
from kvstore.connectors.sglang_parts.settings import Settings, parse
from kvstore.core.counts import Counts
from kvstore.core.errors import ConfigError
from kvstore.core.key import Namespace

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")
_KV = "kv"


def _answering(default: Callable[..., _T]) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Make a method answer `default(its arguments)` where it fails, count that, and log the first time."""

    def wrap(method: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(method)
        def answering(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            try:
                return method(*args, **kwargs)
            except Exception:
                # The root of SGLang's calls: an exception would end its thread, and with it the cache, for good.
                storage: Any = args[0]
                storage.failed(method.__name__)
                return default(*args[1:], **kwargs)

        return answering

    return wrap


def _no_pages(keys: Sequence[str], *_: object, **__: object) -> list[bool]:
    return [False] * len(keys)


def _no_page(*_: object, **__: object) -> torch.Tensor | None:
    return None


def _no_pools(transfers: Sequence[PoolTransfer], *_: object, **__: object) -> dict[Any, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}


@dataclass(frozen=True, slots=True)
class _Pool:
    """A host pool of SGLang's, the type of its flat pages, and where they are kept."""

    host: Any
    dtype: torch.dtype
    pages: Pages


class KvstoreStorage(HiCacheStorage):  # type: ignore[misc]
    """See the module. SGLang makes one per rank, then registers the host pool, then calls from three threads."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: object = None) -> None:
        """Raises ConfigError for settings that are none, and for what cannot be kept; the daemon may be down."""
        if getattr(storage_config, "dcp_size", 1) > 1:
            raise ConfigError(
                "pages of decode context parallelism cannot be kept: start SGLang without it, or without this backend"
            )
        self._config = storage_config
        self._settings: Settings = parse(storage_config.extra_config)
        self._model = model_of(self._settings.weights, *_arguments(), "hip" if torch.version.hip else "", _in_hub)
        self._mutex = threading.Lock()
        self._pools: dict[str, _Pool] = {}
        self._failures = Counts()
        # What was stored before a `clear` is not to be found again.
        self._era = ""

    # ------------------------------------------------------------ host pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(str(host_pool_name), host_pool)

    # ------------------------------------------------------------ which pages there are

    @_answering(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many pages, from the first on, are there."""
        return self._pages(_KV).leading(keys)

    @_answering(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        return self._pages(_KV).leading([key]) == 1

    @_answering(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The longest prefix of pages that is there with what each other pool needs for it."""
        hits = self._pages(_KV).leading(keys)
        # By the names as SGLang has them: its enum is not equal to its text as a key.
        by_pool: dict[Any, int] = {PoolName.KV: hits} if hits else {}
        usable = hits
        for transfer in pool_transfers or []:
            if not usable:
                break
            pages = self._pages(str(transfer.name))
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                found = pages.leading(keys[:usable])
            else:
                found = _longest_tail(pages, keys[:usable], max(1, len(transfer.keys or [])))
            if found:
                by_pool[transfer.name] = found
            usable = min(usable, found)
        return PoolTransferResult(usable, by_pool)

    # ------------------------------------------------------------ loading

    @_answering(_no_pages)
    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages into the host pool; `host_indices` has the places of their tokens, page after page."""
        return self._load(_KV, keys, host_indices)

    @_answering(_no_pools)
    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[Any, list[bool]]:
        return {
            transfer.name: self._load(str(transfer.name), transfer.keys or [], transfer.host_indices)
            for transfer in transfers
        }

    @_answering(_no_page)
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        found: torch.Tensor | None = self.batch_get([key], [target_location])[0]
        return found

    @_answering(lambda keys, *_, **__: [None] * len(keys))
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Load pages into flat tensors, which are returned where the page was there."""
        targets: list[torch.Tensor] = list(target_locations)

        def put(index: int, payload: memoryview) -> None:
            _bytes_of(targets[index])[:] = np.frombuffer(payload, np.uint8)

        right = self._pages(_KV).load(keys, put)
        return [target if is_right else None for target, is_right in zip(targets, right, strict=True)]

    # ------------------------------------------------------------ storing

    @_answering(_no_pages)
    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._store(_KV, keys, host_indices)

    @_answering(_no_pools)
    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[Any, list[bool]]:
        return {
            transfer.name: self._store(str(transfer.name), transfer.keys or [], transfer.host_indices)
            for transfer in transfers
        }

    @_answering(lambda *_, **__: False)
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    @_answering(lambda *_, **__: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store flat pages; whether all of them are there then."""
        pages: list[torch.Tensor] = list(values)

        def get(index: int, slot: memoryview) -> None:
            np.frombuffer(slot, np.uint8)[:] = _bytes_of(pages[index])

        return all(self._pages(_KV).store(keys, get))

    # ------------------------------------------------------------ the rest

    @_answering(lambda *_, **__: None)
    def clear(self) -> None:
        """Find nothing again of what was stored before. It stays in the daemon until its room is needed, and a new
        process would find it: change `weights` where the weights did."""
        with self._mutex:
            self._era = secrets.token_hex(8)
            pools, self._pools = self._pools, {}
            for name, pool in pools.items():
                pool.pages.close()
                self._pools[name] = self._open(name, pool.host)

    def counts(self) -> dict[str, int]:
        """What became of pages, by pool, and of calls that failed."""
        counts = {
            f"{name}_{kind}": number
            for name, pool in self._pools.items()
            for kind, number in pool.pages.counts.snapshot().items()
        }
        return counts | {f"failed_{kind}": number for kind, number in self._failures.snapshot().items()}

    def get_stats(self) -> None:
        """SGLang's metrics know pages and bandwidths of backends alone; the daemon's /metrics has both."""
        return None

    def close(self) -> None:
        """Idempotent."""
        with self._mutex:
            for pool in self._pools.values():
                pool.pages.close()
            self._pools.clear()

    def failed(self, method: str) -> None:
        if not self._failures.snapshot().get(method):
            _log.exception("%s failed; SGLang goes on without the KV store's answer", method)
        self._failures.add(method)

    # ------------------------------------------------------------ private

    def _register(self, name: str, host_pool: Any) -> None:
        with self._mutex:
            before = self._pools.pop(name, None)
            if before is not None:
                before.pages.close()
            self._pools[name] = self._open(name, host_pool)

    def _open(self, name: str, host_pool: Any) -> _Pool:
        namespace = namespace_of(self._config, host_pool, name, self._settings, self._model, self._era)
        rank = f"sglang tp{self._config.tp_rank} pp{self._config.pp_rank} {name}"
        dtype = host_pool.get_dummy_flat_data_page().dtype
        return _Pool(host_pool, dtype, Pages(namespace, self._settings, rank))

    def _pages(self, name: str) -> Pages:
        return self._pools[name].pages

    def _load(self, name: str, keys: list[str], host_indices: torch.Tensor) -> list[bool]:
        pool = self._pools[name]
        places = _places(keys, host_indices, pool.host.page_size)

        def put(index: int, payload: memoryview) -> None:
            pool.host.set_from_flat_data_page(places[index], torch.frombuffer(payload, dtype=pool.dtype))

        return pool.pages.load(keys, put)

    def _store(self, name: str, keys: list[str], host_indices: torch.Tensor) -> list[bool]:
        pool = self._pools[name]
        places = _places(keys, host_indices, pool.host.page_size)

        def get(index: int, slot: memoryview) -> None:
            np.frombuffer(slot, np.uint8)[:] = _bytes_of(pool.host.get_data_page(places[index], flat=True))

        return pool.pages.store(keys, get)


def namespace_of(
    config: HiCacheStorageConfig, host_pool: Any, name: str, settings: Settings, model: Model, era: str = ""
) -> Namespace:
    """Everything that SGLang's page hashes do not cover and that pages must agree in.

    Ranks of a model whose KV is the same on all of them (MLA) share one namespace; SGLang has one of them store.
    """
    shared = config.is_mla_model
    page: torch.Tensor = host_pool.get_dummy_flat_data_page()
    layout = (
        "sglang-1",
        name,
        host_pool.layout,
        f"cp{config.attn_cp_rank}of{config.attn_cp_size}",
        f"from layer {getattr(host_pool, 'start_layer', 0)}",
        era,
    )
    return Namespace(
        model=config.model_name or "",
        weights_digest=model.weights,
        dtype=f"{page.dtype} {model.numbers}",
        kv_layout=" ".join(layout),
        block_tokens=host_pool.page_size,
        block_bytes=page.numel() * page.element_size(),
        num_layers=getattr(host_pool, "layer_num", 0),
        num_kv_heads=getattr(host_pool, "head_num", 0),
        head_dim=getattr(host_pool, "head_dim", 0),
        tp_rank=0 if shared else config.tp_rank,
        tp_size=1 if shared else config.tp_size,
        pp_rank=config.pp_rank,
        pp_size=config.pp_size,
        tenant=settings.tenant,
    )


def _arguments() -> tuple[Any, Any]:
    """Return SGLang's arguments of the model and of speculation; None where it does not show them."""
    try:
        from sglang.srt.runtime_context import get_model, get_spec

        return get_model(), get_spec()
    except (ImportError, ValueError):
        return None, None


def _in_hub(name: str, file: str, revision: str | None) -> object:
    from huggingface_hub import try_to_load_from_cache

    return try_to_load_from_cache(name, file, revision=revision)


def _longest_tail(pages: Pages, keys: list[str], num_pages: int) -> int:
    """The longest prefix whose last `num_pages` pages are there (all, where it has fewer).

    Asked from the end, one run at a time; that they are rare is why their pool keeps only the last ones.
    """
    end = len(keys)
    while end > 0:
        begin = max(0, end - num_pages)
        found = pages.leading(keys[begin:end])
        if found == end - begin:
            return end
        end = begin + found
    return 0


def _places(keys: list[str], host_indices: torch.Tensor | None, page_size: int) -> list[int]:
    """Where each page begins in the host pool. Raises ValueError where there are not as many places as tokens."""
    if host_indices is None or host_indices.numel() != len(keys) * page_size:
        given = 0 if host_indices is None else host_indices.numel()
        raise ValueError(f"{len(keys)} pages of {page_size} tokens have {given} places")
    return [int(place) for place in host_indices[::page_size].tolist()]


def _bytes_of(tensor: torch.Tensor) -> Any:
    """The tensor's bytes as a flat array, of the same memory where that is contiguous."""
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
