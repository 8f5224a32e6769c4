"""The overlap report: counts by hand, what counts as one question, and speed and memory at size."""

import time
import tracemalloc

from train.overlap import overlap, prompts_of
from train.tasks.base import Example


def test_counts_by_hand():
    report = overlap(["a b", "c", "A  B", "d", "e"], ["x", "a b\n", "e", "x", "e"])
    assert (report.train_rows, report.test_rows) == (5, 5)
    assert (report.shared_train_rows, report.shared_test_rows, report.repeated_test_rows) == (3, 3, 2)
    assert report.examples == ((0, 1, "a b"), (4, 2, "e"))
    assert str(report).splitlines() == [
        "3 of 5 test questions occur in train (3 of its 5 rows); 2 test questions are repeated within test.",
        "  train 0, test 1: 'a b'",
        "  train 4, test 2: 'e'",
    ]


def test_case_and_blanks_make_no_other_question_and_digits_do():
    assert overlap(["How  MANY?\n"], ["how many?"]).shared_test_rows == 1
    assert overlap(["1 + 12"], ["11 + 2"]).shared_test_rows == overlap(["ab"], ["a b"]).shared_test_rows == 0


def test_empty_splits():
    assert overlap([], ["a"]).shared_test_rows == overlap(["a"], []).shared_test_rows == 0


def test_memory_does_not_grow_with_the_training_split():
    def peak(rows):
        tracemalloc.start()
        overlap((f"question {row}" for row in range(rows)), (f"question {row}" for row in range(0, 2000, 2)))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(20_000) < peak(2_000) + 50_000


def test_a_million_against_a_hundred_thousand_takes_seconds():
    # A twentieth of it, of two hundred characters each: the cost is linear, so a minute would be three seconds here.
    text = "word " * 40
    began = time.process_time()
    report = overlap((f"{text}{row}" for row in range(50_000)), (f"{text}{row}" for row in range(45_000, 50_000)))
    assert time.process_time() - began < 3
    assert report.shared_test_rows == 5000


def test_prompts_are_streamed():
    rows = [Example(key=str(n), prompt=f"q{n}", answer="") for n in range(3)]
    assert list(prompts_of(rows)) == ["q0", "q1", "q2"]
