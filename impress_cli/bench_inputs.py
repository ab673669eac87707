"""What the benches of importance run on: documents or a store, a model, and lists of values.

Owns the options that `impress bench fidelity` and `similarity` share, and their checks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from impress_cli.options import DiskSettings, Dtype
from impress_cli.ui import Ui
from impress_cli.units import parse_retention
from store.errors import InvalidValueError

if TYPE_CHECKING:
    from pipelines.models import LoadedModel
    from pipelines.progress import Progress
    from store.engine import PrefixStore

Report = TypeVar("Report")

PREFIX_TOKENS = 2048


class HistoryFrom(StrEnum):
    """Whose queries are the history that static knows importance from."""

    OTHERS = "others"
    SAME = "same"


DocumentsOption = Annotated[
    Path | None,
    typer.Option(
        "--documents",
        metavar="DIR",
        help="Folder of .txt and .md files: a prefix is the beginning of one (short ones are "
        "joined), the query its continuation.",
        show_default=False,
    ),
]
MeasuredStoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store",
        metavar="DIR",
        help="Store whose prefixes are measured, with their own questions, else with their last "
        "tokens. Nothing in it changes.",
        show_default=False,
    ),
]
PrefixTokensOption = Annotated[
    int | None,
    typer.Option(
        "--prefix-tokens",
        metavar="N",
        help=f"Length of a prefix taken from documents. Default: {PREFIX_TOKENS}.",
        show_default=False,
    ),
]
PrefixesOption = Annotated[
    int, typer.Option("--prefixes", metavar="N", help="How many prefixes at most.")
]
QueryTokensOption = Annotated[
    int,
    typer.Option("--query-tokens", metavar="N", help="Length of a query that continues a text."),
]
QueriesOption = Annotated[
    Path | None,
    typer.Option(
        "--queries",
        metavar="FILE",
        help='JSON lines {"prefix": …, "prompt": …} instead of continuations; without '
        "'prefix' a line is asked of every prefix.",
        show_default=False,
    ),
]
HistoryOption = Annotated[
    int | None,
    typer.Option(
        "--history",
        metavar="N",
        help="Other queries per prefix, at most, from which static knows importance. Default: 6.",
        show_default=False,
    ),
]
HistoryFromOption = Annotated[
    HistoryFrom | None,
    typer.Option(
        "--history-from",
        help="Where those queries come from: others (default), what is asked of the other "
        "prefixes; same, later windows of the same text, which know what it is about.",
        show_default=False,
    ),
]
ComparedRowsOption = Annotated[
    str | None,
    typer.Option(
        "--rows",
        metavar="NAME,…",
        help="With evidence sketch, which rows of a query are scored: auto, all, sampled. "
        "Default: auto, sampled with attend loaded, else all.",
        show_default=False,
    ),
]
FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        metavar="DIR",
        help="Folder for temporary stores. Default: the system's.",
        show_default=False,
    ),
]
PlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Also draw the result into this PNG file (needs the extra 'plots').",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured with which model, as given."""

    documents: Path | None
    store: Path | None
    model: str | None
    dtype: Dtype | None
    device: str
    threads: int | None
    folder: Path | None

    def check(self, only_documents: Mapping[str, Any]) -> None:
        """Refuse what can be refused before a model is loaded. Raises ImpressError.

        ``only_documents`` are options that make no sense with a store, None where not given.
        """
        from pipelines.fidelity_texts import text_files

        if (self.documents is None) == (self.store is None):
            given = "neither is given" if self.store is None else "both are given"
            raise InvalidValueError(f"give --documents DIR or --store DIR; {given}")
        if self.documents is not None:
            text_files(self.documents)
            return
        for name, value in only_documents.items():
            if value is not None:
                raise InvalidValueError(
                    f"--{name} {value} has no effect on a store, which is measured as it is; "
                    "leave it out, or give --documents"
                )

    def measure(
        self,
        ui: Ui,
        on_documents: Callable[[LoadedModel, Path, Path, Progress], Report],
        on_store: Callable[[LoadedModel, PrefixStore, Progress], Report],
    ) -> tuple[LoadedModel, Report]:
        """Load the model and measure on the documents or on the store."""
        from impress_cli.session import DEFAULT_MODEL, loaded_model, opened_store, stored_model

        spec, dtype = (DEFAULT_MODEL, "auto")
        if self.store is not None:
            spec, dtype = stored_model(self.store)
        loaded = loaded_model(
            ui,
            self.model or spec,
            dtype=dtype if self.dtype is None else self.dtype.value,
            device=self.device,
            threads=self.threads,
        )
        if self.store is None:
            assert self.documents is not None
            folder = self.folder or Path(tempfile.gettempdir())
            with ui.progress() as progress:
                return loaded, on_documents(loaded, self.documents, folder, progress)
        opening = opened_store(ui, self.store, identity=loaded.identity, device=str(loaded.device))
        with opening as store, ui.progress() as progress:
            return loaded, on_store(loaded, store, progress)

    def json(self, name: str, body: dict[str, Any], loaded: LoadedModel) -> dict[str, Any]:
        """Wrap a result, with what it was measured on."""
        from impress_cli.envelope import envelope

        subject = {
            "documents": None if self.documents is None else str(self.documents),
            "store": None if self.store is None else str(self.store),
            "model": loaded.spec,
            "dtype": loaded.identity.dtype,
            "synthetic": loaded.synthetic,
        }
        return envelope(name, {**body, **subject}, device=str(loaded.device), disk=DiskSettings())


def picture_title(loaded: LoadedModel) -> str:
    """Name of the model for a picture, which says where its weights are random."""
    weights = " (random weights)" if loaded.synthetic else ""
    return f"{loaded.spec}{weights}"


def words(text: str, option: str) -> tuple[str, ...]:
    """Words separated by commas, each once. Raises InvalidValueError for none."""
    found = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not found:
        raise InvalidValueError(f"{option} {text!r} names nothing; give one or more, as in a,b")
    return found


def shares(text: str, option: str) -> tuple[float, ...]:
    """Fractions separated by commas, as in ``0.1,25%``. Raises InvalidValueError."""
    return tuple(dict.fromkeys(parse_retention(word, option) for word in words(text, option)))


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers separated by commas. Raises InvalidValueError."""
    try:
        return tuple(dict.fromkeys(int(word) for word in words(text, option)))
    except ValueError as error:
        raise InvalidValueError(
            f"{option} {text!r} is not a list of whole numbers; write it as 16,64"
        ) from error
