"""The import names lead to our own files, beside whatever else is installed."""

from pathlib import Path

import pytest

import kvstore
from kvstore.core.errors import ConfigError
from kvstore.names import IMPORT_NAMES, check_import_names
from kvstore.version import VERSION

_OURS = Path(kvstore.__file__).resolve().parent.parent
_OWNERS = {name: ["tiered-kvstore"] for name in IMPORT_NAMES} | {"kernels": ["tiered_kvstore", "kernels"]}


def in_our_tree(name: str) -> list[Path]:
    return [_OURS / name]


def check(owners: dict[str, list[str]], files: dict[str, set[Path]], names: tuple[str, ...] = IMPORT_NAMES) -> None:
    check_import_names(names, owners, in_our_tree, lambda distribution: files.get(distribution, set()))


def test_this_installation_owns_its_names() -> None:
    check_import_names()


def test_another_distribution_may_lie_beside_ours_under_the_same_name() -> None:
    theirs = {_OURS / "kernels" / "__init__.py", _OURS / "kernels" / "layer" / "func.py"}
    check(_OWNERS, {"kernels": theirs, "tiered-kvstore": {_OURS / "kernels" / "gather.py"}})


def test_a_file_that_both_distributions_have_is_named() -> None:
    both = _OURS / "kernels" / "gather.py"
    with pytest.raises(ConfigError, match=r"distribution 'kernels' has a file .*/kernels/gather\.py as we have"):
        check(_OWNERS, {"kernels": {both}, "tiered-kvstore": {both, _OURS / "tiers" / "ram.py"}})


def test_another_distribution_that_ours_would_hide_is_named() -> None:
    """From a checkout `import kernels` takes our folder, and transformers finds nothing of what it needs in it."""
    elsewhere = Path("/usr/lib/python3/site-packages/kernels/__init__.py")
    with pytest.raises(ConfigError, match="distribution 'kernels' has an import package 'kernels', too"):
        check(_OWNERS, {"kernels": {elsewhere}})
    check(_OWNERS, {"kernels": {elsewhere}}, ("kvstore", "policies", "tiers"))


def test_an_editable_install_without_owners_is_fine_where_the_files_are_ours() -> None:
    check({}, {})


def test_a_package_from_another_folder_is_refused_with_its_place(tmp_path: Path) -> None:
    def locate(name: str) -> list[Path]:
        return [tmp_path / name] if name == "tiers" else in_our_tree(name)

    with pytest.raises(ConfigError, match=f"'import tiers' takes {tmp_path}/tiers"):
        check_import_names(IMPORT_NAMES, {}, locate)


def test_a_missing_package_is_named() -> None:
    with pytest.raises(ConfigError, match="'engine' is missing"):
        check_import_names(IMPORT_NAMES, {}, lambda name: [] if name == "engine" else in_our_tree(name))


def test_the_version_stays_below_what_transformers_takes_for_another_kernels_package() -> None:
    assert tuple(int(part) for part in VERSION.split(".")[:2]) < (0, 17)
