"""One open store and one loaded model, ready for questions; shared by the three ways to ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from impress_cli.envelope import envelope
from impress_cli.explain import explain_lines, layer_rows, layer_table, layer_totals
from impress_cli.options import DiskSettings, Dtype, MemorySettings
from impress_cli.retention import Choice
from impress_cli.session import loaded_model, opened_store, stored_model
from impress_cli.ttft import ttft_lines
from impress_cli.ui import Ui
from impress_cli.units import format_bytes
from impress_cli.verdicts import Asked, verdict_notes
from store.errors import InvalidValueError

if TYPE_CHECKING:
    from pipelines.ask import Divergence, Prefix
    from pipelines.generate import Answer
    from pipelines.models import LoadedModel
    from store.engine import PrefixStore
    from store.itf.options import SparseOptions
    from store.stats import LayerReport


@dataclass(frozen=True, slots=True)
class Settings:
    """How questions are answered: the options of ``impress query``, checked.

    ``choice`` and ``plan`` are as typed; what ``system`` makes of them is `chosen` and `way`.
    """

    prefix: str | None = None
    template: str = "auto"
    choice: Choice = field(default_factory=Choice)
    plan: str = "auto"
    insert: str = "exact"
    system: str = "impress"
    max_new_tokens: int = 64
    explain: bool = False

    def chosen(self) -> Choice:
        """Return the choice with what the system fills in. Raises InvalidValueError."""
        from pipelines.systems import make_system

        return self.choice.of_system(make_system(self.system))

    def way(self) -> str:
        """Return the plan with what the system makes of it. Raises InvalidValueError."""
        from pipelines.systems import make_system

        if make_system(self.system).reuse:
            return self.plan
        if self.plan == "force-load":
            raise InvalidValueError(
                f"--system {self.system} uses nothing that is stored; leave out --plan"
            )
        return "force-recompute"


class Reply(NamedTuple):
    """An answer, the prefix it is about, where the match ended, and what was asked to be kept."""

    answer: Answer
    prefix: Prefix
    divergence: Divergence
    sparse: SparseOptions


@dataclass(slots=True)
class Asker:
    """Answers questions on one store with one model."""

    ui: Ui
    store: PrefixStore
    model: LoadedModel
    settings: Settings
    disk: DiskSettings
    #: What the store had to say; also in the JSON.
    notes: list[str]
    #: What was said of the options, so that it is said once.
    said: set[str] = field(default_factory=set)

    def find(self, key: str | None) -> Prefix:
        """Return the prefix that ``key`` names, or an empty one; say which kind it is."""
        from pipelines.ask import Prefix, find_prefix

        if key is None:
            return Prefix(_no_tokens(), template=self.settings.template)
        prefix = find_prefix(self.store, self.model, key, self.settings.template)
        of = f"file {key}" if prefix.origin == "file" else f"stored prefix {prefix.name}"
        self.ui.note(f"{of}: {len(prefix.ids)} tokens")
        if cut := prefix.source.get("cut_tokens"):
            when = (
                "when it was stored"
                if prefix.origin == "stored"
                else f"from the end: this model leaves a prefix {self.model.prefix_limit}"
            )
            self.ui.warn(f"{cut} tokens were cut {when}")
        return prefix

    def ask(
        self, prefix: Prefix, prompt: str, on_text: Callable[[str], None] | None = None
    ) -> Reply:
        """Answer one question. Raises ImpressError for what can't be answered."""
        from pipelines.ask import ask, divergence
        from pipelines.generate import QueryOptions

        chosen, plan = self.settings, self.settings.way()
        recipe = prefix.source.get("query", {})
        self._say_once(chosen.choice.notes(recipe, plan))
        sparse = chosen.chosen().options(recipe)
        options = QueryOptions(
            max_new_tokens=chosen.max_new_tokens,
            sparse=sparse,
            plan=plan,
            # The turns of a chat would stay in the store without a name to remove them by.
            insert="never" if prefix.origin == "chat" else chosen.insert,
        )
        answer = ask(self.store, self.model, prefix, prompt, options, on_text)
        if on_text is not None:
            self.ui.line()  # notes that follow must not run on in the answer's line
        # O_DIRECT that can't be had is known after the first read.
        self._announce(self.store.io_note())
        keeps = bool(self.store.probes().specs)
        self._announce(missing_evidence(sparse, answer.layers, self.store.path, keeps=keeps))
        if sparse.evidence == "auto" and answer.layers:
            self._say_once(chosen.choice.idle(_evidence_used(answer.layers)))
        self._say_once(lone_head(chosen.choice.given(), answer.layers))
        self._say_once(layout_notes(chosen.system, self.store, answer, sparse))
        if answer.layers:
            asked = Asked.of(chosen.system, sparse, _evidence_used(answer.layers), self.store)
            self._say_once(verdict_notes(self.store.verdicts(), asked, self.store.path))
        parting = divergence(answer.matched, prefix.ids, self.model.tokenizer)
        return Reply(answer, prefix, parting, sparse)

    def _announce(self, note: str | None) -> None:
        """Say something about the store, once, and keep it for the JSON."""
        if note is not None and note not in self.notes:
            self.notes.append(note)
            self.ui.note(note)

    def _say_once(self, notes: list[str]) -> None:
        for note in notes:
            if note not in self.said:
                self.said.add(note)
                self.ui.note(note)

    def one_shot(self, prompt: str, *, as_json: bool) -> int:
        """Answer one question from the command line; the exit code is 0."""
        prefix = self.find(self.settings.prefix)
        reply = self.ask(prefix, prompt, None if as_json else self.ui.stream)
        if as_json:
            self.ui.json(self.reply_object(reply))
        else:
            self.show_stats(reply)
        return 0

    def show_stats(self, reply: Reply) -> None:
        """Print the TTFT lines and, if asked for, the explanation."""
        if not self.ui.quiet:
            for text in ttft_lines(reply.answer.stats, layers=len(reply.answer.layers)):
                self.ui.line(text)
        if reply.answer.insert_note:
            self.ui.note(reply.answer.insert_note)
        if self.settings.explain:
            self._explain(reply)

    def _explain(self, reply: Reply) -> None:
        for text in explain_lines(reply.answer, reply.divergence, len(reply.prefix.ids)):
            self.ui.line(text)
        if reply.answer.layers:
            self.ui.show(layer_table(reply.answer.layers, self.store.shape.row_bytes))

    def reply_object(self, reply: Reply, **more: Any) -> dict[str, Any]:
        """Build the versioned JSON object of an answer (docs/json.md)."""
        answer, prefix = reply.answer, reply.prefix
        body = {
            **more,
            "text": answer.text,
            "tokens": [int(token) for token in answer.token_ids],
            "system": self.settings.system,
            **asdict(answer.stats),
            "layers": self.store.shape.num_layers,
            "sparse": asdict(reply.sparse),
            "prefix": {
                "name": prefix.name,
                "origin": prefix.origin,
                "prefix_id": prefix.prefix_id,
                "tokens": len(prefix.ids),
                "template": prefix.template,
            },
            "inserted_tokens": answer.inserted_tokens,
            "insert_note": answer.insert_note,
            "model": self.model.spec,
            "synthetic": self.model.synthetic,
            "notes": self.notes,
        }
        if self.settings.explain:
            body["explain"] = explain_object(reply, self.store.shape.row_bytes)
        return envelope("query", body, device=str(self.model.device), disk=self.disk)

    def change(self, **settings: Any) -> None:
        """Change settings for the questions that follow."""
        self.settings = replace(self.settings, **settings)


def layout_notes(name: str, store: PrefixStore, answer: Answer, sparse: SparseOptions) -> list[str]:
    """Say where a system was not itself: on other chunks, in another order, loading everything."""
    from pipelines.systems import make_system
    from store.files import ORDERS

    system, size = make_system(name), store.info.chunk_tokens
    if name == "impress" or not answer.matched.nodes or not system.reuse:
        return []
    order = ORDERS[any(store.order(node.node_id) is not None for node, _ in answer.matched.nodes)]
    found = []
    if (size, order) != (system.chunk_tokens, system.order):
        found.append(
            f"{name} is defined on chunks of {system.chunk_tokens} tokens in {system.order} order, "
            f"and this prefix has chunks of {size} in {order} order; 'impress bench ttft' compares "
            "systems on layouts of their own"
        )
    if system.sparse and not sparse.sparse:
        found.append(f"retention 1.0: {name} loads everything; set one below 1, such as 0.25")
    return found


def missing_evidence(
    sparse: SparseOptions, layers: Sequence[LayerReport], path: Path, *, keeps: bool
) -> str | None:
    """Say how to get evidence that is not stored, where all keys were read for want of it.

    ``keeps``: whether the store has a setting that these nodes lag behind. Naming a kind would
    drop the others from all nodes.
    """
    if sparse.evidence != "auto" or not layers or _evidence_used(layers) != "full":
        return None
    command = f"'impress reorder --store {path}"
    adds = (
        f"{command}' adds what the store keeps"
        if keeps
        else f"{command} --probe sketch' adds a sketch"
    )
    return (
        "stored tokens of this prefix have no sketch or probe heads, so all keys were read to "
        f"choose by; {adds}"
    )


def lone_head(given: Iterable[str], layers: Sequence[LayerReport]) -> list[str]:
    """Say which options had nothing to compare, where a single head was probed."""
    names = " and ".join(sorted({"alpha", "threshold"} & set(given)))
    compared = any(layer.jaccard is not None for layer in layers)
    if not names or not layers or compared or _evidence_used(layers) != "heads":
        return []
    return [f"{names} has no effect with one probe head, which has no other to agree with"]


def _evidence_used(layers: Sequence[LayerReport]) -> str:
    """Evidence of a run; a layer that fell back says ``full`` of probe heads."""
    return next((layer.evidence for layer in layers if not layer.fell_back), "heads")


def explain_object(reply: Reply, row_bytes: int) -> dict[str, Any]:
    """JSON object of ``--explain``; ``row_bytes`` as in `layer_rows`."""
    matched = reply.answer.matched
    return {
        "nodes": [
            {"node": part.node.node_id, "used_tokens": part.used, "tokens": part.node.length}
            for part in matched.nodes
        ],
        "matched_tokens": matched.matched_len,
        "stop": matched.stop,
        "divergence": reply.divergence._asdict(),
        "layers": layer_rows(reply.answer.layers, row_bytes),
        "totals": layer_totals(reply.answer.layers, row_bytes),
    }


@contextmanager
def opened_asker(
    ui: Ui,
    path: Path,
    settings: Settings,
    *,
    disk: DiskSettings,
    model: str | None,
    dtype: Dtype | None,
    device: str,
    threads: int | None,
    memory: MemorySettings | None = None,
    warm: int = 0,
) -> Iterator[Asker]:
    """Load the model that the store names (or ``model``) and open the store for it.

    ``warm``: of how many prefixes to load the KV that memory has room for, before anybody asks.
    """
    spec, stored_dtype = stored_model(path)
    with opened_store(ui, path, memory=memory):
        pass  # what is wrong with the budgets is said before a model is loaded, which takes long
    chosen = stored_dtype if dtype is None else dtype.value
    loaded = loaded_model(ui, model or spec, dtype=chosen, device=device, threads=threads)
    opened = opened_store(
        ui,
        path,
        identity=loaded.identity,
        disk=disk,
        device=str(loaded.device),
        memory=memory,
    )
    with opened as store:
        if warm:
            _warm(ui, store, warm)
        yield Asker(ui, store, loaded, settings, disk, list(store.notes))


def _warm(ui: Ui, store: PrefixStore, prefixes: int) -> None:
    """Fill the tiers, and say with what."""
    from pipelines.progress import ProgressEvent

    with ui.progress() as progress:
        report = store.warm(
            prefixes, lambda done, of: progress(ProgressEvent("warm up", done, of, "nodes"))
        )
    held = format_bytes(sum(store.resident_bytes()))
    text = f"warmed up: {format_bytes(report.bytes)} read, {held} of KV in memory"
    if report.known < report.nodes:
        text += (
            f"; of {report.nodes - report.known} of {report.nodes} nodes nothing is known yet, so "
            "all of them was read"
        )
    ui.note(
        text if report.nodes else "nothing was warmed up: no KV stays in memory, or none is stored"
    )


def _no_tokens() -> Any:
    from pipelines.ask import NO_TOKENS

    return NO_TOKENS
