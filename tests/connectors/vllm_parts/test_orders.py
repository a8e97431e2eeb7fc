from kvstore.connectors.vllm_parts.orders import News


def test_news_of_several_workers_add_up_and_the_worst_counts() -> None:
    first = News(
        settled={"a": 2},
        unstored={"a": 5},
        loads=[(1, 100, 0.5)],
        load_ends={"a": {1: 3}},
        failed_from={"a": 4},
        steps=[1],
    )
    second = News(settled={"a": 1, "b": 1}, unstored={"a": 3}, load_ends={"a": {1: 2, 2: 1}}, failed_from={"a": 2})
    both = News()
    assert both.is_empty()
    both.add([first, second])
    assert both == News(
        settled={"a": 3, "b": 1},
        unstored={"a": 3},
        loads=[(1, 100, 0.5)],
        load_ends={"a": {1: 3, 2: 1}},
        failed_from={"a": 2},
        steps=[1],
    )
    assert not both.is_empty()
