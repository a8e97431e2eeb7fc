"""Checks at start that our import names lead to our own files, whoever else has packages of these names.

`engine`, `kernels`, `policies` and `tiers` are common words; Hugging Face, for one, publishes a distribution `kernels`,
which transformers imports. So our wheel leaves their empty `__init__.py` out (setup.py): installed beside another's
package of that name, in either order, no file is overwritten, `import kernels` is theirs and `import kernels.gather`
ours. What is left to go wrong is found here: one of the two hides the other, or both have a module of the same name.
"""

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import kvstore
from kvstore.core.errors import ConfigError
from kvstore.version import DISTRIBUTION

IMPORT_NAMES: Final = ("engine", "kernels", "kvstore", "policies", "tiers")
DAEMON_NAMES: Final = ("kvstore", "policies", "tiers")


def check_import_names(
    names: Sequence[str] = IMPORT_NAMES,
    owners: Mapping[str, list[str]] | None = None,
    locate: Callable[[str], list[Path]] | None = None,
    files_of: Callable[[str], set[Path]] | None = None,
) -> None:
    """Raise ConfigError naming the first of `names` that does not lead to our files alone, and who is in the way.

    `owners` gives the distributions of each import name, `locate` the folders that `import name` would take modules
    from, `files_of` the installed files of a distribution; by default all are asked of this interpreter, which reads
    every installed distribution's metadata once.
    """
    owners = importlib.metadata.packages_distributions() if owners is None else owners
    locate = _locate if locate is None else locate
    files_of = _files_of if files_of is None else files_of
    root = Path(kvstore.__file__).resolve().parent.parent
    for name in names:
        ours, found = root / name, locate(name)
        if not found:
            raise ConfigError(f"the import package {name!r} is missing: install {DISTRIBUTION} again")
        if ours not in found:
            raise ConfigError(
                f"'import {name}' takes {found[0]}, not the one of {DISTRIBUTION} in {root}: rename or remove it, or "
                "take its folder out of PYTHONPATH; or give each a virtual environment of its own"
            )
        for other in sorted({owner for owner in owners.get(name, []) if _canonical(owner) != DISTRIBUTION}):
            theirs = {file for file in files_of(other) if name in (part.name for part in file.parents)}
            _check_beside(name, ours, other, theirs, files_of(DISTRIBUTION))


def _check_beside(name: str, ours: Path, other: str, theirs: set[Path], our_files: set[Path]) -> None:
    advice = f"pip uninstall {other}, then install {DISTRIBUTION} again; or give each a virtual environment of its own"
    both = sorted(file for file in theirs & our_files if file.is_relative_to(ours))
    if both:
        raise ConfigError(f"the installed distribution {other!r} has a file {both[0]} as we have: {advice}")
    if theirs and not any(file.is_relative_to(ours) for file in theirs):
        raise ConfigError(
            f"the installed distribution {other!r} has an import package {name!r}, too, which ours in {ours} hides "
            f"from those who need it: {advice}"
        )


def _locate(name: str) -> list[Path]:
    # find_spec of a top-level name imports nothing.
    spec = importlib.util.find_spec(name)
    if spec is None:
        return []
    if spec.submodule_search_locations:
        return [Path(place).resolve() for place in spec.submodule_search_locations]
    return [Path(spec.origin).resolve()] if spec.origin else []


def _files_of(distribution: str) -> set[Path]:
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return set()
    return {Path(str(found.locate_file(file))).resolve() for file in found.files or () if file.suffix == ".py"}


def _canonical(name: str) -> str:
    """PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()
