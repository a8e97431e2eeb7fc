"""What the benchmarks' processes are waited for, and for how long; that they run is asked in tests/flows."""

import pytest

from kvstore.bench.site import wait
from kvstore.core.errors import TierUnavailable


def test_waiting_ends_with_the_condition_or_says_what_did_not_come() -> None:
    answers = iter([False, False, True])
    wait(lambda: next(answers), "a thing is not there", 60.0, 0.0)
    assert next(answers, None) is None
    with pytest.raises(TierUnavailable, match="a thing is not there after 0 s"):
        wait(lambda: False, "a thing is not there", 0.0, 0.0)
