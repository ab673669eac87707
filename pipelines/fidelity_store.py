"""Stores that a bench of importance measures on, and single forwards on them.

Owns the temporary stores (one per chunk size and sketch width), what is put into them, and the
run of one query. What is compared with what is `bench_fidelity`'s.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch

from pipelines.attention import forward, prefill
from pipelines.fidelity_values import BenchCase, FidelityOptions
from pipelines.probes import first_heads
from pipelines.reorder_plan import order_rows
from store.engine import PrefixStore
from store.errors import InvalidValueError, StoreFullError
from store.fetch import Observer
from store.files import ORIGINAL
from store.itf.options import SparseOptions
from store.probes import ProbeSettings
from store.stats import LayerReport

if TYPE_CHECKING:
    from pipelines.models import LoadedModel

#: Room for probe data, catalog and file system blocks, as a factor of the KV's bytes.
_SPACE_FACTOR = 1.3


class Layout(NamedTuple):
    """What one temporary store looks like; ``bits`` of its sketch, None for none.

    ``order`` is how rows are to be stored once a prefix's history is known, one of `ORDERS`.
    """

    chunk_tokens: int
    bits: int | None = None
    heads: tuple[tuple[int, ...], ...] | None = None
    order: str = ORIGINAL


#: By (chunk_tokens, bits, order) of a combination.
Layouts: TypeAlias = dict[tuple[int, int | None, str], Layout]


def layouts_of(model: LoadedModel, options: FidelityOptions) -> Layouts:
    """Temporary stores of the combinations that use them."""
    heads = first_heads(model.shape) if "heads" in options.evidence else None
    widths = options.sketch_bits if "sketch" in options.evidence else (None,)
    made = {
        (size, bits, order): Layout(size, bits, heads, order)
        for size in options.chunk_tokens
        for bits in widths
        for order in options.order
    }
    first = widths[0]
    return made | {
        (size, None, order): made[size, first, order]
        for size in options.chunk_tokens
        for order in options.order
    }


class Outcome(NamedTuple):
    """What one forward gave: ``logits`` [m, vocab], ``bytes`` fetched, evidence included.

    Per layer a report, and the selected positions int64 [sets, k]; both empty for a full run.
    """

    logits: torch.Tensor
    bytes: int
    reports: tuple[LayerReport, ...]
    selected: tuple[np.ndarray, ...]


def run_query(
    store: PrefixStore,
    model: LoadedModel,
    prefix_ids: np.ndarray,
    query_ids: np.ndarray,
    *,
    sparse: SparseOptions | None = None,
    observer: Observer | None = None,
    record: bool = False,
) -> Outcome:
    """Run a query behind a stored prefix, all its positions' logits wanted.

    Raises
    ------
    ChunkLoadError
        Stored KV could not be loaded, or the store lacks a part of the prefix.
    """
    ids = np.concatenate([prefix_ids, query_ids]).astype(np.uint32)
    run, match = store.begin(
        ids,
        max_new_tokens=0,
        max_match=len(prefix_ids),
        sparse=sparse,
        observer=observer,
        record=record,
    )
    with run:
        if match.matched_len < len(prefix_ids):
            raise match.error or InvalidValueError(
                f"{store.path} lacks the prefix from token {match.matched_len} on; run "
                "'impress verify --repair'"
            )
        logits = forward(model.model, run, query_ids, logits=len(query_ids))
        assert logits is not None
        selected = tuple(np.array(sets) for sets in run.selected)
        return Outcome(logits, run.counters.wanted_bytes, tuple(run.reports), selected)


class BenchStores:
    """Stores of the same prefixes in several layouts; each is opened for as long as it is used.

    Every opening starts without resident probe data and without statistics of other layouts, so
    that what a run reads does not depend on what ran before it.
    """

    def __init__(self, model: LoadedModel, paths: dict[Layout, Path]) -> None:
        self.model, self.paths = model, paths

    def open(self, layout: Layout) -> PrefixStore:
        """Open the store of a layout; the caller closes it."""
        return PrefixStore.open(
            self.paths[layout], identity=self.model.identity, device=str(self.model.device)
        )

    def put(self, case: BenchCase) -> None:
        """Compute a prefix once and store it in every layout."""
        with contextlib.ExitStack() as stack:
            stores = [stack.enter_context(self.open(layout)) for layout in self.paths]
            ids = case.prefix_ids
            if stores[0].match(ids).matched_len == len(ids):
                return
            run, match = stores[0].begin(ids, max_new_tokens=0, record=False)
            with run:
                start = match.matched_len
                prefill(self.model.model, run, ids[start:], logits=0)
                for store in stores:
                    store.insert(ids, lambda layer: run.kv(layer, start, len(ids)), start)

    def remember(self, case: BenchCase, layout: Layout, retention: float) -> None:
        """Run a case's history so that the store's statistics hold its importance.

        In the layout whose order is by importance, the case's nodes are then reordered.
        """
        if not case.history:
            return
        sparse = SparseOptions(retention=retention, evidence="full")
        with self.open(layout) as store:
            for query in case.history:
                run_query(store, self.model, case.prefix_ids, query, sparse=sparse, record=True)
            if layout.order != ORIGINAL:
                for node, _ in store.match(case.prefix_ids).nodes:
                    known = store.access.get(node.node_id, node.length)
                    if known is not None:
                        store.reorder(node.node_id, order_rows(known))


@contextlib.contextmanager
def temporary_stores(
    model: LoadedModel, layouts: Iterable[Layout], cases: Sequence[BenchCase], folder: Path
) -> Iterator[BenchStores]:
    """Make empty stores in a new folder under ``folder``, deleted in the end.

    Raises
    ------
    InvalidValueError
        ``folder`` can't be written, or a layout is not allowed.
    StoreFullError
        It has no room for the cases' KV.
    """
    wanted = list(dict.fromkeys(layouts))
    tokens = sum(len(case.prefix_ids) for case in cases)
    need = int(tokens * model.shape.token_bytes * len(wanted) * _SPACE_FACTOR)
    try:
        free = shutil.disk_usage(folder).free
        made = tempfile.TemporaryDirectory(prefix=".impress-bench-", dir=folder)
    except OSError as error:
        raise InvalidValueError(
            f"can't put temporary stores into {folder} ({error.strerror}); give --dir a folder "
            "that is there and can be written"
        ) from error
    with made as name:
        if need > free:
            raise StoreFullError(
                f"{folder} has {free / 1e6:.0f} MB free, of {need / 1e6:.0f} MB needed; give "
                "fewer --prefixes or another --dir"
            )
        yield _created(model, wanted, Path(name))


def _created(model: LoadedModel, layouts: Sequence[Layout], folder: Path) -> BenchStores:
    paths = {layout: folder / f"store-{number}" for number, layout in enumerate(layouts)}
    for layout, path in paths.items():
        made = PrefixStore.create(
            path,
            identity=model.identity,
            model_spec=model.spec,
            chunk_tokens=layout.chunk_tokens,
            device=str(model.device),
        )
        with made as store:
            if layout.bits is not None or layout.heads is not None:
                store.set_probes(ProbeSettings(layout.bits, layout.heads))
    return BenchStores(model, paths)
