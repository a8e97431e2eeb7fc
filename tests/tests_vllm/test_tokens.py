"""What counts as equal when vLLM's answers are compared; vLLM itself is not needed."""

from tests_vllm.engines import Answer, parse_metrics
from tests_vllm.tokens import TIE_NATS, Comparison, full_blocks, without_gaps

CLEAR = 0.5
REFERENCE = Answer([5, 6, 7], [CLEAR, TIE_NATS / 2, CLEAR], 0)


def compare(tokens: list[int], reference: Answer = REFERENCE) -> Comparison:
    compared = Comparison()
    compared.add([reference], [Answer(tokens, [], 0)])
    return compared


def test_equal_answers_are_equal() -> None:
    assert compare([5, 6, 7]) == Comparison(tokens=3, answers=1)


def test_another_token_where_the_reference_was_sure_differs() -> None:
    assert compare([9, 6, 7]) == Comparison(tokens=1, answers=1, differ=1)


def test_another_token_where_two_were_as_likely_is_a_tie_and_what_follows_is_not_compared() -> None:
    assert compare([5, 9, 9]) == Comparison(tokens=2, answers=1, ties=1)


def test_a_reference_without_gaps_knows_no_ties() -> None:
    assert compare([5, 9, 9], without_gaps(REFERENCE)).differ == 1


def test_an_answer_of_another_length_differs() -> None:
    assert compare([5, 6]).differ == 1


def test_one_token_of_a_prompt_is_always_left_to_compute() -> None:
    assert [full_blocks(length) for length in (1, 32, 33, 64, 65)] == [0, 0, 1, 1, 2]


def test_metrics_are_summed_over_their_labels() -> None:
    text = '# HELP a b\na_total{tier="ram"} 2.0\na_total{tier="s s d"} 3.0\nb 1e3\n'
    assert parse_metrics(text) == {"a_total": 5.0, "b": 1000.0}
