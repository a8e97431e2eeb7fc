"""What SGLang 0.5.23 hands to a storage backend and expects of it, where SGLang is not installed.

Names, fields and signatures of srt/mem_cache/hicache_storage.py, as facts; `test_sglang.py` takes the real ones where
they can be imported. And a host pool that lays its pages out as SGLang's does (pool_host/mha.py).
"""

import importlib.util
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import torch

MODULE = "sglang.srt.mem_cache.hicache_storage"


@dataclass
class HiCacheStorageConfig:
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None


@dataclass
class HiCacheStorageExtraInfo:
    prefix_keys: list[str] | None = None
    extra_info: dict[str, Any] | None = None


class PoolName(str, Enum):  # noqa: UP042 -- it is one in SGLang, too, which decides what it is equal to
    KV = "kv"
    MAMBA = "mamba"
    INDEXER = "indexer"

    def __str__(self) -> str:
        return self.value


class PoolHitPolicy(str, Enum):  # noqa: UP042
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: torch.Tensor | None = None
    device_indices: torch.Tensor | None = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    nodes_to_load: list[Any] | None = None
    indices_from_pool: PoolName | None = None


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[Any, int]

    @classmethod
    def empty(cls) -> "PoolTransferResult":
        return cls(0, {})


class HiCacheStorage(ABC):
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if not hasattr(self, "registered_pools"):
            self.registered_pools = {}
        self.registered_pools[host_pool_name] = host_pool

    @abstractmethod
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None: ...

    @abstractmethod
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None] | int: ...

    @abstractmethod
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool: ...

    @abstractmethod
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool: ...

    @abstractmethod
    def exists(self, key: str) -> bool: ...


def stand_in() -> None:
    """Have `import sglang…hicache_storage` find the names above, unless SGLang is installed."""
    if MODULE in sys.modules or importlib.util.find_spec("sglang") is not None:
        return
    parent = ""
    for part in MODULE.split("."):
        parent = f"{parent}.{part}" if parent else part
        sys.modules[parent] = ModuleType(parent)
    for name, value in list(globals().items()):
        if getattr(value, "__module__", "") == __name__:
            setattr(sys.modules[MODULE], name, value)


class HostPool:
    """Pages of `page_size` tokens, K and V of all layers, in one of SGLang's two common layouts."""

    layer_num, head_num, head_dim, start_layer = 3, 2, 8, 0
    dtype = torch.bfloat16

    def __init__(self, layout: str = "layer_first", page_size: int = 4, num_pages: int = 16, seed: int = 0) -> None:
        self.layout = layout
        self.page_size = page_size
        size = page_size * num_pages
        middle = (self.layer_num, size) if layout == "layer_first" else (size, self.layer_num)
        generator = torch.Generator().manual_seed(seed)
        self.kv_buffer = torch.rand((2, *middle, self.head_num, self.head_dim), generator=generator).to(self.dtype)

    def _page(self, index: int) -> torch.Tensor:
        tokens = slice(index, index + self.page_size)
        return self.kv_buffer[:, :, tokens] if self.layout == "layer_first" else self.kv_buffer[:, tokens]

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self._page(index).flatten() if flat else self._page(index)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self._page(0).numel(), dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        page = self._page(index)
        page[:] = data_page.reshape(page.shape)
