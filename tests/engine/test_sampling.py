"""Greedy and seeded sampling."""

import math

import torch

from engine.request import Sampling
from engine.sampling import choose_tokens

LOGITS = torch.tensor([[0.0, 5.0, 4.9, -3.0], [9.0, 1.0, 1.0, 1.0]])


def test_temperature_zero_is_the_likeliest_token() -> None:
    assert choose_tokens(LOGITS, [Sampling(), Sampling()], [0, 0]) == [1, 0]


def test_a_draw_depends_on_seed_and_position_only() -> None:
    hot = Sampling(temperature=2.0, seed=5)
    alone = [choose_tokens(LOGITS[:1], [hot], [n])[0] for n in range(40)]
    beside = [choose_tokens(LOGITS.flip(0), [Sampling(), hot], [3, n])[1] for n in range(40)]
    assert alone == beside
    assert len(set(alone)) > 1
    assert alone != [choose_tokens(LOGITS[:1], [Sampling(temperature=2.0, seed=6)], [n])[0] for n in range(40)]


def test_top_p_keeps_the_smallest_likely_set() -> None:
    drawn = {choose_tokens(LOGITS[:1], [Sampling(1.0, 0.6, seed)], [0])[0] for seed in range(60)}
    assert drawn == {1, 2}
    assert {choose_tokens(LOGITS[:1], [Sampling(1.0, 0.01, seed)], [0])[0] for seed in range(20)} == {1}


def test_no_temperature_and_no_logits_make_sampling_fail() -> None:
    """A temperature of 1e-310 turned the logits to infinity and the draw into a fault of the step loop: one request
    ended every other one, and the engine answered no more until it was started anew."""
    for temperature in (5e-324, 1e-310, 1e-40, 1e-7):
        assert choose_tokens(LOGITS, [Sampling(temperature, 1.0, 3)] * 2, [0, 0]) == [1, 0]
    for value in (math.nan, math.inf):
        broken = torch.tensor([[0.0, value, 1.0]])
        assert choose_tokens(broken, [Sampling(1.0, 0.5, 3)], [0]) == [1]
    masked = torch.tensor([[-math.inf, 2.0, -math.inf]])
    assert choose_tokens(masked, [Sampling(1.0, 1.0, 3)], [0]) == [1]
