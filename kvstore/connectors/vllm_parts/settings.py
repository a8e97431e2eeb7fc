"""What `kv_connector_extra_config` may say, parsed once and loudly."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from kvstore.config import default_run_dir
from kvstore.core.errors import ConfigError

LoadMode = Literal["async", "sync"]
PlanMode = Literal["auto", "fetch", "recompute"]
# Thirty years: as good as for ever, and what a wait can be given.
_MAX_S = 1e9


@dataclass(frozen=True, slots=True)
class Settings:
    """`run_dir` is the daemon's, by default where this user's daemon has it. `load`: beside other requests' steps, or
    before the step that needs it. `verify`: test the checksum of every block that is loaded; off only to show that it
    matters. `plan`: what the measured costs decide, all that is cached, or nothing. `tenant` is the salt of all keys.
    `deadline_s`: the longest a request may wait for an answer about what is cached; None: as long as is worth it.
    `weights` names the weights where their files cannot be read or must not be. `profile_dir` keeps what was measured;
    None: nothing is kept.

    `max_store_bytes` of blocks may wait to be stored; beyond that they are left out. `hold_s`: for so long the blocks
    of a finished request are kept from reuse while they are being stored. `drain_s`: for so long the end of the process
    waits for stores."""

    run_dir: Path
    load: LoadMode = "async"
    verify: bool = True
    plan: PlanMode = "auto"
    tenant: str = ""
    deadline_s: float | None = None
    weights: str = ""
    profile_dir: Path | None = None
    num_loaders: int = 4
    max_store_bytes: int = 1 << 30
    hold_s: float = 2.0
    drain_s: float = 5.0


def parse(extra: Mapping[str, Any]) -> Settings:
    """Raises ConfigError naming the key that is unknown or has a value of no use."""
    known = {field.name for field in fields(Settings)}
    for name in extra:
        if name not in known:
            close = difflib.get_close_matches(str(name), sorted(known), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(known))}"
            raise ConfigError(f"kv_connector_extra_config has no key {name!r}; {hint}")
    values: dict[str, Any] = {name: _value(name, raw) for name, raw in extra.items() if raw is not None}
    values.setdefault("run_dir", Path(default_run_dir()))
    return Settings(**values)


def _value(name: str, raw: Any) -> Any:
    match name:
        case "run_dir" | "profile_dir":
            if isinstance(raw, str) and raw:
                return Path(raw).expanduser().absolute()
        case "load" | "plan":
            if raw in get_args(LoadMode if name == "load" else PlanMode):
                return raw
        case "verify":
            if isinstance(raw, bool):
                return raw
        case "tenant" | "weights":
            if isinstance(raw, str) and len(raw) <= 200 and (not raw or raw.isprintable()):
                return raw
        case "num_loaders" | "max_store_bytes":
            if isinstance(raw, int) and not isinstance(raw, bool) and raw > 0:
                return raw
        case _:
            if isinstance(raw, int | float) and not isinstance(raw, bool) and 0 <= raw <= _MAX_S:
                return float(raw)
    raise ConfigError(f"kv_connector_extra_config: {name} cannot be {raw!r}; {_EXPECTED[name]}")


_EXPECTED = {
    "run_dir": "it is the path of a folder",
    "profile_dir": "it is the path of a folder",
    "load": 'it is "async" or "sync"',
    "plan": 'it is "auto", "fetch" or "recompute"',
    "verify": "it is true or false",
    "tenant": "it is a text of at most 200 printable characters",
    "weights": "it is a text of at most 200 printable characters",
    "num_loaders": "it is a whole number from 1",
    "max_store_bytes": "it is a whole number of bytes from 1",
    "deadline_s": "it is a number of seconds",
    "hold_s": "it is a number of seconds",
    "drain_s": "it is a number of seconds",
}
