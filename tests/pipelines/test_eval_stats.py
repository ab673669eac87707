"""Statistics of paired answers, against published tables and sums that fit on paper."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipelines.eval_stats import (
    Interval,
    answer_distribution,
    answer_kl,
    average_interval,
    average_stderr,
    known_mean,
    mcnemar_exact,
    normal_interval,
    paired,
    separation,
    wilson_interval,
)
from store.errors import InvalidValueError


def answers(right: int, better: int, worse: int, wrong: int) -> tuple[np.ndarray, np.ndarray]:
    """Reference and system of so many documents: both right, system alone, reference alone."""
    reference = [1] * right + [0] * better + [1] * worse + [0] * wrong
    system = [1] * right + [1] * better + [0] * worse + [0] * wrong
    return np.array(reference, np.float64), np.array(system, np.float64)


@pytest.mark.parametrize(
    ("worse", "better", "p"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (0, 5, 2 / 32),
        (5, 1, 2 * (1 + 6) / 64),
        (3, 3, 1.0),
        (2, 8, 2 * (1 + 10 + 45) / 1024),
    ],
)
def test_mcnemars_p_is_a_binomial_tail_taken_twice(worse: int, better: int, p: float) -> None:
    assert mcnemar_exact(worse, better) == p
    assert mcnemar_exact(better, worse) == p


def test_mcnemars_p_of_thousands_of_flips_does_not_overflow() -> None:
    assert mcnemar_exact(2000, 2000) == 1.0
    # The normal approximation gives 2·Φ(-(200 - 1)/√2200) = 2.2e-05.
    assert mcnemar_exact(1000, 1200) == pytest.approx(2.2e-05, rel=0.02)


@pytest.mark.parametrize(
    ("table", "low", "high"),
    [
        # Newcombe 1998 (Statistics in Medicine 17, 2635–2650), table II, method 10.
        ((36, 12, 2, 0), 0.0569, 0.3404),
        ((18, 12, 2, 18), 0.0562, 0.3290),
    ],
)
def test_the_interval_of_paired_shares_is_the_published_one(
    table: tuple[int, int, int, int], low: float, high: float
) -> None:
    found = paired(*answers(*table))
    assert found.difference == pytest.approx(0.2)
    assert found.interval == pytest.approx((low, high), abs=1e-4)
    assert (found.flips_better, found.flips_worse) == (12, 2)


def test_the_interval_turns_round_with_the_direction() -> None:
    reference, system = answers(18, 12, 2, 18)
    there, back = paired(reference, system), paired(system, reference)
    assert back.difference == -there.difference
    assert back.interval == pytest.approx((-there.interval.high, -there.interval.low))
    assert (back.flips_worse, back.flips_better) == (there.flips_better, there.flips_worse)
    assert back.mcnemar_p == there.mcnemar_p


def test_equal_answers_still_leave_room_for_a_difference() -> None:
    found = paired(*answers(150, 0, 0, 100))
    assert (found.difference, found.flips_worse, found.flips_better) == (0.0, 0, 0)
    assert found.mcnemar_p == 1.0
    # About the rule of three: 250 documents without a flip don't rule out one in a hundred.
    assert found.interval.high == pytest.approx(2 / 250, rel=0.05)
    assert found.interval.low == pytest.approx(-2 / 250, rel=0.05)


@pytest.mark.parametrize("value", [0, 1])
def test_a_system_that_is_always_right_or_always_wrong_has_an_interval(value: int) -> None:
    same = np.full(20, value)
    found = paired(same, same)
    assert found.difference == 0.0
    assert -0.2 < found.interval.low < 0.0 < found.interval.high < 0.2


def test_wilsons_interval_is_the_textbook_one() -> None:
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson_interval(10, 10).high == 1.0


def test_values_that_are_no_shares_get_a_normal_interval() -> None:
    found = paired([1.0, 2.0, 3.5], [2.0, 4.0, 6.5])
    # Differences 1, 2, 3: standard deviation 1, three documents.
    assert found.difference == pytest.approx(2.0)
    reach = 1.959964 / math.sqrt(3)
    assert found.interval == pytest.approx((2 - reach, 2 + reach), abs=1e-5)
    assert (found.flips_worse, found.flips_better, found.mcnemar_p) == (None, None, None)


def test_which_flips_are_worse_depends_on_the_metric() -> None:
    before, after = [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]
    found = paired(before, after)
    assert (found.flips_worse, found.flips_better) == (1, 2)
    found = paired(before, after, higher_is_better=False)
    assert (found.flips_worse, found.flips_better) == (2, 1)


def test_one_value_that_is_no_share_proves_nothing() -> None:
    assert normal_interval(np.array([0.25])) == (-math.inf, math.inf)


@pytest.mark.parametrize(("first", "second"), [([], []), ([1.0], [1.0, 0.0]), ([[1.0]], [[1.0]])])
def test_lists_that_are_no_pairs_are_refused(first: list, second: list) -> None:
    with pytest.raises(InvalidValueError, match="can't be compared in pairs; give two lists"):
        paired(first, second)


def test_an_average_of_normal_intervals_is_the_usual_one() -> None:
    found = average_interval([0.1, 0.3], [Interval(0.1 - 0.03, 0.1 + 0.03), Interval(0.26, 0.34)])
    assert found == pytest.approx((0.2 - 0.05 / 2, 0.2 + 0.05 / 2))


def test_an_average_keeps_uneven_ends_apart() -> None:
    found = average_interval([0.0, 0.0], [Interval(-0.03, 0.0), Interval(-0.04, 0.12)])
    assert found == pytest.approx((-0.05 / 2, 0.12 / 2))
    assert average_interval([0.5], [Interval(0.2, 0.6)]) == pytest.approx((0.2, 0.6))


def test_the_error_of_an_average_needs_all_errors() -> None:
    assert average_stderr([0.03, 0.04]) == pytest.approx(0.025)
    assert average_stderr([0.03, None]) is None
    assert average_stderr([]) is None


def test_choices_become_a_distribution_whatever_their_level() -> None:
    shares = np.exp(answer_distribution([math.log(0.6) - 5000, math.log(0.2) - 5000]))
    assert shares == pytest.approx([0.75, 0.25])


def test_divergence_is_of_the_normalised_choices() -> None:
    even, skewed = [-70.0, -70.0], [math.log(0.9), math.log(0.1)]
    expected = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert answer_kl(even, skewed) == pytest.approx(expected)
    assert answer_kl(skewed, even) == pytest.approx(
        0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    )
    assert answer_kl(even, [-3.0, -3.0]) == 0.0


def test_a_choice_that_the_reference_rules_out_adds_nothing() -> None:
    found = answer_kl([0.0, -math.inf], [math.log(0.8), math.log(0.2)])
    assert found == pytest.approx(-math.log(0.8))
    assert answer_kl([math.log(0.8), math.log(0.2)], [0.0, -math.inf]) == math.inf


def test_without_a_choice_there_is_no_divergence() -> None:
    assert answer_kl([-3.0], [-4.0]) is None


@pytest.mark.parametrize("broken", [[math.nan, -2.0], [-1.0, math.nan], [-math.inf, -math.inf]])
def test_no_number_is_no_agreement(broken: list[float]) -> None:
    assert answer_kl([-1.0, -2.0], broken) is None
    assert answer_kl(broken, [-1.0, -2.0]) is None
    assert known_mean([None, 0.2, 0.4]) == pytest.approx(0.3)
    assert known_mean([None]) is None


def test_a_control_is_worse_only_where_chance_is_no_explanation() -> None:
    system, clearly = answers(50, 0, 20, 30)
    found = separation(system, clearly)
    assert found.worse
    assert found.paired.difference == pytest.approx(-0.2)
    assert not separation(clearly, system).worse
    assert not separation(*answers(50, 6, 9, 35)).worse


def test_a_control_with_a_higher_perplexity_is_the_worse_one() -> None:
    system, control = [5.0, 6.0, 7.0], [8.0, 9.2, 9.9]
    assert separation(system, control, higher_is_better=False).worse
    assert not separation(control, system, higher_is_better=False).worse
