"""How the daemon's processes stand to each other: tried in processes of their own, since priorities only go down."""

import subprocess
import sys

import pytest


def run(code: str) -> str:
    imports = "import gc, os; from kvstore.process import go_first, keep_pauses_short, stand_back\n"
    done = subprocess.run([sys.executable, "-c", imports + code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


NICE = "print(os.getpriority(os.PRIO_PROCESS, 0))"


@pytest.mark.parametrize(("before", "after"), [(0, 5), (5, 5), (15, 15)])
def test_a_helper_stands_back_but_never_comes_forward(before: int, after: int) -> None:
    assert run(f"os.nice({before}); stand_back(5); {NICE}") == str(after)


def test_a_helper_of_a_control_process_that_goes_first_stands_back_all_the_same() -> None:
    assert run(f"go_first(); stand_back(10); {NICE}") == "10"


def test_a_priority_that_somebody_chose_is_left_alone() -> None:
    assert run(f"os.nice(3); go_first(); {NICE}") == "3"


def test_going_first_is_no_fault_where_it_is_not_allowed() -> None:
    refusing = "def refuse(*_): raise PermissionError\nos.setpriority = refuse\n"
    assert run(f"{refusing}go_first(); {NICE}") == "0"


def test_the_collector_passes_over_what_was_there() -> None:
    assert run("keep_pauses_short(); print(gc.get_freeze_count() > 1000, len(gc.get_objects()) < 1000)") == "True True"
