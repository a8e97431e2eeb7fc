"""What a model's weights are, by their files: so that two models under one name never share a block.

Imports no engine. Does not cover: configuration and loaders, which engines have in their own ways.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

# `in_hub(name, file, revision)` answers the path of a file in the hub's cache, or something that is no text.
InHub = Callable[[str, str, str | None], object]

_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
# Weights up to here are read whole: they were read a moment ago. Of more each file gives pieces all over.
_WHOLE_BYTES = 4 << 30
_PIECES, _PIECE_BYTES = 128, 1 << 20
# How the hub's cache calls a file: by its git or its LFS digest.
_HUB_BLOB = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")


def place_of(name: str, revision: str | None, in_hub: InHub) -> Path | None:
    """Return the folder or the file (such as a GGUF) that `name` stands for, in the hub's cache where it is a hub's
    name, also one with a quantization behind a colon. None: not on this machine, as s3:// or what is not cached."""
    if Path(name).exists():
        return Path(name)
    if "://" in name:
        return None
    try:
        found = in_hub(name.partition(":")[0], "config.json", revision)
    except Exception:  # the hub's client refuses what can be no name of its own
        return None
    return Path(found).parent if isinstance(found, str) else None


def files_of(place: Path | None) -> list[Path]:
    """Return the files of the weights in a folder, or the one file. [] where there are none."""
    if place is None or not place.is_dir():
        return [] if place is None else [place]
    return sorted({path for pattern in _PATTERNS for path in place.glob(pattern)})


def digest_of(files: Sequence[Path]) -> bytes:
    """Return a digest of the files' names and contents. A folder of the hub's cache names each file's contents already.
    Raises OSError where one cannot be read."""
    hasher = hashlib.sha256()
    total = sum(path.stat().st_size for path in files)
    for path in files:
        hasher.update(path.name.encode() + _contents(path, whole=total <= _WHOLE_BYTES))
    return hasher.digest()


def _contents(path: Path, *, whole: bool) -> bytes:
    real = path.resolve()
    if real.parent.name == "blobs" and _HUB_BLOB.fullmatch(real.name):
        return real.name.encode()
    size = path.stat().st_size
    hasher = xxhash.xxh3_128(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        if whole or size <= _PIECES * _PIECE_BYTES:
            while piece := file.read(_PIECE_BYTES):
                hasher.update(piece)
        else:
            for number in range(_PIECES):
                file.seek(number * (size - _PIECE_BYTES) // (_PIECES - 1))
                hasher.update(file.read(_PIECE_BYTES))
    return hasher.digest()
