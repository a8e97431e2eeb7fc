from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.connectors.vllm_parts.adapters import Adapters
from kvstore.connectors.vllm_parts.stats import Counters


def write(folder: Path, weights: bytes, rank: int = 8) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(f'{{"r": {rank}}}')
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def request_of(folder: Path, name: str = "latest", **others: Any) -> Any:
    return SimpleNamespace(lora_request=SimpleNamespace(lora_name=name, lora_path=str(folder), **others))


@pytest.fixture
def adapters() -> Adapters:
    return Adapters(Counters())


def test_a_request_without_an_adapter_has_nothing_mixed_in(adapters: Adapters) -> None:
    assert adapters.digest_of(SimpleNamespace(lora_request=None)) == b""
    assert adapters.digest_of(SimpleNamespace()) == b""


def test_other_weights_in_the_same_folder_are_another_adapter_for_the_next_engine(tmp_path: Path) -> None:
    """vLLM's hashes have the adapter's name and path. Trained anew into the same folder, it was served what the old one
    had computed, from SSD, with a valid checksum."""
    request = request_of(write(tmp_path / "latest", b"old"))
    old = Adapters(Counters()).digest_of(request)
    assert old is not None and len(old) == 32
    assert Adapters(Counters()).digest_of(request) == old
    write(tmp_path / "latest", b"new")
    assert Adapters(Counters()).digest_of(request) not in (old, None)


def test_an_adapters_configuration_is_part_of_it(tmp_path: Path) -> None:
    request = request_of(write(tmp_path / "latest", b"same", rank=8))
    first = Adapters(Counters()).digest_of(request)
    write(tmp_path / "latest", b"same", rank=4)
    assert Adapters(Counters()).digest_of(request) != first


def test_one_that_changes_under_a_running_engine_is_not_cached_again(adapters: Adapters, tmp_path: Path) -> None:
    """Which of the two vLLM has in memory, or in its own prefix cache, is not known."""
    folder = write(tmp_path / "latest", b"old")
    old = adapters.digest_of(request_of(folder))
    write(folder, b"newer")
    assert adapters.digest_of(request_of(folder)) is None
    write(folder, b"old")
    assert adapters.digest_of(request_of(folder)) is None
    assert adapters.digest_of(request_of(folder, "under-another-name")) == old


def test_files_that_were_only_touched_are_the_same(adapters: Adapters, tmp_path: Path) -> None:
    folder = write(tmp_path / "latest", b"old")
    first = adapters.digest_of(request_of(folder))
    (folder / "adapter_model.safetensors").touch()
    assert adapters.digest_of(request_of(folder)) == first


def test_files_are_read_once(adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "latest", b"old")
    first = adapters.digest_of(request_of(folder))

    def no_more(*_: object) -> bytes:
        raise AssertionError("read again")

    monkeypatch.setattr("kvstore.connectors.vllm_parts.adapters.digest_of", no_more)
    assert adapters.digest_of(request_of(folder)) == first


@pytest.mark.parametrize("name", ["org/adapter", "gone"])
def test_an_adapter_that_cannot_be_read_is_none(tmp_path: Path, name: str) -> None:
    counters = Counters()
    assert Adapters(counters).digest_of(request_of(tmp_path / name)) is None
    report = counters.take()
    assert report is not None and report["counts"] == {"faults|adapter": 1}


def test_one_that_is_loaded_anew_in_place_is_none(adapters: Adapters, tmp_path: Path) -> None:
    folder = write(tmp_path / "latest", b"old")
    assert adapters.digest_of(request_of(folder, load_inplace=True)) is None
