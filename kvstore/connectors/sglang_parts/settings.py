"""What SGLang's `--hicache-storage-backend-extra-config` may say to us, under "kvstore"; parsed once and loudly."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvstore.config import default_run_dir
from kvstore.core.errors import ConfigError

_Seconds = Annotated[float, msgspec.Meta(gt=0, le=600)]
_Text = Annotated[str, msgspec.Meta(max_length=200)]
SECTION = "kvstore"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`run_dir` is the daemon's. `tenant` is the salt of all keys. `weights` names the weights, for those that change
    under one path. Questions, loads of a batch of pages, and stores of one end at their deadlines: what was not there
    by then is a miss, and what was not stored is not there. After a daemon was silent it is left alone for `rest_s`."""

    run_dir: Annotated[str, msgspec.Meta(min_length=1)] = msgspec.field(default_factory=default_run_dir)
    tenant: _Text = ""
    weights: _Text = ""
    lookup_deadline_s: _Seconds = 0.1
    load_deadline_s: _Seconds = 2.0
    store_deadline_s: _Seconds = 1.0
    rest_s: _Seconds = 1.0

    @property
    def run_path(self) -> Path:
        return Path(self.run_dir).expanduser().absolute()


def parse(extra_config: Mapping[str, Any] | None) -> Settings:
    """Raises ConfigError naming what is wrong."""
    given = (extra_config or {}).get(SECTION, {})
    try:
        return msgspec.convert(given, Settings)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(Settings))
        raise ConfigError(f'"{SECTION}" in the extra config: {error}; known are {known}') from None
