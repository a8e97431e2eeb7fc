"""Choosing the next token from logits."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.request import Sampling

# Colder than this is greedy for any logits, and dividing by much less than this overflows.
_COLDEST = 1e-6


def choose_tokens(logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """Return one token per row of `logits`, `[num_rows, vocab]` float32; blocks until the device has computed them.

    `positions[i]` is how many tokens row i's request has sampled before: with the seed it fixes the draw, so that
    what else runs in the batch, or being preempted, changes nothing.
    """
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, (sampling, position) in enumerate(zip(samplings, positions, strict=True)):
        if sampling.temperature > 0:
            tokens[row] = _draw(logits[row].cpu().numpy(), sampling, position)
    return tokens


def _draw(logits: npt.NDArray[np.float32], sampling: Sampling, position: int) -> int:
    peak = logits.max()
    if not np.isfinite(peak):
        # No number to draw by: the same token as without a temperature. A fault here would be one of every request.
        return int(logits.argmax())
    weights = np.exp((logits.astype(np.float64) - peak) / max(sampling.temperature, _COLDEST))
    weights /= weights.sum()
    order = np.argsort(-weights, kind="stable")
    # The smallest set of likeliest tokens whose mass reaches top_p; at least one.
    kept = int(np.searchsorted(np.cumsum(weights[order]), sampling.top_p)) + 1
    nucleus = order[:kept]
    generator = np.random.default_rng((sampling.seed, position))
    return int(generator.choice(nucleus, p=weights[nucleus] / weights[nucleus].sum()))
