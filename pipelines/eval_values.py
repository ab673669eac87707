"""Values of `impress eval`: what is asked of whom, and what came out. No code that runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pipelines.systems import System, make_system
from store.errors import InvalidValueError
from store.itf.options import SparseOptions

#: What every system is compared with.
RECOMPUTE = "recompute"
#: The system that the controls belong to.
OURS = "impress"
#: Sets of tokens that know nothing of the question, at as many bytes as `OURS` loads; and the
#: question without what is stored. In the order of their rows.
RANDOM, STATIC, NO_PREFIX = "random", "static", "no-prefix"
CONTROLS = (RANDOM, STATIC, NO_PREFIX)
#: Task of the rows that are means over the tasks.
AVERAGE = "average"
DEFAULT_SYSTEMS = (RECOMPUTE, OURS)
DEFAULT_RETENTION = (0.25,)
#: Documents that are recomputed before a full load may answer for them, and by how much
#: log-likelihoods may differ.
RECOMPUTE_SAMPLE, RECOMPUTE_TOLERANCE = 20, 1e-3


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What is evaluated; raises `InvalidValueError` for a value that is not allowed.

    Parameters
    ----------
    tasks
        Names of lm-eval's tasks and groups.
    systems
        Names as `make_system` takes them; `RECOMPUTE` is answered whether it is named or not.
    retention
        Shares that each system that leaves something out is asked to select.
    limit
        Documents of each task, from the first on; None for all.
    num_fewshot
        Shots in the prefix; None for as many whole ones as fit ``max_prefix_tokens``.
    max_prefix_tokens
        Most tokens of a prefix.
    data_dir
        Folder with ``<task>/<split>.jsonl``; None for the tasks' own data sets.
    include_path
        Folder with task files of the user.
    seed
        Of the random control.
    controls
        Whether the controls are answered, where `OURS` is among the systems.
    recompute_all
        Recompute every document, even where a full load was shown to give the same answers.
    base
        What sparse systems take that is not their own.
    """

    tasks: tuple[str, ...]
    systems: tuple[str, ...] = DEFAULT_SYSTEMS
    retention: tuple[float, ...] = DEFAULT_RETENTION
    limit: int | None = None
    num_fewshot: int | None = None
    max_prefix_tokens: int = 4096
    data_dir: Path | None = None
    include_path: Path | None = None
    seed: int = 1
    controls: bool = True
    recompute_all: bool = False
    base: SparseOptions = field(default_factory=SparseOptions)

    def __post_init__(self) -> None:
        for name in ("tasks", "systems", "retention"):
            values, option = getattr(self, name), f"--{name}"
            if not values:
                raise InvalidValueError(f"{option} names nothing; give one or more")
            twice = [value for value, count in Counter(values).items() if count > 1]
            if twice:
                raise InvalidValueError(f"{option} has {twice[0]} twice; leave one of them out")
        for name, least in (
            ("limit", 1),
            ("num_fewshot", 1),
            ("max_prefix_tokens", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidValueError(
                    f"--{name.replace('_', '-')} {value} is not allowed; give {least} or more"
                )
        for share in self.retention:
            SparseOptions(retention=share)
        _ = self.made_systems

    @property
    def made_systems(self) -> tuple[System, ...]:
        """The systems in their order, `RECOMPUTE` first."""
        names = [name for name in self.systems if name != RECOMPUTE]
        return tuple(make_system(name) for name in (RECOMPUTE, *names))

    @property
    def with_controls(self) -> bool:
        """Whether there is a system that the controls belong to, and they are wanted."""
        return self.controls and OURS in self.systems


class Way(NamedTuple):
    """One way to answer a task's documents.

    ``retention`` is the share asked for, None where nothing is chosen (everything is computed or
    loaded, or there is no prefix). Of `RANDOM` and `STATIC` it is that of the system whose bytes
    they equal.
    """

    task: str
    system: str
    retention: float | None


@dataclass(frozen=True, slots=True)
class Scored:
    """One document as answered in one way, and what that cost.

    Parameters
    ----------
    document
        Its number in the evaluated split, from 0.
    loglikelihoods, greedy
        Of each request in its order: log-likelihood of the continuation in nats, and whether
        greedy decoding would write it. Empty for a document that is answered with a text.
    text
        That answer; None for a document that is scored.
    ttft_s
        Seconds from token ids to the first logits behind the document's (first) context; None
        where the answer was taken over from a full load.
    selected_ratio, loaded_ratio, probe_ratio, fallback_ratio
        Shares of the prefix's tokens, of its chunks, of its KV bytes, and of the layers.
    disk_bytes, read_bytes
        Bytes of chunks and evidence that came from disk, and what the reads moved for them.
    prompt_tokens, reused_tokens
        Tokens of the context, and those whose KV came from the store.
    recovered_chunks
        Chunks that failed to load and were recomputed.
    asked_ratio
        Share that was asked for, for the controls that of their own.
    metrics
        The document's value by metric, as lm-eval has it; metrics without a value per document
        (F1) are left out.
    """

    document: int
    loglikelihoods: tuple[float, ...]
    greedy: tuple[bool, ...]
    text: str | None
    ttft_s: float | None
    selected_ratio: float
    loaded_ratio: float
    probe_ratio: float
    fallback_ratio: float
    disk_bytes: int
    read_bytes: int
    prompt_tokens: int
    reused_tokens: int
    recovered_chunks: int = 0
    asked_ratio: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvalRow:
    """One metric of one task (or their average) in one way.

    What compares with `RECOMPUTE` is None in its own rows, and where a metric has no value per
    document.

    Parameters
    ----------
    task, system, retention
        As in `Way`; the task `AVERAGE` is the plain mean over the tasks that have the metric.
    metric
        lm-eval's name; ``name,filter`` where the task has several filters.
    value, stderr, n
        lm-eval's aggregate and standard error (None where it has no closed form), documents.
    difference, interval
        To `RECOMPUTE`, above 0 where the system's value is higher, and its 95 % interval.
    flips_worse, flips_better, mcnemar_p
        Documents that got worse and better, and the exact p of McNemar's test; None where values
        are not 0 or 1.
    kl_mean
        Mean divergence of the answer distribution (softmax of the choices' log-likelihoods) from
        `RECOMPUTE`'s, in nats; None where documents have no choices or no numbers.
    asked_ratio, selected_ratio, loaded_ratio, probe_ratio, fallback_ratio
        Means of `Scored`'s.
    ttft_mean_s
        Mean over the documents with a time; None where none has.
    disk_bytes
        Mean per document.
    control
        Whether it is none of the systems but one of `CONTROLS`.
    higher_is_better
        Of the metric.
    """

    task: str
    system: str
    retention: float | None
    metric: str
    value: float
    stderr: float | None
    n: int
    difference: float | None
    interval: tuple[float, float] | None
    flips_worse: int | None
    flips_better: int | None
    mcnemar_p: float | None
    kl_mean: float | None
    asked_ratio: float | None
    selected_ratio: float
    loaded_ratio: float
    probe_ratio: float
    fallback_ratio: float
    ttft_mean_s: float | None
    disk_bytes: float
    control: bool = False
    higher_is_better: bool = True


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """A task as it was evaluated.

    Parameters
    ----------
    name, split
        lm-eval's name, and the split of the documents.
    n, documents
        Documents that were answered, of so many in the split.
    shots, prefix_tokens, prefix_digest
        Whole shots of the prefix, its tokens, and a digest of their ids.
    metrics
        Names as in the rows, the one that notes and verdicts go by first.
    order_questions
        Questions, none of them evaluated, that decided the order of the prefix's rows where a
        system wants one; 0 where no system does, or where the store had an order before.
    """

    name: str
    split: str
    n: int
    documents: int
    shots: int
    prefix_tokens: int
    prefix_digest: str
    metrics: tuple[str, ...]
    order_questions: int = 0


class RecomputeFacts(NamedTuple):
    """How documents were recomputed, and how many of them were compared with a full load.

    ``max_difference`` is the largest of log-likelihoods, 1 for texts that differ (None: nothing was
    compared); ``taken_over`` counts documents whose answers are the full load's.
    """

    recomputed: int
    compared: int
    max_difference: float | None
    taken_over: int


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Result of an evaluation.

    Parameters
    ----------
    rows
        By task in the order asked for, the average last; within a task by system, retention and
        metric, the controls after the systems.
    tasks
        What was evaluated.
    recompute
        How recomputing answered.
    notes, warnings
        How to read the figures, and what is not as asked for.
    documents
        Every answer, by way, in the order of the documents; `RECOMPUTE` included.
    events
        What was done to stores in this run. For people alone: a run that went on where another
        was stopped has done less, and its result is the same.
    """

    rows: tuple[EvalRow, ...]
    tasks: tuple[TaskFacts, ...]
    recompute: RecomputeFacts
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    documents: Mapping[Way, tuple[Scored, ...]]
    events: tuple[str, ...] = ()
