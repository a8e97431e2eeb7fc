"""Checks at start that the five import names of this distribution belong to it alone.

`engine`, `kernels`, `policies` and `tiers` are common words, and another distribution with the same name would
overwrite our files or be imported in their place (Hugging Face publishes one called `kernels`).
"""

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import kvstore
from kvstore.core.errors import ConfigError
from kvstore.version import DISTRIBUTION

IMPORT_NAMES: Final = ("engine", "kernels", "kvstore", "policies", "tiers")


def check_import_names(
    owners: Mapping[str, list[str]] | None = None,
    locate: Callable[[str], Path | None] | None = None,
) -> None:
    """Raise ConfigError naming the first import name that is not ours alone, and whose it is.

    `owners` gives the distributions of each import name, `locate` the folder that `import name` would take; by
    default both are asked of this interpreter, which reads every installed distribution's metadata once.
    """
    owners = importlib.metadata.packages_distributions() if owners is None else owners
    locate = _locate if locate is None else locate
    ours = Path(kvstore.__file__).resolve().parent.parent
    for name in IMPORT_NAMES:
        others = sorted({owner for owner in owners.get(name, []) if _canonical(owner) != DISTRIBUTION})
        if others:
            raise ConfigError(
                f"the installed distribution {others[0]!r} also provides the import package {name!r}, which "
                f"{DISTRIBUTION} needs for itself: pip uninstall {others[0]}, then install {DISTRIBUTION} again; "
                "or give each a virtual environment of its own"
            )
        # Some editable installs list no owner at all: then the place of the files decides.
        folder = locate(name)
        if folder is None:
            raise ConfigError(f"the import package {name!r} is missing: install {DISTRIBUTION} again")
        if folder.parent != ours:
            raise ConfigError(
                f"'import {name}' takes {folder}, not the one of {DISTRIBUTION} in {ours}: rename or remove it, or "
                "take its folder out of PYTHONPATH"
            )


def _locate(name: str) -> Path | None:
    # find_spec of a top-level name imports nothing.
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin).resolve() if spec.origin else None


def _canonical(name: str) -> str:
    """PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()
