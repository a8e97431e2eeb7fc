"""Prompts of made-up tokens, and the comparison of what engines answered."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests_vllm.engines import BLOCK_TOKENS, Answer
from tests_vllm.tiny import VOCABULARY

# Two likeliest tokens that are closer than this, in nats, may change places with the shape of the batch.
TIE_NATS = 1e-4
_FIRST_WORD = 4


def prompt(seed: int, length: int) -> list[int]:
    """Return `length` tokens of the tiny model's vocabulary, the same for the same seed."""
    generator = random.Random(seed)
    return [generator.randrange(_FIRST_WORD, VOCABULARY) for _ in range(length)]


def full_blocks(length: int) -> int:
    """How many of a prompt's blocks can be loaded: one token at least is left to compute."""
    return (length - 1) // BLOCK_TOKENS


def without_gaps(answer: Answer) -> Answer:
    """Return the answer as a reference that no other token may pass for."""
    return replace(answer, gaps=[])


@dataclass(slots=True)
class Comparison:
    """What was compared so far. A `tie` is an answer that leaves the reference where that itself was undecided."""

    tokens: int = 0
    answers: int = 0
    ties: int = 0
    differ: int = 0

    def add(self, reference: Sequence[Answer], answers: Sequence[Answer]) -> None:
        """Compare answers to the same prompts, each up to the first difference; behind it stands another text."""
        for expected, got in zip(reference, answers, strict=True):
            self._add(expected, got)

    def _add(self, expected: Answer, got: Answer) -> None:
        self.answers += 1
        if len(expected.tokens) != len(got.tokens):
            self.differ += 1
            return
        for index, (wanted, token) in enumerate(zip(expected.tokens, got.tokens, strict=True)):
            self.tokens += 1
            if wanted != token:
                if expected.gaps and expected.gaps[index] < TIE_NATS:
                    self.ties += 1
                else:
                    self.differ += 1
                return

    def merge(self, other: "Comparison") -> None:
        self.tokens += other.tokens
        self.answers += other.answers
        self.ties += other.ties
        self.differ += other.differ

    def __str__(self) -> str:
        return f"{self.tokens} tokens of {self.answers} answers, {self.differ} differ, {self.ties} ties"
