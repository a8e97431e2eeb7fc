"""What makes two engines' blocks interchangeable, and what the connector refuses."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.connectors.vllm_parts.identity import (
    Rank,
    model_name,
    namespace_of,
    refuse_what_cannot_be_right,
    weight_files,
    weights_digest,
)
from kvstore.connectors.vllm_parts.pages import Layer
from kvstore.connectors.vllm_parts.seal import SEAL_BYTES
from kvstore.core.errors import ConfigError


class FullAttentionSpec(SimpleNamespace):
    """By its name as vLLM's."""


class SlidingWindowSpec(SimpleNamespace):
    """By its name as vLLM's."""


def spec(**fields: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**{"block_size": 16, "num_kv_heads": 4, "head_size": 32, **fields})


def cache_config(*specs: Any) -> SimpleNamespace:
    groups = [SimpleNamespace(kv_cache_spec=each, layer_names=["a", "b"]) for each in specs or (spec(),)]
    return SimpleNamespace(kv_cache_groups=groups, kv_cache_layout="LBHNC")


def config() -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(model="org/model-7b", dtype="torch.bfloat16", quantization=None),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256", calculate_kv_scales=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        load_config=SimpleNamespace(load_format="auto", model_loader_extra_config={}),
        speculative_config=None,
    )


LAYERS = [Layer(name, 4096 * index, 4096, 4096, 8, "form") for index, name in enumerate("ab")]


def namespace(change: Callable[[SimpleNamespace], object] = lambda _: None, **chosen: Any) -> bytes:
    vllm = config()
    change(vllm)
    fields: dict[str, Any] = {
        "version": "0.32.0",
        "backends": ["CPU_ATTN"],
        "device": "gpu",
        "packing": "",
        "weights": "digest",
        "tenant": "",
        "layers": LAYERS,
        "rank": Rank(),
        "cache": cache_config(),
        **chosen,
    }
    layers, rank, cache = fields.pop("layers"), fields.pop("rank"), fields.pop("cache")
    return namespace_of(vllm, cache, layers, rank, **fields).digest()


def test_equal_engines_share_a_namespace_and_a_patch_release_does_too() -> None:
    assert namespace() == namespace() == namespace(version="0.32.7")


def _set(path: str, value: object) -> Callable[[SimpleNamespace], None]:
    def change(vllm: SimpleNamespace) -> None:
        *folders, name = path.split(".")
        target = vllm
        for folder in folders:
            target = getattr(target, folder)
        setattr(target, name, value)

    return change


@pytest.mark.parametrize(
    "other",
    [
        {"weights": "others"},
        {"version": "0.33.0"},
        {"backends": ["FLASH_ATTN"]},
        {"device": "cpu"},
        # vLLM asks the kernel whether AMX may be used, and RISC-V names its vector unit elsewhere: of two machines with
        # the same flags one may pack as "amx" or "rvv", the other as "vec".
        {"packing": "amx"},
        # Random weights are not those of the files beside them.
        {"change": _set("load_config.load_format", "dummy")},
        {
            "change": _set(
                "load_config", SimpleNamespace(load_format="tensorizer", model_loader_extra_config={"uri": 1})
            )
        },
        {"tenant": "t"},
        {"rank": Rank(1, 2)},
        {"rank": Rank(0, 2)},
        {"rank": Rank(pp_rank=1, pp_size=2)},
        {"layers": LAYERS[:1]},
        {"layers": [replace(LAYERS[0], form="another order"), LAYERS[1]]},
        {"cache": cache_config(spec(block_size=32))},
        {"change": _set("model_config.model", "org/model-8b")},
        {"change": _set("model_config.dtype", "torch.float16")},
        {"change": _set("model_config.quantization", "fp8")},
        {"change": _set("cache_config.cache_dtype", "fp8")},
        {"change": _set("cache_config.prefix_caching_hash_algo", "sha256_cbor")},
        {"change": _set("speculative_config", SimpleNamespace(method="eagle", model="org/draft"))},
    ],
    ids=str,
)
def test_whatever_may_make_other_bytes_makes_another_namespace(other: dict[str, Any]) -> None:
    assert namespace(**other) != namespace()


def test_ranks_that_hold_the_same_kv_share_a_namespace_and_one_of_them_stores() -> None:
    first, second = Rank(0, 2, kv_replicas=2), Rank(1, 2, kv_replicas=2)
    assert namespace(rank=first) == namespace(rank=second)
    assert (first.stores, second.stores) == (True, False)
    assert Rank(1, 2).stores


def test_a_block_has_room_for_its_seal() -> None:
    made = namespace_of(
        config(),
        cache_config(),
        LAYERS,
        Rank(),
        version="0.32.0",
        backends=[],
        device="gpu",
        packing="",
        weights="",
        tenant="",
    )
    assert made.block_bytes == 2 * 4096 + SEAL_BYTES
    assert made.block_tokens == 16


def test_plain_attention_is_served_and_several_kinds_of_it_in_one_group_too() -> None:
    refuse_what_cannot_be_right(config(), cache_config(), {})
    uniform = SimpleNamespace(kv_cache_specs={"a": spec(), "b": spec(head_size=64)}, block_size=16)
    refuse_what_cannot_be_right(config(), cache_config(uniform), {})


@pytest.mark.parametrize(
    "specs", [(spec(), SlidingWindowSpec(block_size=16)), (SlidingWindowSpec(block_size=16),), (spec(), spec())]
)
def test_other_layers_are_refused_with_the_models_name_and_what_to_do(specs: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match=r"org/model-7b.*--disable-hybrid-kv-cache-manager"):
        refuse_what_cannot_be_right(config(), cache_config(*specs), {})


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("parallel_config.decode_context_parallel_size", 2, "decode_context_parallel_size"),
        ("parallel_config.nnodes", 2, "machines"),
        ("cache_config.calculate_kv_scales", True, "calculate_kv_scales"),
        ("cache_config.prefix_caching_hash_algo", "xxhash", "PYTHONHASHSEED"),
    ],
)
def test_what_would_make_blocks_that_nobody_can_use_is_refused(path: str, value: object, named: str) -> None:
    vllm = config()
    _set(path, value)(vllm)
    with pytest.raises(ConfigError, match=named):
        refuse_what_cannot_be_right(vllm, cache_config(), {})


def test_sleep_mode_is_refused_where_vllm_does_not_tell_of_it() -> None:
    """A store that had waited over the sleep would have kept what the memory held afterwards, under a good key."""
    vllm = config()
    vllm.model_config.enable_sleep_mode = True
    refuse_what_cannot_be_right(vllm, cache_config(), {}, hears_of_sleep=True)
    with pytest.raises(ConfigError, match=r"sleep mode.*vLLM 0\.33"):
        refuse_what_cannot_be_right(vllm, cache_config(), {}, hears_of_sleep=False)


def test_a_hash_with_a_seed_is_served() -> None:
    vllm = config()
    vllm.cache_config.prefix_caching_hash_algo = "xxhash"
    refuse_what_cannot_be_right(vllm, cache_config(), {"PYTHONHASHSEED": "0"})


class Configuration:
    def __init__(self, **fields: object) -> None:
        self._fields = fields

    def to_json_string(self, use_diff: bool = True) -> str:
        return json.dumps(self._fields)


def model(**fields: object) -> SimpleNamespace:
    return SimpleNamespace(model="org/model-7b", revision="main", max_model_len=4096, hf_config=Configuration(**fields))


def test_weights_are_known_by_their_bytes_and_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    before = weights_digest(model(rope_theta=1), [path])
    os.utime(path, (0, 0))
    assert weights_digest(model(rope_theta=1, _name_or_path="elsewhere"), [path]) == before
    assert weights_digest(model(rope_theta=2), [path]) != before
    path.write_bytes(b"weighty")
    assert weights_digest(model(rope_theta=1), [path]) != before


def test_where_there_are_no_files_name_and_revision_must_do() -> None:
    other = model()
    other.revision = "v2"
    assert weights_digest(model(), []) != weights_digest(other, [])


def test_two_gguf_files_of_one_name_are_two_models(tmp_path: Path) -> None:
    digests = set()
    for number in (1, 2):
        path = tmp_path / str(number) / "x.gguf"
        path.parent.mkdir()
        path.write_bytes(bytes([number]) * 100)
        given = model()
        given.model = str(path)
        assert model_name(given) == "x.gguf"
        digests.add(weights_digest(given, weight_files(given, lambda *_: None)))
    assert len(digests) == 2


def test_weights_in_a_bucket_are_known_by_what_vllm_was_given(tmp_path: Path) -> None:
    """vLLM puts the other files into a folder of its own, the same for every version of them."""
    digests = set()
    for url in ("s3://bucket/one", "s3://bucket/two"):
        given = model()
        given.model, given.model_weights = str(tmp_path), url
        assert weight_files(given, lambda *_: None) == []
        assert model_name(given) == url
        digests.add(weights_digest(given, []))
    assert len(digests) == 2


def test_a_folders_place_is_not_the_models_name(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    assert model_name(SimpleNamespace(model=str(tmp_path / "llama"))) == "llama"
    assert model_name(SimpleNamespace(model="org/llama")) == "org/llama"
