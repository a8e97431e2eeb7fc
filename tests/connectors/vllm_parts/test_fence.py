import threading

from kvstore.connectors.vllm_parts.fence import Fence


def test_a_read_that_has_not_begun_is_withdrawn_and_does_not_begin() -> None:
    fence = Fence()
    first, second = fence.expect([3, 4])
    assert fence.clear([3]) == 1
    assert not fence.begin(first)
    assert fence.begin(second)
    fence.end(second)
    assert len(fence) == 0


def test_a_read_under_way_is_waited_for() -> None:
    fence = Fence()
    (read,) = fence.expect([3])
    assert fence.begin(read)
    order: list[str] = []

    def overwrite() -> None:
        fence.clear([3])
        order.append("overwritten")

    thread = threading.Thread(target=overwrite)
    thread.start()
    order.append("read")
    fence.end(read)
    thread.join()
    assert order == ["read", "overwritten"]


def test_two_reads_of_one_block_are_both_cleared() -> None:
    fence = Fence()
    reads = fence.expect([3]) + fence.expect([3])
    assert fence.clear([3, 3, 9]) == 2
    assert not any(fence.begin(read) for read in reads)


def test_what_is_over_keeps_nobody_waiting() -> None:
    fence = Fence()
    (read,) = fence.expect([3])
    fence.end(read)
    fence.end(read)
    assert fence.clear([3]) == 0
    assert not fence.begin(read)


def test_everything_can_be_cleared_at_once() -> None:
    fence = Fence()
    reads = fence.expect([1, 2, 3])
    fence.clear_all()
    assert len(fence) == 0
    assert not any(fence.begin(read) for read in reads)
