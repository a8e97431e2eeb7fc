"""That the number is the CPU's."""

import os

from kvstore.cpu import current_cpu, getter


def test_it_is_the_cpu_that_this_thread_is_bound_to() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        for cpu in allowed:
            os.sched_setaffinity(0, {cpu})
            assert current_cpu() == cpu
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_system_that_does_not_say_is_no_fault() -> None:
    assert getter(object())() == -1
