"""What SGLang's page hashes and pools do not say of a model: its weights, and how its KV's numbers are to be read.

SGLang hands a backend the served name alone, which its user picks, and keeps every kind of float8 as plain bytes.
Reads plain attributes of SGLang's configuration and imports nothing of SGLang.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.connectors import weights
from kvstore.core.errors import ConfigError

# What makes other KV of the same files. The cache's type decides how its bytes are to be read.
_OF_MODEL = ("dtype", "kv_cache_dtype", "load_format", "quantization", "json_model_override_args")
_OF_SPECULATION = ("speculative_algorithm", "speculative_draft_kv_cache_dtype")
_DRAFT = ("speculative_draft_model_path", "speculative_draft_model_revision")


@dataclass(frozen=True, slots=True)
class Model:
    """`weights` says what they are, `numbers` how the engine was told to make KV of them."""

    weights: str
    numbers: str


def model_of(named: str, model: Any, speculation: Any, platform: str, in_hub: weights.InHub) -> Model:
    """`named` is the setting `weights`, "" where it is not set; `model` and `speculation` are SGLang's groups of its
    arguments, None where it has none to show; `platform` is where float8 has another meaning.

    Raises ConfigError where neither the setting nor files say which weights they are.
    """
    values = [str(getattr(model, name, None)) for name in _OF_MODEL]
    values += [str(getattr(speculation, name, None)) for name in _OF_SPECULATION]
    numbers = hashlib.sha256(json.dumps([*values, platform]).encode()).hexdigest()[:16]
    if named:
        return Model(named, numbers)
    digests = [_digest(model, ("model_path", "revision"), in_hub)]
    if getattr(speculation, _DRAFT[0], None):
        digests.append(_digest(speculation, _DRAFT, in_hub))
    return Model(hashlib.sha256(b"".join(digests)).hexdigest(), numbers)


def _digest(holder: Any, fields: tuple[str, str], in_hub: weights.InHub) -> bytes:
    path, revision = (getattr(holder, field, None) for field in fields)
    place = None if path is None else weights.place_of(str(path), revision, in_hub)
    files = weights.files_of(place)
    if place is None or not files:
        raise ConfigError(
            f"the weights' files of {path or 'the model'} cannot be read here, and pages of others under the same "
            'name would be taken for theirs: set "weights" in the extra config to something that names them and the '
            "cache's number format, and change it with them"
        )
    configuration = place / "config.json" if place.is_dir() else Path()
    text = configuration.read_bytes() if configuration.is_file() else b""
    return hashlib.sha256(text + weights.digest_of(files)).digest()
