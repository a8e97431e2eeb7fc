"""Talks of many turns in made-up tokens, and what an engine without a connector answers to each turn."""

from dataclasses import dataclass

from tests_vllm import tokens
from tests_vllm.engines import Answer, Prompt
from tests_vllm.sites import Site

REPLY_TOKENS = 12
_OPENING_TOKENS = (90, 250)
_MESSAGE_TOKENS = (20, 60)


@dataclass(frozen=True, slots=True)
class Talks:
    """`prompts[turn][talk]` and its `answers`. A history has the reference's replies in it, so that one turn in which
    an engine differs does not make the next ones another text."""

    prompts: list[list[Prompt]]
    answers: list[list[Answer]]

    @property
    def num_turns(self) -> int:
        return len(self.prompts)


def hold(site: Site, number: int, num_turns: int) -> Talks:
    """Let the reference hold them, all at once."""
    histories: list[list[int]] = [[] for _ in range(number)]
    prompts, answers = [], []
    for turn in range(num_turns):
        low, high = _MESSAGE_TOKENS if turn else _OPENING_TOKENS
        asked = []
        for talk in range(number):
            length = low + (talk * 37 + turn * 11) % (high - low)
            histories[talk] += tokens.prompt(10_000 + 100 * talk + turn, length)
            asked.append(Prompt(list(histories[talk]), REPLY_TOKENS, {"session_id": f"talk-{talk}"}))
        replies = site.ask_reference([Prompt(prompt.tokens, REPLY_TOKENS) for prompt in asked], together=True)
        for talk, reply in enumerate(replies):
            histories[talk] += reply.tokens
        prompts.append(asked)
        answers.append(replies)
    return Talks(prompts, answers)
