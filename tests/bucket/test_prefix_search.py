"""How many leading blocks a bucket has: the right answer in two rounds, with few questions."""

import math
import queue
import random
import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.bucket.prefix_search import PrefixSearch, answer, first_round, second_round
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome


def search(there: Sequence[bool]) -> tuple[int, int]:
    """Return how many leading blocks were found, and with how many questions."""
    num_blocks = len(there)
    asked = list(first_round(num_blocks))
    first = [there[index] for index in asked]
    more = list(second_round(num_blocks, first))
    assert not set(more) & set(asked) and all(0 <= index < num_blocks for index in more)
    return answer(num_blocks, first, [there[index] for index in more]), len(asked) + len(more)


@pytest.mark.parametrize("num_blocks", [*range(1, 70), 512, 1000, 1023, 1024])
def test_of_a_prefix_closed_bucket_the_answer_is_right_with_at_most_two_roots_of_questions(num_blocks: int) -> None:
    for num_there in range(num_blocks + 1):
        found, asked = search([index < num_there for index in range(num_blocks)])
        assert found == num_there
        assert asked <= 2 * math.sqrt(num_blocks)


@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_of_any_bucket_what_is_found_begins_with_the_first_block_and_ends_with_one_that_is_there(
    there: list[bool],
) -> None:
    found, asked = search(there)
    assert asked <= 2 * math.sqrt(len(there))
    assert found == 0 if not there[0] else there[found - 1]
    if found == 0:
        assert not there[0]


KEYS = [BlockKey(bytes([number] * 32)) for number in range(40)]


class Bucket:
    """Answers in any order, from several threads; fails for what is in `silent`."""

    def __init__(self, num_there: int) -> None:
        self.num_there = num_there
        self.asked: list[int] = []
        self.silent: set[int] = set()
        self._lock = threading.Lock()

    def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        (key,) = keys
        with self._lock:
            self.asked.append(key[0])
        if key[0] in self.silent:
            return [Outcome.UNAVAILABLE]
        return [Outcome.OK if key[0] < self.num_there else Outcome.MISS]


def run(bucket: Bucket, num_threads: int, shuffled: random.Random) -> int | None:
    """Let the tasks run one by one, whichever is next."""
    tasks: list[Callable[[], None]] = []
    answers: list[int | None] = []
    PrefixSearch(KEYS, bucket.contains, tasks.append, num_threads, answers.append).start()
    while tasks:
        assert len(tasks) <= num_threads
        tasks.pop(shuffled.randrange(len(tasks)))()
    (found,) = answers
    return found


@given(st.integers(0, 40), st.integers(1, 9), st.randoms())
def test_a_search_in_threads_asks_the_same_questions_once_each(
    num_there: int, num_threads: int, choice: random.Random
) -> None:
    bucket = Bucket(num_there)
    assert run(bucket, num_threads, choice) == num_there
    assert len(bucket.asked) == len(set(bucket.asked)) <= 2 * math.sqrt(40)


def test_a_bucket_that_does_not_answer_one_question_answers_none() -> None:
    bucket = Bucket(40)
    bucket.silent = {7}
    assert run(bucket, 3, random.Random(1)) is None
    bucket.contains = None  # type: ignore[assignment, method-assign]
    assert run(bucket, 3, random.Random(1)) is None


def test_real_threads_end_with_one_answer() -> None:
    tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
    answers: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def work() -> None:
        while (task := tasks.get()) is not None:
            task()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for num_there in range(41):
        PrefixSearch(KEYS, Bucket(num_there).contains, tasks.put, 4, answers.put).start()
        assert answers.get(timeout=10.0) == num_there
    for _ in threads:
        tasks.put(None)
    for thread in threads:
        thread.join()
    assert answers.empty()
