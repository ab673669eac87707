"""Where the systems of `impress bench ttft` find the prefixes: stores and files, made for it.

Systems that need the same layout share a store; each opens it for itself, with its own memory. A
prefix is computed once and put into all of them. Who answers when is `bench_ttft`'s.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipelines.attention import prefill
from pipelines.bench_folder import IN_MEMORY, file_system
from pipelines.diy import PART, save_cache
from pipelines.probes import first_heads
from pipelines.progress import Progress, ProgressEvent
from pipelines.reorder import reorder_store
from pipelines.reorder_plan import ReorderOptions
from pipelines.systems import System
from pipelines.ttft_kept import DIY_FOLDER
from pipelines.ttft_values import Budget, Layout, TtftPrefix, Workload
from store.access import AccessStats
from store.disk.io import IOOptions
from store.engine import PrefixStore
from store.errors import InvalidValueError, StoreFullError
from store.files import IMPORTANCE
from store.index.ids import node_id
from store.itf.options import SparseOptions
from store.probes import ProbeSettings
from store.recorder import RunRecorder
from store.run_maker import MemoryOptions
from store.sparse import SparseFetch

if TYPE_CHECKING:
    from pipelines.models import LoadedModel

#: Room for probe data, catalog and file system blocks, as a factor of the KV's bytes.
_SPACE_FACTOR = 1.3
#: Of the runs that a reordering learns from, where nothing is left out of those measured.
_HISTORY_RETENTION = 0.25


@contextlib.contextmanager
def bench_folder(
    model: LoadedModel,
    layouts: Sequence[Layout],
    workload: Workload,
    folder: Path,
    *,
    keep: bool,
    diy: bool,
) -> Iterator[Path]:
    """Where stores go: ``folder`` itself, or a new one in it that is gone afterwards.

    Raises
    ------
    InvalidValueError
        ``folder`` can't be written.
    StoreFullError
        It has no room for the KV, or what was done inside ran out of it.
    """
    names = [layout.name for layout in layouts] + [DIY_FOLDER] * diy
    # One more copy while a store is rewritten in another order.
    copies = len(names) + any(layout.order == IMPORTANCE for layout in layouts)
    need = int(workload.kv_bytes(model.shape) * copies * _SPACE_FACTOR)
    free = free_bytes(folder, keep=keep)
    if keep:
        held = (path for name in names for path in (folder / name).rglob("*"))
        need -= sum(path.stat().st_size for path in held if path.is_file())
    less = f"give fewer --prefixes, fewer --systems or another {_option(keep)}"
    if need > free:
        raise StoreFullError(
            f"{folder} has {free / 1e6:.0f} MB free, of {need / 1e6:.0f} MB needed; {less}"
        )
    try:
        if keep:
            yield folder
            return
        with tempfile.TemporaryDirectory(prefix=".impress-bench-", dir=folder) as name:
            yield Path(name)
    except StoreFullError as error:
        raise StoreFullError(f"{folder} ran full; {less}") from error


def free_bytes(folder: Path, *, keep: bool) -> int:
    """Room in a folder, made where stores are to stay. Raises `InvalidValueError` for a bad one."""
    try:
        if keep:
            folder.mkdir(parents=True, exist_ok=True)
        # Writing is tried: what may be written can't be told from its mode.
        with tempfile.TemporaryFile(dir=folder):
            return shutil.disk_usage(folder).free
    except OSError as error:
        raise InvalidValueError(
            f"can't put stores into {folder} ({error.strerror}); give {_option(keep)} a folder "
            "that can be written"
        ) from error


def folder_warnings(folder: Path, *, keep: bool) -> list[str]:
    """What should be said of a folder before anything is measured on it, one sentence each."""
    if file_system(folder) not in IN_MEMORY:
        return []
    return [
        f"{folder} is on a file system in memory, so that disk times are none; give "
        f"{_option(keep)} a folder on a disk"
    ]


def _option(keep: bool) -> str:
    return "--keep" if keep else "--dir"


class TtftStores:
    """Stores by layout, and files of transformers' cache by prefix, in one folder.

    What is there already, kept by an earlier run, is used.
    """

    def __init__(
        self, model: LoadedModel, layouts: Iterable[Layout], folder: Path, *, diy: bool
    ) -> None:
        self.model, self._folder = model, folder
        self._paths = {layout: folder / layout.name for layout in layouts}
        self._diy = folder / DIY_FOLDER if diy else None
        if self._diy is not None:
            self._diy.mkdir(exist_ok=True)
            for left in self._diy.glob(f"*{PART}"):
                left.unlink()  # of a run that was killed while it wrote
        for layout, path in self._paths.items():
            if not path.exists():
                self._create(layout, path)

    @property
    def plainest(self) -> Layout:
        """The layout that answers are compared on: any serves, as a full load is exact."""
        return next(iter(self._paths))

    def _create(self, layout: Layout, path: Path) -> None:
        settings = ProbeSettings(
            sketch_bits=2 if layout.probe == "sketch" else None,
            heads=first_heads(self.model.shape) if layout.probe == "heads" else None,
        )
        PrefixStore.create(
            path,
            identity=self.model.identity,
            model_spec=self.model.spec,
            chunk_tokens=layout.chunk_tokens,
            probes=settings,
            device=str(self.model.device),
        ).close()

    def open(
        self,
        layout: Layout,
        *,
        io: IOOptions | None = None,
        memory: MemoryOptions | None = None,
    ) -> PrefixStore:
        """Open the store of a layout, by default with nothing kept in memory."""
        return PrefixStore.open(
            self._paths[layout],
            identity=self.model.identity,
            io=io,
            device=str(self.model.device),
            memory=memory or MemoryOptions(device_bytes=0, host_bytes=0),
        )

    def open_system(self, system: System, budget: Budget, io: IOOptions) -> PrefixStore:
        """Open a system's store for it alone, with its policy and memory."""
        memory = MemoryOptions(
            device_bytes=budget.device_bytes,
            host_bytes=budget.host_bytes,
            policy=system.policy,
            half_life=system.half_life,
        )
        return self.open(Layout.of(system), io=io, memory=memory)

    def diy_file(self, ids: np.ndarray) -> Path:
        """File of a prefix's cache as transformers has it; its name says which model's it is."""
        assert self._diy is not None
        return self._diy / f"{node_id(self.model.identity.digest(), ids, 0)}.safetensors"

    def fill(self, prefixes: Iterable[TtftPrefix], progress: Progress) -> None:
        """Compute each prefix once and put it where it is not yet."""
        found = list(prefixes)
        total, done = sum(len(prefix.ids) for prefix in found), 0
        with contextlib.ExitStack() as stack:
            stores = [stack.enter_context(self.open(layout)) for layout in self._paths]
            for prefix in found:
                progress(ProgressEvent("prefixes", done, total, "tokens", prefix.name))
                self._put(stores, prefix.ids)
                done += len(prefix.ids)
            progress(ProgressEvent("prefixes", total, total, "tokens"))

    def _put(self, stores: list[PrefixStore], ids: np.ndarray) -> None:
        size = len(ids)
        lacking = [store for store in stores if store.match(ids).matched_len < size]
        file = None if self._diy is None else self.diy_file(ids)
        if not lacking and (file is None or file.exists()):
            return
        run, _ = stores[0].begin(ids, max_new_tokens=0, load=False, record=False)
        with run:
            prefill(self.model.model, run, ids, logits=0)

            def layers(layer: int) -> tuple[np.ndarray, np.ndarray]:
                return run.kv(layer, 0, size)

            for store in lacking:
                store.insert(ids, layers, 0)
            if file is not None:
                save_cache(file, layers, self.model.shape)

    def reorder(self, workload: Workload, retention: float, progress: Progress) -> int:
        """Put the stores that are to be in order of importance; returns how many nodes lie in it.

        What is important, earlier queries tell, each store by its own evidence. Their statistics
        then say so, too, as what is read ahead goes by them.
        """
        layouts = [layout for layout in self._paths if layout.order == IMPORTANCE]
        learnt = self._learnt(layouts, workload.prefixes, retention, progress)
        ordered = 0
        for layout in layouts:
            access = learnt[layout.probe]
            with self.open(layout) as store:
                reorder_store(store, ReorderOptions(min_gain=0.0), progress, access=access)
                for row in store.nodes():
                    store.access.adopt(access, row.node_id, row.length)
                store.gc()
                ordered += sum(store.order(row.node_id) is not None for row in store.nodes())
        return ordered

    def _learnt(
        self,
        layouts: Sequence[Layout],
        prefixes: Iterable[TtftPrefix],
        retention: float,
        progress: Progress,
    ) -> dict[str, AccessStats]:
        """Statistics of the prefixes' histories, by kind of probe data.

        What evidence selects depends neither on chunks nor on how rows lie: one layout of a kind
        learns for all of them, and the same again once it is reordered.
        """
        asked = [(prefix, query.ids) for prefix in prefixes for query in prefix.history]
        kinds = {layout.probe: layout for layout in layouts}
        # A full load selects nothing, and so tells nothing.
        retention = retention if retention < 1.0 else _HISTORY_RETENTION
        # Sketch or probe heads, whichever the store has; all keys where it has neither.
        sparse = SparseOptions(retention=retention, evidence="auto", attend="selected")
        done, total = 0, len(kinds) * len(asked)
        found: dict[str, AccessStats] = {}
        for kind, layout in kinds.items():
            # What lies in no file would be lost for good if it were dropped for its size.
            found[kind] = AccessStats(None, self.model.shape, cache_bytes=sys.maxsize)
            recorder = RunRecorder(found[kind])
            with self.open(layout) as store:
                for prefix, query in asked:
                    progress(ProgressEvent("history", done, total, "queries", prefix.name))
                    self._record(store, prefix.ids, query, sparse, recorder)
                    done += 1
        if kinds:
            progress(ProgressEvent("history", total, total, "queries"))
        return found

    def _record(
        self,
        store: PrefixStore,
        prefix_ids: np.ndarray,
        query: np.ndarray,
        sparse: SparseOptions,
        recorder: RunRecorder,
    ) -> None:
        ids = np.concatenate([prefix_ids, query])
        run, match = store.begin(
            ids, max_new_tokens=0, max_match=len(prefix_ids), sparse=sparse, record=False
        )
        with run:
            prefill(self.model.model, run, ids[match.matched_len :], logits=0)
            assert isinstance(run.fetch, SparseFetch)
            recorder.add(run.fetch)
