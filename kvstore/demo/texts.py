"""Real text for the demo's sessions: chapters of the Python language documentation, which every Python carries."""

from collections.abc import Sequence
from dataclasses import dataclass
from pydoc_data import topics
from typing import Final

# Chapters that are long enough in Python 3.11 and newer, each once.
_CHAPTERS: Final = (
    "compound",
    "types",
    "formatstrings",
    "string-methods",
    "typesseq",
    "debugger",
    "customization",
    "assignment",
    "comparisons",
    "execmodel",
    "specialnames",
    "typesmapping",
)
_QUESTIONS: Final = (
    "What is this chapter about?",
    "Name one rule it states.",
    "Which example does it give first?",
    "What should a beginner remember of it?",
    "Which part is the hardest to understand?",
    "What does it warn about?",
    "Say it in one short sentence.",
    "What would you read next?",
)


@dataclass(frozen=True, slots=True)
class Talk:
    """One session: an id, a first message with a long text, and short messages after it."""

    session_id: str
    opening: str
    questions: Sequence[str]


def talks(number: int, opening_chars: int) -> list[Talk]:
    """Return `number` different talks; raises ValueError where there are not so many chapters."""
    if number > len(_CHAPTERS):
        raise ValueError(f"there are {len(_CHAPTERS)} chapters, not {number}")
    made = []
    for index, name in enumerate(_CHAPTERS[:number]):
        chapter = " ".join(topics.topics[name].split())[:opening_chars]
        opening = f"Here is a chapter of the Python reference:\n\n{chapter}\n\nWhat is it about?"
        questions = [_QUESTIONS[(index + turn) % len(_QUESTIONS)] for turn in range(len(_QUESTIONS))]
        made.append(Talk(f"demo-{name}", opening, questions))
    return made
