from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.connectors.sglang_parts.identity import Model, model_of
from kvstore.core.errors import ConfigError


def nothing_cached(name: str, file: str, revision: str | None) -> object:
    return None


def model_in(folder: Path, weights: bytes = b"weights", **changed: Any) -> Model:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    given = {"model_path": str(folder), "revision": None, "dtype": "auto", "kv_cache_dtype": "auto", **changed}
    return model_of("", SimpleNamespace(**given), SimpleNamespace(), "", nothing_cached)


def test_two_fine_tunes_that_are_served_under_one_name_share_nothing(tmp_path: Path) -> None:
    assert model_in(tmp_path / "a", b"base").weights != model_in(tmp_path / "a", b"tuned").weights


def test_the_same_files_elsewhere_are_the_same_weights(tmp_path: Path) -> None:
    assert model_in(tmp_path / "a") == model_in(tmp_path / "b")


def test_kinds_of_float8_are_told_apart_though_all_are_kept_as_bytes(tmp_path: Path) -> None:
    """A page stored as e4m3 was read as e5m2: other numbers, and the right checksum."""
    kinds = [model_in(tmp_path / "a", kv_cache_dtype=kind).numbers for kind in ("fp8_e4m3", "fp8_e5m2")]
    assert kinds[0] != kinds[1]


def test_a_draft_models_weights_count(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    found = []
    for weights in (b"one", b"two"):
        (tmp_path / "draft" / "model.safetensors").write_bytes(weights)
        model_in(tmp_path / "a")
        model = SimpleNamespace(model_path=str(tmp_path / "a"))
        draft = SimpleNamespace(speculative_draft_model_path=str(tmp_path / "draft"))
        found.append(model_of("", model, draft, "", nothing_cached).weights)
    assert found[0] != found[1]


@pytest.mark.parametrize("model", [None, SimpleNamespace(model_path="org/not-here", revision=None)])
def test_weights_that_cannot_be_read_must_be_named(model: Any) -> None:
    with pytest.raises(ConfigError, match='set "weights"'):
        model_of("", model, None, "", nothing_cached)
    assert model_of("step 2", model, None, "", nothing_cached).weights == "step 2"
