"""What a request's LoRA adapter is, by its files: vLLM's hashes have its name and path, and a path's content changes.

    first request ─► digest of the files, kept for the process ─► part of the request's keys
    files changed since ─► neither loaded nor stored any more under that name and path

vLLM reads an adapter when it needs it and may read it again, and its own prefix cache does not notice a change: once
the files have changed nobody can say which of them a block was computed with.

Does not cover: a folder that changes between vLLM's first reading and the adapter's first request.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.connectors.vllm_parts.stats import Counters
from kvstore.connectors.weights import digest_of

_log = logging.getLogger("vllm.kvstore")

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.*"
_MAX_KNOWN = 4096

# Name, time of the last change in ns, and bytes of each file.
_Signature = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Known:
    """`digest` None: not one adapter any more."""

    signature: _Signature
    digest: bytes | None


class Adapters:
    """Owned by the scheduler's thread. The first request of an adapter waits for its files to be read, as in vLLM."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._known: dict[tuple[str, str], _Known] = {}

    def digest_of(self, request: Any) -> bytes | None:
        """Return 32 bytes that stand for the request's adapter, b"" without one. None: what it is cannot be told, so
        its blocks must be neither loaded nor stored."""
        adapter = getattr(request, "lora_request", None)
        if adapter is None:
            return b""
        name = (str(adapter.lora_name), str(adapter.lora_path))
        # Read anew for each such request, while others of that name may be running.
        digest = None if getattr(adapter, "load_inplace", False) else self._digest(name)
        if digest is None:
            self._counters.add("faults", "adapter")
        return digest

    def _digest(self, name: tuple[str, str]) -> bytes | None:
        known = self._known.get(name)
        if known is not None and known.digest is None:
            return None
        try:
            files = _files(Path(name[1]).expanduser())
            signature = _signature(files)
            if known is not None and known.signature == signature:
                return known.digest
            digest: bytes | None = digest_of(files)
            is_settled = _signature(files) == signature
        except OSError as error:
            if known is None:
                _log.warning("kvstore: nothing is cached for the adapter %s: %s", name[0], error)
            return None
        if known is None and (not is_settled or len(self._known) >= _MAX_KNOWN):
            return None
        if known is not None and known.digest != digest:
            _log.warning(
                "kvstore: the files of the adapter %s have changed under the engine, so nothing is cached for it until "
                "vLLM starts again, or gets it under another name or path",
                name[0],
            )
            digest = None
        self._known[name] = _Known(signature, digest)
        return digest


def _files(folder: Path) -> list[Path]:
    """Raises OSError where there is no adapter in the folder."""
    weights = sorted(folder.glob(_WEIGHTS))
    if not weights:
        raise FileNotFoundError(f"there is no {_WEIGHTS} in {folder}")
    return [folder / _CONFIG, *weights]


def _signature(files: list[Path]) -> _Signature:
    found = [(path.name, path.stat()) for path in files]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in found)
