"""The kernels on a GPU do exactly what the torch oracle does, at odd sizes and at those of ordinary models."""

import pytest

pytest.importorskip("triton")

from kernels.quantized import QUANTIZED_DTYPES, QuantizedDtype
from tests.kernels import cases, quantized_cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", [*cases.SMALL_CASES, *cases.LARGE_CASES], ids=str)
def test_gather_copies_what_the_oracle_copies(case: cases.Case) -> None:
    cases.check_gather(case, "cuda")


@pytest.mark.parametrize("case", [*cases.SMALL_CASES, *cases.LARGE_CASES], ids=str)
def test_scatter_copies_what_the_oracle_copies(case: cases.Case) -> None:
    cases.check_scatter(case, "cuda")


@pytest.mark.parametrize("store_dtype", QUANTIZED_DTYPES)
@pytest.mark.parametrize("case", [*quantized_cases.SMALL_CASES, *quantized_cases.LARGE_CASES], ids=str)
def test_quantising_makes_the_bytes_of_the_oracle(case: cases.Case, store_dtype: QuantizedDtype) -> None:
    quantized_cases.check_quantize(case, store_dtype, "cuda")


@pytest.mark.parametrize("store_dtype", QUANTIZED_DTYPES)
@pytest.mark.parametrize("case", [*quantized_cases.SMALL_CASES, *quantized_cases.LARGE_CASES], ids=str)
def test_dequantising_makes_the_numbers_of_the_oracle(case: cases.Case, store_dtype: QuantizedDtype) -> None:
    quantized_cases.check_dequantize(case, store_dtype, "cuda")


def test_no_blocks_are_no_launch() -> None:
    cases.check_nothing_to_do("cuda")
