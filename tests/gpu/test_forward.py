"""A packed step on a GPU computes what the same model computes on the CPU, up to rounding."""

from pathlib import Path

import pytest
import torch

from engine.model import SequenceSlice, load_model, make_pool
from tests.engine import tiny

pytestmark = pytest.mark.gpu


# As a share of the logits' size.
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 5e-2)])
def test_packed_chunks_give_the_logits_of_the_cpu(dtype: str, tolerance: float, tmp_path: Path) -> None:
    config = tiny.llama()
    config.head_dim = 16
    folder = tiny.write_folder(tmp_path / "model", config)
    prompts = [torch.randint(0, tiny.VOCAB_SIZE, (count,)).tolist() for count in (40, 23, 1)]
    tables = torch.randperm(36).view(3, 12).tolist()
    answers = []
    for device, kind in (("cpu", "float32"), ("cuda", dtype)):
        model = load_model(folder, device, kind)
        # Poisoned: what is attended to without having been written shows.
        pool = make_pool(model.spec, 36, 4, device).fill_(float("nan"))
        for start in range(0, 32, 16):
            model.forward([SequenceSlice(prompts[0][start : start + 16], start, tables[0])], pool)
        pieces = [(prompts[0][32:], 32), (prompts[1], 0), (prompts[2], 0)]
        slices = [SequenceSlice(ids, start, table) for (ids, start), table in zip(pieces, tables, strict=True)]
        first = model.forward(slices, pool)
        steps = [SequenceSlice([7], len(prompt), table) for prompt, table in zip(prompts, tables, strict=True)]
        answers.append(torch.cat([first, model.forward(steps, pool)]).cpu())
    for expected, found in zip(*answers, strict=True):
        assert float((found - expected).norm() / expected.norm()) < tolerance
