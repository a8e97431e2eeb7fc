"""SGLang's storage backend against a real daemon, called as SGLang's cache controller calls it."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.connectors import hicache
from tests.flows.conftest import make_daemon
from tests.support.daemons import DaemonProcess, until

hicache.stand_in()

from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)

from kvstore.connectors.sglang import KvstoreStorage, namespace_of  # noqa: E402
from kvstore.connectors.sglang_parts.identity import Model  # noqa: E402
from kvstore.connectors.sglang_parts.pages import _hash  # noqa: E402
from kvstore.connectors.sglang_parts.settings import Settings  # noqa: E402
from kvstore.core.errors import ConfigError  # noqa: E402
from kvstore.core.key import engine_keys, event_name  # noqa: E402

__all__ = ["make_daemon"]

MakeDaemon = Callable[..., DaemonProcess]
CONFIG = HiCacheStorageConfig(
    tp_rank=0,
    tp_size=1,
    pp_rank=0,
    pp_size=1,
    attn_cp_rank=0,
    attn_cp_size=1,
    is_mla_model=False,
    enable_storage_metrics=False,
    is_page_first_layout=False,
    model_name="org/model",
)
MODEL = Model("weights", "numbers")


def hashes(num_pages: int, seed: str = "prompt") -> list[str]:
    """Chained as SGLang's are."""
    names = [hashlib.sha256(seed.encode()).hexdigest()]
    while len(names) < num_pages:
        names.append(hashlib.sha256(bytes.fromhex(names[-1])).hexdigest())
    return names


def places(host_pool: Any, *pages: int) -> torch.Tensor:
    """The tokens' places of these pages, as SGLang has them in `host_indices`."""
    return torch.cat([torch.arange(host_pool.page_size) + page * host_pool.page_size for page in pages])


class Ranks:
    """Backends of one daemon, closed at the end."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        self._made: list[KvstoreStorage] = []

    def make(self, host_pool: Any, config: HiCacheStorageConfig = CONFIG, **settings: object) -> KvstoreStorage:
        extra = {
            "backend_name": "kvstore",
            "kvstore": {"run_dir": str(self.daemon.run_dir), "weights": "w", **settings},
        }
        storage = KvstoreStorage(dataclasses.replace(config, extra_config=extra), {})
        self._made.append(storage)
        storage.register_mem_pool_host(host_pool)
        return storage

    def close(self) -> None:
        for storage in self._made:
            storage.close()


@pytest.fixture
def ranks(make_daemon: MakeDaemon) -> Iterator[Ranks]:
    with contextlib.closing(Ranks(make_daemon())) as made:
        yield made


def test_it_is_a_backend_that_sglang_can_make() -> None:
    assert issubclass(KvstoreStorage, HiCacheStorage)
    assert not KvstoreStorage.__abstractmethods__


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_pages_come_back_as_they_were_into_other_places_of_another_process(ranks: Ranks, layout: str) -> None:
    pool, other = hicache.HostPool(layout, seed=1), hicache.HostPool(layout, seed=2)
    writer, reader = ranks.make(pool), ranks.make(other)
    names = hashes(5)
    assert writer.batch_exists(names) == 0
    assert writer.batch_set_v1(names, places(pool, 3, 1, 4, 0, 5)) == [True] * 5
    assert reader.batch_exists([*names, "f" * 64]) == 5
    assert reader.exists(names[3]) and not reader.exists("f" * 64)
    assert reader.batch_get_v1([*names, "f" * 64], places(other, 9, 8, 7, 6, 5, 4)) == [True] * 5 + [False]
    for source, target in zip((3, 1, 4, 0, 5), (9, 8, 7, 6, 5), strict=True):
        stored = pool.get_data_page(source * pool.page_size)
        assert torch.equal(stored, other.get_data_page(target * other.page_size))
    assert writer.batch_set_v1(names, places(pool, 3, 1, 4, 0, 5)) == [True] * 5  # they are there


def test_the_older_calls_take_and_give_flat_pages(ranks: Ranks) -> None:
    pool = hicache.HostPool()
    storage = ranks.make(pool)
    names = hashes(3)
    pages = [pool.get_data_page(index * pool.page_size) for index in range(3)]
    assert storage.batch_set(names, pages)
    got = storage.batch_get([*names, "e" * 64], [pool.get_dummy_flat_data_page() for _ in range(4)])
    assert [page is not None for page in got] == [True, True, True, False]
    assert all(torch.equal(page, one) for page, one in zip(pages, got, strict=False) if one is not None)
    target = pool.get_dummy_flat_data_page()
    assert storage.get(names[1], target) is target
    assert torch.equal(target, pages[1])
    assert storage.set("a name that is no hash", pages[0])
    assert storage.exists("a name that is no hash")


def test_pages_may_be_stored_in_any_grouping(ranks: Ranks) -> None:
    """SGLang's radix tree splits nodes, and a node's pages are stored together."""
    pool = hicache.HostPool()
    storage = ranks.make(pool)
    names = hashes(6)
    assert storage.batch_set_v1(names[2:4], places(pool, 2, 3)) == [True, True]
    assert storage.batch_set_v1(names[:3], places(pool, 0, 1, 2)) == [True] * 3
    assert storage.batch_set_v1(names[3:], places(pool, 3, 4, 5)) == [True] * 3
    assert storage.batch_exists(names) == 6


@pytest.mark.parametrize(
    "changed",
    [
        {"model_name": "org/another"},
        {"tp_rank": 1, "tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
    ],
)
def test_what_hashes_do_not_say_keeps_pages_apart(changed: dict[str, Any]) -> None:
    pool = hicache.HostPool()
    one = namespace_of(CONFIG, pool, "kv", Settings(), MODEL)
    assert namespace_of(dataclasses.replace(CONFIG, **changed), pool, "kv", Settings(), MODEL).digest() != one.digest()


def test_layouts_page_sizes_pools_tenants_and_weights_keep_pages_apart() -> None:
    pool = hicache.HostPool()
    spaces = [
        namespace_of(CONFIG, pool, "kv", Settings(), MODEL),
        namespace_of(CONFIG, pool, "indexer", Settings(), MODEL),
        namespace_of(CONFIG, hicache.HostPool("page_first"), "kv", Settings(), MODEL),
        namespace_of(CONFIG, hicache.HostPool(page_size=8), "kv", Settings(), MODEL),
        namespace_of(CONFIG, pool, "kv", Settings(tenant="somebody"), MODEL),
        namespace_of(CONFIG, pool, "kv", Settings(), Model("step 2", "numbers")),
        namespace_of(CONFIG, pool, "kv", Settings(), Model("weights", "others")),
    ]
    assert len({space.digest() for space in spaces}) == len(spaces)


def test_ranks_that_hold_the_same_share_their_pages() -> None:
    pool = hicache.HostPool()
    shared = dataclasses.replace(CONFIG, is_mla_model=True, tp_size=2)
    spaces = {
        namespace_of(dataclasses.replace(shared, tp_rank=rank), pool, "kv", Settings(), MODEL).digest()
        for rank in (0, 1)
    }
    assert len(spaces) == 1


def test_after_a_clear_nothing_from_before_is_found(ranks: Ranks) -> None:
    pool = hicache.HostPool()
    storage = ranks.make(pool)
    names = hashes(2)
    assert storage.batch_set_v1(names, places(pool, 0, 1)) == [True, True]
    storage.clear()
    assert storage.batch_exists(names) == 0
    assert storage.batch_set_v1(names, places(pool, 0, 1)) == [True, True]
    assert storage.batch_exists(names) == 2


def test_without_a_daemon_everything_is_a_miss_until_there_is_one(ranks: Ranks) -> None:
    pool = hicache.HostPool()
    storage = ranks.make(pool, rest_s=0.01)
    names = hashes(2)
    assert storage.batch_set_v1(names, places(pool, 0, 1)) == [True, True]
    ranks.daemon.kill()
    assert storage.batch_exists(names) == 0
    assert storage.batch_get_v1(names, places(pool, 0, 1)) == [False, False]
    assert storage.batch_set_v1(hashes(2, "other"), places(pool, 0, 1)) == [False, False]
    assert not storage.set(names[0], pool.get_data_page(0))
    ranks.daemon.start()
    until(lambda: all(storage.batch_set_v1(names, places(pool, 0, 1))))
    assert storage.batch_get_v1(names, places(pool, 2, 3)) == [True, True]
    assert torch.equal(pool.get_data_page(0), pool.get_data_page(2 * pool.page_size))


def test_a_daemon_that_was_silent_is_left_alone_for_a_while(ranks: Ranks) -> None:
    pool = hicache.HostPool()
    storage = ranks.make(pool, rest_s=60.0)
    assert storage.batch_set_v1(hashes(1), places(pool, 0)) == [True]
    ranks.daemon.kill()
    assert storage.batch_exists(hashes(1)) == 0
    ranks.daemon.start()
    assert storage.batch_exists(hashes(1)) == 0
    assert storage.counts()["kv_failed_lookup"] == 1


def test_a_call_that_cannot_be_right_is_answered_and_counted(ranks: Ranks) -> None:
    """An exception would end SGLang's thread, and its third level, for good."""
    pool = hicache.HostPool()
    storage = ranks.make(pool)
    assert storage.batch_get_v1(hashes(2), places(pool, 0)) == [False, False]
    assert storage.batch_set_v2([PoolTransfer(name=PoolName.MAMBA, keys=hashes(1))]) == {PoolName.MAMBA: [False]}
    assert storage.counts()["failed_batch_get_v1"] == storage.counts()["failed_batch_set_v2"] == 1
    assert storage.batch_set_v1(hashes(1), places(pool, 0)) == [True]


def test_a_prefix_counts_as_far_as_every_pool_has_what_it_needs(ranks: Ranks) -> None:
    pool, indexer, mamba = hicache.HostPool(), hicache.HostPool(seed=3), hicache.HostPool(seed=4)
    storage = ranks.make(pool)
    storage.register_mem_host_pool_v2(indexer, PoolName.INDEXER)
    storage.register_mem_host_pool_v2(mamba, PoolName.MAMBA)
    names = hashes(6)
    assert storage.batch_set_v1(names, places(pool, *range(6))) == [True] * 6
    stored = storage.batch_set_v2(
        [
            PoolTransfer(PoolName.INDEXER, places(indexer, *range(5)), keys=names[:5]),
            PoolTransfer(PoolName.MAMBA, places(mamba, 3), keys=[names[3]]),
        ]
    )
    assert stored == {PoolName.INDEXER: [True] * 5, PoolName.MAMBA: [True]}
    wanted = [
        PoolTransfer(PoolName.INDEXER, keys=names),
        PoolTransfer(PoolName.MAMBA, keys=names[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES),
    ]
    found = storage.batch_exists_v2(names, wanted)
    assert found.kv_hit_pages == 4
    assert found.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.INDEXER: 5, PoolName.MAMBA: 4}
    assert storage.batch_exists_v2(names[:3], wanted[1:]).kv_hit_pages == 0
    target = places(mamba, 7)
    assert storage.batch_get_v2([PoolTransfer(PoolName.MAMBA, target, keys=[names[3]])]) == {PoolName.MAMBA: [True]}
    assert torch.equal(mamba.get_data_page(3 * mamba.page_size), mamba.get_data_page(7 * mamba.page_size))


def test_events_call_a_page_what_sglang_calls_it() -> None:
    """Its events have the first 64 bits of a page's hash."""
    (name,) = hashes(1)
    (key,) = engine_keys(bytes(32), [_hash(name)])
    assert event_name(key) == int(name[:16], 16)


def test_decode_context_parallelism_is_refused_by_name() -> None:
    config = dataclasses.replace(
        CONFIG, is_mla_model=True, tp_size=2, dcp_size=2, dcp_rank=0, logical_page_size=8, extra_config={}
    )
    with pytest.raises(ConfigError, match="decode context parallelism"):
        KvstoreStorage(config, {})


def test_weights_that_nobody_names_and_nobody_can_read_are_refused() -> None:
    """The served name alone told two fine-tunes apart, and it is a name that the user picks."""
    with pytest.raises(ConfigError, match='set "weights"'):
        KvstoreStorage(dataclasses.replace(CONFIG, extra_config={}), {})


def test_settings_that_are_none_are_refused_at_the_start() -> None:
    for given, named in (({"rundir": "/x"}, "rundir"), ({"rest_s": "soon"}, "rest_s"), ({"run_dir": ""}, "run_dir")):
        with pytest.raises(ConfigError, match=named):
            KvstoreStorage(dataclasses.replace(CONFIG, extra_config={"kvstore": given}), {})
