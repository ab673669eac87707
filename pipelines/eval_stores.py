"""Stores that an evaluation answers from: one per layout, the named one among them.

The store that was named serves the systems whose layout it has; for the others there are stores
beside it. Owns which store that is, making it and opening it. What is put into them is
`eval_fill`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipelines.eval_answers import Results
from pipelines.probes import first_heads
from pipelines.systems import SYSTEMS
from pipelines.ttft_values import Layout
from store.disk.io import IOOptions
from store.engine import PrefixStore
from store.errors import ChunkLoadError, InvalidValueError
from store.files import IMPORTANCE, ORIGINAL
from store.info import is_free, read_info
from store.probes import ProbeSettings
from store.run_maker import MemoryOptions

if TYPE_CHECKING:
    from pipelines.models import LoadedModel

#: Layout of a store that is made although no system wants one.
_DEFAULT = Layout.of(SYSTEMS["impress"])
#: Fact that the named store serves a layout, whatever it is called.
_HERE = "."
#: What a store keeps in memory while it is filled, and by default while it answers.
NOTHING_KEPT = MemoryOptions(device_bytes=0, host_bytes=0)


class EvalStores:
    """Stores by layout.

    Parameters
    ----------
    base
        The store that was named; made where there is none.
    layouts
        What the systems need.
    prefixes
        Token ids that will be asked about, uint32 [n] each: the order in which a store has them
        decides what it serves.
    results
        Remembers which store serves which layout: a later run is to find the same.

    Attributes
    ----------
    base
        The store that was named.
    paths
        Where each layout's store is.
    events
        What was done to stores, one sentence each.

    Raises
    ------
    ModelMismatchError
        The store is another model's.
    NotAStoreError, InvalidValueError
        The folder, or one beside it, holds something else.
    """

    def __init__(
        self,
        base: Path,
        model: LoadedModel,
        layouts: Sequence[Layout],
        prefixes: Sequence[np.ndarray],
        results: Results,
    ) -> None:
        self.model, self.base = model, base
        self.events: list[str] = []
        wanted = list(dict.fromkeys(layouts))
        # An empty store takes the first: what `query` does best with, else an order by importance.
        wanted.sort(key=lambda layout: (layout != _DEFAULT, layout.order != IMPORTANCE))
        if not base.exists() or is_free(base):
            self._create(base, wanted[0] if wanted else _DEFAULT)
        self._facts = results.of_store(base.name, read_info(base).store_id)
        self.paths = self._located(wanted, prefixes)
        for layout, path in self.paths.items():
            self._facts.note("layout", layout.name, _HERE if path == base else path.name)
            if path != base:
                self._require(layout, path)

    @property
    def plainest(self) -> Path:
        """A store to load everything from: any serves, as a full load is exact."""
        return min(self.paths.items(), key=lambda item: item[0].order != ORIGINAL)[1]

    def open(
        self, path: Path, *, io: IOOptions | None = None, memory: MemoryOptions | None = None
    ) -> PrefixStore:
        """Open one of the stores, by default with nothing kept in memory."""
        return PrefixStore.open(
            path,
            identity=self.model.identity,
            io=io,
            device=str(self.model.device),
            memory=memory or NOTHING_KEPT,
        )

    def _create(self, path: Path, layout: Layout) -> None:
        PrefixStore.create(
            path,
            identity=self.model.identity,
            model_spec=self.model.spec,
            chunk_tokens=layout.chunk_tokens,
            probes=self._settings(layout),
            device=str(self.model.device),
        ).close()
        self.events.append(
            f"the store {path} was made, with chunks of {layout.chunk_tokens} tokens and the probe "
            f"layout {layout.probe}"
        )

    def _settings(self, layout: Layout) -> ProbeSettings:
        return ProbeSettings(
            sketch_bits=2 if layout.probe == "sketch" else None,
            heads=first_heads(self.model.shape) if layout.probe == "heads" else None,
        )

    def _located(
        self, wanted: Sequence[Layout], prefixes: Sequence[np.ndarray]
    ) -> dict[Layout, Path]:
        """Where each layout is, or is to be made."""
        with self.open(self.base) as store:
            order = _order_of(store, prefixes)
            if not wanted:
                probe = next(iter(store.probes().specs), "none")
                return {Layout(store.info.chunk_tokens, probe, order or ORIGINAL): self.base}
            paths: dict[Layout, Path] = {}
            for layout in wanted:
                if self._fits(store, layout) and self._serves(layout, order):
                    paths[layout], order = self.base, layout.order
                else:
                    paths[layout] = self.base.with_name(f"{self.base.name}-{layout.name}")
        return paths

    def _serves(self, layout: Layout, order: str | None) -> bool:
        """Whether the named store is to serve a layout that it fits but for the order.

        What was found by an earlier run counts, which may have been stopped before it had put
        rows in order.
        """
        noted = self._facts.get("layout", layout.name)
        if noted is None:
            return order in (None, layout.order)
        return noted in (_HERE, self.base.name)  # earlier versions noted the name

    def _fits(self, store: PrefixStore, layout: Layout) -> bool:
        """Whether a store's chunks are a layout's, and it has the evidence; more is no harm."""
        same = store.info.chunk_tokens == layout.chunk_tokens
        return same and (layout.probe == "none" or store.probes() == self._settings(layout))

    def _require(self, layout: Layout, path: Path) -> None:
        """Make a store beside the named one, or check that what is there is one of the layout."""
        if not path.exists() or is_free(path):
            self._create(path, layout)
            return
        with self.open(path) as store:
            if not self._fits(store, layout):
                raise InvalidValueError(
                    f"{path} is there and has another layout than {layout.name}, which its name "
                    "says; move it away, or choose another --store"
                )


def _order_of(store: PrefixStore, prefixes: Sequence[np.ndarray]) -> str | None:
    """Order of what a store has of some prefixes, None where it has nothing."""
    found = {node.node.node_id for ids in prefixes for node in store.match(ids).nodes}
    orders = []
    for node_id in found:
        try:
            orders.append(ORIGINAL if store.order(node_id) is None else IMPORTANCE)
        except ChunkLoadError as error:
            store.quarantine(error)  # what can't be read is computed anew
    return IMPORTANCE if IMPORTANCE in orders else ORIGINAL if orders else None


def require_model(path: Path, model: LoadedModel) -> None:
    """Raise `ModelMismatchError` for another model's store, before anything else takes time."""
    if path.exists() and not is_free(path):
        PrefixStore.open(path, identity=model.identity).close()
