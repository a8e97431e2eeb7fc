from pathlib import Path

import pytest

import kvstore
from kvstore.core.errors import ConfigError
from kvstore.names import IMPORT_NAMES, check_import_names
from kvstore.version import VERSION

_OURS = Path(kvstore.__file__).resolve().parent.parent


def in_our_tree(name: str) -> Path:
    return _OURS / name


def test_this_installation_owns_its_names() -> None:
    check_import_names()


def test_another_distribution_with_one_of_the_names_is_named() -> None:
    owners = {name: ["tiered-kvstore"] for name in IMPORT_NAMES} | {"kernels": ["tiered_kvstore", "kernels"]}
    with pytest.raises(ConfigError, match="distribution 'kernels' also provides the import package 'kernels'"):
        check_import_names(owners, in_our_tree)


def test_an_editable_install_without_owners_is_fine_where_the_files_are_ours() -> None:
    check_import_names({}, in_our_tree)


def test_a_package_from_another_folder_is_refused_with_its_place(tmp_path: Path) -> None:
    def locate(name: str) -> Path:
        return tmp_path / name if name == "tiers" else in_our_tree(name)

    with pytest.raises(ConfigError, match=f"'import tiers' takes {tmp_path}/tiers"):
        check_import_names({}, locate)


def test_a_missing_package_is_named() -> None:
    with pytest.raises(ConfigError, match="'engine' is missing"):
        check_import_names({}, lambda name: None if name == "engine" else in_our_tree(name))


def test_the_version_stays_below_what_transformers_takes_for_another_kernels_package() -> None:
    assert tuple(int(part) for part in VERSION.split(".")[:2]) < (0, 17)
