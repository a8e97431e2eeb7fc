import numpy as np

from kvstore.connectors.vllm_parts.orders import News, StoreOrder
from kvstore.connectors.vllm_parts.tracked import Tracked
from kvstore.connectors.vllm_parts.wishes import read
from tests.support.vllm import BLOCK_TOKENS, FakeRequest


def test_news_of_several_workers_add_up_and_the_worst_counts() -> None:
    first = News(
        settled={"a": 2},
        unstored={"a": 5},
        loads=[(1, 100, 0.5)],
        num_ended={"a": 1},
        load_ends={"a": {1: 3}},
        failed_from={"a": 4},
        steps=[1],
    )
    second = News(
        settled={"a": 1, "b": 1},
        unstored={"a": 3},
        num_ended={"a": 1},
        load_ends={"a": {1: 2, 2: 1}},
        failed_from={"a": 2},
    )
    both = News()
    assert both.is_empty()
    both.add([first, second])
    assert both == News(
        settled={"a": 3, "b": 1},
        unstored={"a": 3},
        loads=[(1, 100, 0.5)],
        num_ended={"a": 2},
        load_ends={"a": {1: 3, 2: 1}},
        failed_from={"a": 2},
        steps=[1],
    )
    assert not both.is_empty()


def test_token_ids_go_with_their_blocks() -> None:
    order = StoreOrder("r", (b"a", b"b", b"c"), (1, 2, 3), None, 0, bytes(range(24)))
    assert order.tokens_of(0, 3) == order.tokens_of(0, 64) == bytes(range(24))
    assert order.tokens_of(1, 2) == bytes(range(8, 16))
    assert StoreOrder("r", (b"a",), (1,), None, 0).tokens_of(0, 1) == b""


def test_token_ids_are_told_of_plain_text_only() -> None:
    """A router would take a block with an adapter or a salt for one of the same text without."""
    request = FakeRequest("r", range(10 * BLOCK_TOKENS))
    hashes = request.block_hashes
    tracked = Tracked(request, read(None)[0], 0.0, block_ids=list(range(10)))
    assert tracked.is_plain
    order = tracked.store_order(request.block_hashes, 3, BLOCK_TOKENS)
    assert order is not None
    assert order.tokens_of(1, 2) == np.arange(BLOCK_TOKENS, 2 * BLOCK_TOKENS, dtype="<u4").tobytes()
    later = tracked.store_order(request.block_hashes, 5, BLOCK_TOKENS)
    assert later is not None and later.depth == 3
    assert later.tokens_of(0, 1) == np.arange(3 * BLOCK_TOKENS, 4 * BLOCK_TOKENS, dtype="<u4").tobytes()
    request.all_token_ids[24] = -1
    odd = Tracked(request, read(None)[0], 0.0, block_ids=list(range(10))).store_order(hashes, 10, BLOCK_TOKENS)
    assert odd is not None and not odd.tokens
    untold = tracked.store_order(request.block_hashes, 6)
    assert untold is not None and not untold.tokens
    for name, value in (("lora_request", object()), ("mm_features", [1]), ("cache_salt", "x")):
        other = FakeRequest("r", range(BLOCK_TOKENS))
        setattr(other, name, value)
        assert not Tracked(other, read(None)[0], 0.0).is_plain
