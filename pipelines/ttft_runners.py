"""One way to answer a request, ready to run: a system on its own open store, or a file of KV."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pipelines.attention import use_attention
from pipelines.diy import answer_diy
from pipelines.generate import QueryOptions, answer
from pipelines.systems import System, make_system
from pipelines.ttft_stores import TtftStores
from pipelines.ttft_values import DIY, RECOMPUTE, Budget, Layout, TtftOptions
from store.disk.io import IOOptions, Throttle
from store.stats import QueryStats

if TYPE_CHECKING:
    from pipelines.models import LoadedModel
    from store.engine import PrefixStore


class Given(NamedTuple):
    """An answer: ``logits`` float [vocab] of its first token, and what it cost."""

    logits: torch.Tensor
    stats: QueryStats


class Runner(ABC):
    """Answers requests in one way.

    Attributes
    ----------
    name
        Of the system.
    layout, budget
        Of its store, None without one.
    configuration
        Of the engine, None where nothing in a store is used.
    """

    configuration: System | None = None

    def __init__(self, name: str, layout: Layout | None, budget: Budget | None) -> None:
        self.name, self.layout, self.budget = name, layout, budget

    @property
    @abstractmethod
    def disk(self) -> str | None:
        """How it reads, known once it did: ``direct`` or ``page cache``; None for nothing read.

        ``, emulated`` follows where a slower disk is emulated.
        """

    @property
    def sampled(self) -> bool:
        """Whether it answers some requests only, and none of the warm-up, as it takes long."""
        return self.name == RECOMPUTE

    @abstractmethod
    def answer(self, prefix_ids: np.ndarray, query: np.ndarray) -> Given:
        """Answer a query of uint32 [m] behind a prefix of uint32 [n].

        Raises
        ------
        ChunkLoadError
            Stored KV can't be read, and nothing else serves.
        """


class EngineRunner(Runner):
    """A configuration of the engine, on a store that nobody else has open in this way."""

    def __init__(
        self,
        system: System,
        store: PrefixStore,
        model: LoadedModel,
        options: TtftOptions,
        budget: Budget,
    ) -> None:
        reads = system.reuse
        layout, own = (Layout.of(system), budget) if reads else (None, None)
        super().__init__(system.name, layout, own)
        self.configuration = system if reads else None
        self._store, self._model, self._io = store, model, options.io
        self._options = QueryOptions(
            max_new_tokens=1,
            plan="force-load" if reads else "force-recompute",
            insert="never",
            sparse=system.options(options.retention),
            record=False,
        )

    @property
    def disk(self) -> str | None:
        """Past the page cache, where the file system allows that."""
        if self.layout is None:
            return None
        direct = self._io.direct and self._store.io_note() is None
        return ("direct" if direct else "page cache") + _emulated(self._io)

    def answer(self, prefix_ids: np.ndarray, query: np.ndarray) -> Given:
        """Answer through `pipelines.generate.answer`."""
        # Changing the implementation is the bench's doing, not the system's.
        use_attention(self._model.model)
        made = answer(self._store, self._model, prefix_ids, query, options=self._options)
        return Given(made.logits, made.stats)


class DiyRunner(Runner):
    """transformers' own cache in a file; no budget, and a cold page cache before each request."""

    def __init__(self, stores: TtftStores, model: LoadedModel, io: IOOptions) -> None:
        super().__init__(DIY, None, None)
        self._stores, self._model, self._io = stores, model, io
        self._throttle = Throttle(io.bandwidth_bytes_s, io.latency_s)

    @property
    def disk(self) -> str:
        """Through the page cache, which is cold."""
        return "page cache" + _emulated(self._io)

    def answer(self, prefix_ids: np.ndarray, query: np.ndarray) -> Given:
        """Load the whole file, then run the query over it."""
        made = answer_diy(self._stores.diy_file(prefix_ids), self._model, query, self._throttle)
        stages = {"load": made.load_s, "compute": made.ttft_s - made.load_s}
        stats = QueryStats(
            ttft_s=made.ttft_s,
            stages_s={"match": 0.0, "probe": 0.0, "identify": 0.0, **stages, "other": 0.0},
            hidden_io_s=0.0,
            prompt_tokens=len(prefix_ids) + len(query),
            reused_tokens=len(prefix_ids),
            forward_tokens=len(query),
            plan="load",
            bytes={"disk": made.file_bytes, "host": 0, "device": 0},
            read_bytes=made.file_bytes,
            requests=1,
            needed_bytes=made.file_bytes,
        )
        return Given(made.logits, stats)


def _emulated(io: IOOptions) -> str:
    return ", emulated" if io.bandwidth_bytes_s is not None or io.latency_s else ""


def open_runners(
    stack: contextlib.ExitStack,
    stores: TtftStores,
    model: LoadedModel,
    options: TtftOptions,
    budget: Budget,
) -> list[Runner]:
    """Runners of all systems in the order asked for; ``stack`` closes their stores."""
    runners: list[Runner] = []
    for name in options.systems:
        if name == DIY:
            runners.append(DiyRunner(stores, model, options.io))
            continue
        system = make_system(name)
        opened = (
            stores.open_system(system, budget, options.io)
            if system.reuse
            else stores.open(stores.plainest)
        )
        store = stack.enter_context(opened)
        runners.append(EngineRunner(system, store, model, options, budget))
    return runners
