"""Rigs that are closed at the end, after everything in them was found to agree."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.rig import Rig
from tests.support.sessions import Bucket


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(name: str = "daemon", **options: Any) -> Rig:
        rigs.append(Rig(tmp_path / name, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()
