from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.connectors.weights import digest_of, files_of, place_of


def nothing_cached(name: str, file: str, revision: str | None) -> object:
    return None


def refusing(name: str, file: str, revision: str | None) -> object:
    """As the hub's client does with what can be no name of its own."""
    raise ValueError(f"Repo id must be in the form 'repo_name' or 'namespace/repo_name': {name!r}")


@pytest.mark.parametrize("name", ["/models/none.gguf", "./none.gguf", "s3://bucket/model", "org/model:Q4_K_M"])
@pytest.mark.parametrize("in_hub", [nothing_cached, refusing])
def test_a_name_that_is_no_folder_stops_no_engine(name: str, in_hub: Callable[..., object]) -> None:
    """The hub's client raises for a GGUF file, s3:// and a name with a quantization, and vLLM ended at its start."""
    assert files_of(place_of(name, None, in_hub)) == []


def test_a_gguf_file_is_known_by_its_contents(tmp_path: Path) -> None:
    digests = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "x.gguf").write_bytes(bytes([number]) * 100)
        files = files_of(place_of(str(folder / "x.gguf"), None, refusing))
        assert files == [folder / "x.gguf"]
        digests.append(digest_of(files))
    assert digests[0] != digests[1]


def test_a_name_of_the_hub_is_looked_up_without_its_quantization(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "m.gguf").write_bytes(b"weights")
    asked = []

    def cached(name: str, file: str, revision: str | None) -> object:
        asked.append((name, revision))
        return str(tmp_path / file)

    assert files_of(place_of("org/m:Q4_K_M", "main", cached)) == [tmp_path / "m.gguf"]
    assert asked == [("org/m", "main")]


def test_a_folder_of_the_hubs_cache_is_known_by_the_names_it_gives_to_contents(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    blob = blobs / ("ab" * 32)
    blob.write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to(blob)
    before = digest_of(files_of(snapshot))
    blob.write_bytes(b"not read")
    assert digest_of(files_of(snapshot)) == before


def test_a_folder_that_is_called_blobs_by_chance_is_read(tmp_path: Path) -> None:
    """Its files' names say nothing of their contents: a fine-tune under the same name would share all keys."""
    folder = tmp_path / "blobs"
    folder.mkdir()
    weights = folder / "model.safetensors"
    digests = set()
    for contents in (b"base", b"tuned"):
        weights.write_bytes(contents)
        digests.add(digest_of(files_of(folder)))
    assert len(digests) == 2
