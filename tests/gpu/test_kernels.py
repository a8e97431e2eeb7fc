"""The kernels on a GPU do exactly what the torch oracle does, at odd sizes and at those of ordinary models."""

import pytest

pytest.importorskip("triton")

from tests.kernels import cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", [*cases.SMALL_CASES, *cases.LARGE_CASES], ids=str)
def test_gather_copies_what_the_oracle_copies(case: cases.Case) -> None:
    cases.check_gather(case, "cuda")


@pytest.mark.parametrize("case", [*cases.SMALL_CASES, *cases.LARGE_CASES], ids=str)
def test_scatter_copies_what_the_oracle_copies(case: cases.Case) -> None:
    cases.check_scatter(case, "cuda")


def test_no_blocks_are_no_launch() -> None:
    cases.check_nothing_to_do("cuda")
