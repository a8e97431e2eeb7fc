"""The kernels in Triton's interpreter, on tiny shapes. Run by `test_interpreted.py`, in a process of its own:
triton must be imported under TRITON_INTERPRET=1, which other tests in the same process could not bear, and a kernel
that writes outside of its tensors takes the process with it."""

import os
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from kernels import reference
from kernels.gather import gather
from kernels.layout import widest_lane
from kernels.pinned import PinnedMemory
from kernels.transfer import HostTransfers
from tests.kernels import cases

assert os.environ.get("TRITON_INTERPRET") == "1", "run tests/kernels/test_interpreted.py instead"


@pytest.mark.parametrize("case", cases.SMALL_CASES, ids=str)
def test_gather_copies_what_the_oracle_copies(case: cases.Case) -> None:
    cases.check_gather(case, "cpu")


@pytest.mark.parametrize("case", cases.SMALL_CASES, ids=str)
def test_scatter_copies_what_the_oracle_copies(case: cases.Case) -> None:
    cases.check_scatter(case, "cpu")


def test_no_blocks_are_no_launch() -> None:
    cases.check_nothing_to_do("cpu")


def test_lanes_are_as_wide_as_all_strides_and_addresses_allow() -> None:
    whole = torch.zeros(4, 8, dtype=torch.float32)
    assert widest_lane(whole) == torch.int64
    assert widest_lane(whole[:, 1:7]) == torch.int32
    assert widest_lane(whole, torch.zeros(2, 3, dtype=torch.bfloat16)) == torch.int16
    assert widest_lane(torch.zeros(2, 3, dtype=torch.int8)) == torch.int8


@pytest.mark.parametrize(
    ("pool_shape", "blocks_shape", "payload_shape"),
    [
        ((4, 1, 2, 2, 1), (1, 1), (1, 4)),
        ((4, 1, 3, 2, 1, 4), (1, 1), (1, 24)),
        ((4, 1, 2, 2, 1, 4), (1,), (1, 16)),
        ((4, 1, 2, 2, 1, 4), (2, 1), (1, 16)),
        ((4, 1, 2, 2, 1, 4), (1, 2), (1, 16)),
    ],
)
def test_shapes_that_do_not_fit_each_other_are_refused(
    pool_shape: tuple[int, ...], blocks_shape: tuple[int, ...], payload_shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError):
        gather(torch.zeros(pool_shape), torch.zeros(blocks_shape, dtype=torch.int64), torch.zeros(payload_shape))
    if len(pool_shape) == 6 and pool_shape[2] == 2 and payload_shape == (1, 16):
        with pytest.raises(ValueError, match="int64"):
            gather(torch.zeros(pool_shape), torch.zeros(1, 1), torch.zeros(payload_shape))


class _HereAndNow:
    """A lane without a stream: on the CPU what is launched is done."""

    def after_steps(self) -> AbstractContextManager[None]:
        return nullcontext()

    def beside_steps(self) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.mark.parametrize(("per_block", "staging_bytes"), [(1, 1 << 20), (2, 1 << 20), (2, 1), (2, 2 * 2 * 96)])
def test_host_transfers_move_blocks_out_and_back_through_any_staging(per_block: int, staging_bytes: int) -> None:
    pool = torch.arange(8 * 24, dtype=torch.float32).reshape(8, 2, 2, 3, 1, 2)
    before = pool.clone()
    transfers = HostTransfers(pool, per_block, (_HereAndNow(), _HereAndNow()), PinnedMemory(), staging_bytes)
    groups = [[6, 1], [0, 3], [7, 2]] if per_block == 2 else [[6], [1], [4]]
    payload_bytes = pool[0].nbytes * per_block
    payloads = [memoryview(bytearray(payload_bytes)) for _ in groups]
    transfers.gather(groups, payloads)
    expected = torch.empty(len(groups), payload_bytes // 4)
    reference.gather(pool, torch.tensor(groups), expected)
    assert [bytes(payload) for payload in payloads] == [row.numpy().tobytes() for row in expected]

    pool[[block for group in groups for block in group]] = -1
    transfers.scatter([payload.toreadonly() for payload in payloads], groups)
    assert torch.equal(pool, before)
