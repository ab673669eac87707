"""Statistics of an evaluation: what two ways of answering the same documents differ by.

Pure functions on arrays and numbers. Which documents were answered and what a metric is are
`evaluate`'s and lm-eval's; nothing here computes a metric of a task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from store.errors import InvalidValueError

#: Share of repetitions whose interval is to hold the true difference.
CONFIDENCE = 0.95
#: To be said wherever intervals are shown.
INTERVAL_NOTE = (
    "intervals hold 95 %: Newcombe's for paired shares (1998, method 10) where an answer is right "
    "or wrong, a normal one of the documents' differences elsewhere; an average's is put together "
    "from those of its tasks"
)
_Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


class Interval(NamedTuple):
    """Both ends of a confidence interval."""

    low: float
    high: float


class Paired(NamedTuple):
    """How a system differs from a reference on the same documents.

    Parameters
    ----------
    difference, interval
        Mean of system minus reference, above 0 where the system is better, and where it lies.
    flips_worse, flips_better
        Documents that got worse, and those that got better; None where answers are not simply
        right or wrong (1 or 0), so that rounding would count.
    mcnemar_p
        Probability of flips as unequal as these or more, were both directions equally likely.
    """

    difference: float
    interval: Interval
    flips_worse: int | None
    flips_better: int | None
    mcnemar_p: float | None


def paired(
    reference: Sequence[float] | np.ndarray,
    system: Sequence[float] | np.ndarray,
    *,
    higher_is_better: bool = True,
) -> Paired:
    """Compare two lists of values of a metric, one value per document, in the same order.

    Parameters
    ----------
    reference, system
        [n ≥ 1] each.
    higher_is_better
        False for metrics such as perplexity: decides only which flips are worse.

    Raises
    ------
    InvalidValueError
        The lists are empty or differ in length.
    """
    before, after = _pair(reference, system)
    change = after - before
    mean = float(change.mean())
    if not (_is_binary(before) and _is_binary(after)):
        return Paired(mean, normal_interval(change), None, None, None)
    rose, fell = int((change > 0).sum()), int((change < 0).sum())
    worse, better = (fell, rose) if higher_is_better else (rose, fell)
    interval = newcombe_interval(before, after)
    return Paired(mean, interval, worse, better, mcnemar_exact(worse, better))


def _pair(
    first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    one, two = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if one.shape != two.shape or one.ndim != 1 or not len(one):
        raise InvalidValueError(
            f"values of {one.shape} and {two.shape} documents can't be compared in pairs; give two "
            "lists of the same documents, one or more"
        )
    return one, two


def _is_binary(values: np.ndarray) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


def mcnemar_exact(worse: int, better: int) -> float:
    """Two-sided exact p of McNemar's test; 1 where nothing flipped.

    Documents on which both agree tell nothing, so the flips alone are counted: under the null
    hypothesis each goes either way with probability ½.
    """
    flips = worse + better
    tail = sum(math.comb(flips, count) for count in range(min(worse, better) + 1))
    # Whole numbers to the end: 2**flips alone overflows a float from 1024 flips on.
    return min(1.0, float(Fraction(2 * tail, 2**flips)))


def wilson_interval(successes: int, n: int) -> Interval:
    """Wilson's score interval of a share: never empty, and never outside 0 to 1."""
    share, square = successes / n, _Z * _Z
    middle = 2 * successes + square
    reach = _Z * math.sqrt(square + 4 * n * share * (1 - share))
    size = 2 * (n + square)
    # Rounding must not push an end past the share that it encloses.
    return Interval(
        min(share, max(0.0, (middle - reach) / size)), max(share, min(1.0, (middle + reach) / size))
    )


def newcombe_interval(reference: np.ndarray, system: np.ndarray) -> Interval:
    """Interval of the difference of two paired shares (Newcombe 1998, method 10).

    A normal interval has no width where nothing flipped, as if a few hundred documents proved that
    nothing ever does; this one stays about 2/n wide to either side.

    Parameters
    ----------
    reference, system
        0 or 1 for each document, float64 [n ≥ 1].
    """
    n = len(reference)
    right, wrong = int((reference * system).sum()), int(((1 - reference) * (1 - system)).sum())
    better, worse = int((system > reference).sum()), int((system < reference).sum())
    first, second = (right + better) / n, (right + worse) / n  # system, reference
    phi = _correlation(right, better, worse, wrong)
    low_1, high_1 = wilson_interval(right + better, n)
    low_2, high_2 = wilson_interval(right + worse, n)
    difference = first - second
    return Interval(
        difference - _joined(first - low_1, high_2 - second, phi),
        difference + _joined(high_1 - first, second - low_2, phi),
    )


def _correlation(right: int, better: int, worse: int, wrong: int) -> float:
    """How much two systems are right on the same documents, corrected for continuity."""
    margins = (right + better) * (worse + wrong) * (right + worse) * (better + wrong)
    if not margins:
        return 0.0  # one of them is always right or always wrong
    agreement = float(right * wrong - better * worse)
    if agreement > 0:
        agreement = max(0.0, agreement - (right + better + worse + wrong) / 2)
    return agreement / math.sqrt(margins)


def _joined(first: float, second: float, phi: float) -> float:
    """Reach of a difference, from the reach of its two parts and their correlation."""
    return math.sqrt(max(0.0, first**2 - 2 * phi * first * second + second**2))


def normal_interval(differences: np.ndarray) -> Interval:
    """Interval of a mean by its standard error; a single document tells nothing about it."""
    mean, n = float(differences.mean()), len(differences)
    if n < 2:
        return Interval(-math.inf, math.inf)
    reach = _Z * float(differences.std(ddof=1)) / math.sqrt(n)
    return Interval(mean - reach, mean + reach)


def average_interval(differences: Sequence[float], intervals: Sequence[Interval]) -> Interval:
    """Interval of the plain mean of independent differences, one per task.

    The squared reaches to either side are added, as Newcombe's method does with two shares; for
    normal intervals this is the usual rule of standard errors.
    """
    mean, n = math.fsum(differences) / len(differences), len(differences)
    pairs = list(zip(differences, intervals, strict=True))
    below = math.sqrt(sum((value - interval[0]) ** 2 for value, interval in pairs)) / n
    above = math.sqrt(sum((interval[1] - value) ** 2 for value, interval in pairs)) / n
    return Interval(mean - below, mean + above)


def average_stderr(errors: Sequence[float | None]) -> float | None:
    """Standard error of the plain mean of independent values, None where one's is not known."""
    known = [error for error in errors if error is not None]
    if len(known) < len(errors) or not known:
        return None
    return math.sqrt(math.fsum(error * error for error in known)) / len(known)


def answer_distribution(loglikelihoods: Sequence[float] | np.ndarray) -> np.ndarray:
    """Logarithms of the probabilities of a document's choices: log-softmax, float64 [choices]."""
    values = np.asarray(loglikelihoods, np.float64)
    # All choices impossible: -inf less itself is no number, which is what comes out.
    with np.errstate(invalid="ignore"):
        shifted = values - values.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def answer_kl(
    reference: Sequence[float] | np.ndarray, system: Sequence[float] | np.ndarray
) -> float | None:
    """Divergence of a document's answers in nats, reference || system.

    The choices' log-likelihoods [choices] are normalised to a distribution over the choices. None
    where there is no choice (fewer than two), or none to tell: a value that is not a number, or
    no choice that is possible.
    """
    one, two = _pair(reference, system)
    if len(one) < 2:
        return None
    before, after = answer_distribution(one), answer_distribution(two)
    if np.isnan(before).any() or np.isnan(after).any():
        return None
    chosen = np.isfinite(before)  # what is impossible adds nothing
    terms = np.exp(before[chosen]) * (before[chosen] - after[chosen])
    return max(0.0, float(terms.sum()))  # rounding may leave it a little below


def known_mean(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are there, None where none is."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


class Separation(NamedTuple):
    """Whether a control answers worse than a system on the same documents.

    ``paired`` compares the control (as the system) with the system (as the reference); ``worse``
    is True only where chance is no explanation: the whole interval lies on the worse side.
    """

    paired: Paired
    worse: bool


def separation(
    system: Sequence[float] | np.ndarray,
    control: Sequence[float] | np.ndarray,
    *,
    higher_is_better: bool = True,
) -> Separation:
    """Compare a control with a system, a value of the metric per document and in the same order."""
    found = paired(system, control, higher_is_better=higher_is_better)
    low, high = found.interval
    return Separation(found, high < 0 if higher_is_better else low > 0)
