"""Finds the costs that a command asks for by name: of this machine as measured, or of a GPU and a model by figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.core.errors import ConfigError
from kvstore.core.outcome import TierKind
from policies import saved_profile
from policies.cost import LoadCost, PrefillCost
from policies.profiles import GPUS, MODELS, machine
from policies.saved_profile import SavedProfile

_BLOCK_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class Known:
    """What a plan is made from. `loads` lacks the tiers that were not measured."""

    name: str
    prefill: PrefillCost
    loads: Mapping[TierKind, LoadCost]
    block_tokens: int
    bytes_per_token: float


def known(name: str, folder: Path | None) -> Known:
    """Return the costs of `name`: GPU/MODEL, a profile's file, part of a saved profile's name, or "" for the newest.
    `folder` None: where profiles are kept by default.

    Raises ConfigError with what there is.
    """
    gpu, slash, model = name.partition("/")
    if slash and gpu.lower() in {each.lower() for each in GPUS}:
        figures = machine(gpu, model)
        return Known(f"{gpu}/{model}", figures.prefill, figures.loads, _BLOCK_TOKENS, figures.model.kv_bytes_per_token)
    return _of_saved(_read(_file(name, folder)))


def _file(name: str, folder: Path | None) -> Path:
    if name and Path(name).is_file():
        return Path(name)
    if name.startswith(("/", "./", "../", "~")):
        raise ConfigError(f"no profile {name}: there is no such file")
    folder = folder or saved_profile.default_folder()
    saved = saved_profile.saved_in(folder)
    matching = [path for path in saved if name.lower() in path.name.lower()]
    if not matching:
        there_are = ", ".join(path.stem for path in saved) or "none"
        raise ConfigError(
            f"no saved profile{f' {name!r}' if name else ''} in {folder} (there are: {there_are}); run 'kvstore "
            f"calibrate', or name one of {'|'.join(GPUS)}/{'|'.join(MODELS)}"
        )
    return matching[0]


def _read(path: Path) -> SavedProfile:
    try:
        return saved_profile.read(path)
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error.strerror or error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path} is no profile: {error}") from None


def _of_saved(profile: SavedProfile) -> Known:
    if profile.prefill is None:
        raise ConfigError(f"the profile of {profile.model} has no prefill figures yet: run 'kvstore calibrate'")
    return Known(
        f"{profile.model} on {profile.device}",
        profile.prefill,
        {tier: LoadCost(*figures) for tier, figures in profile.costs.loads.items()},
        profile.block_tokens,
        profile.block_bytes / profile.block_tokens,
    )
