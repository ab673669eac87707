"""kill -9 while sidecars are written, replaced or dropped: every prefix stays, all is sound."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from pipelines.attention import prefill
from pipelines.probes import match_probes
from store.engine import PrefixStore
from store.probes import ProbeSettings
from tests.helpers import ask, ids_of, new_store, open_store, put, worst
from tests.store import test_kill
from tests.store.test_kill import FIRST, QUESTION, SECOND, forking, tiny

__all__ = ["forking"]

KILLS = 6
ALL = ProbeSettings(2, ((0,), (1,), (0,)))
SETTINGS = {
    "add": ALL,
    "insert": ALL,
    "replace": ProbeSettings(4, ((1,), (1,), (1,))),
    "drop": ProbeSettings(),
}


def change(action: str, path: Path) -> None:
    """What ``impress reorder --probe`` does, or an insert that splits a node."""
    if action == "insert":
        return test_kill.insert(path)
    with PrefixStore.open(path) as store:
        store.set_probes(SETTINGS[action])
        match_probes(store)
    return None


def run_and_die(action: str, path: Path, step: int, counted: Path) -> None:
    """In a process of its own, so that the action can be put into the other module's table."""
    test_kill.ACTIONS["probes"] = lambda path: change(action, path)
    test_kill.run_and_die("probes", path, step, counted)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> dict[str, Path]:
    """For each change a store that it has something to do in."""
    model, folder = tiny(), tmp_path_factory.mktemp("kill-probes")
    plain = folder / "add"
    with new_store(plain / "kv", model) as store:
        put(store, model, FIRST, "first")
        put(store, model, ids_of(40, seed=3), "other")
        run, _ = store.begin(SECOND, max_new_tokens=0, load=False)
        with run:
            prefill(model.model, run, SECOND, logits=0)
            layers = range(model.shape.num_layers)
            kv = np.stack([np.stack(run.kv(layer, 0, len(SECOND))) for layer in layers])
    np.save(plain / "kv.npy", kv)
    for action in ("replace", "drop", "insert"):
        shutil.copytree(plain, folder / action)
        change("add", folder / action / "kv")
    return {action: folder / action for action in SETTINGS}


def assert_sound(path: Path) -> None:
    model = tiny()
    with open_store(path, model) as store:
        for row in store.prefixes():
            ids = store.prefix_ids(row)
            given = ask(store, model, ids, QUESTION)
            assert given.stats.reused_tokens == len(ids)
            assert worst(given, model, ids, QUESTION) <= 1e-4
        # Between two renames a sidecar may be another than the catalog means: absent, not wrong.
        for node in store.nodes():
            for kind in ("sketch", "heads"):
                store.sidecar(store.node(node.node_id), kind)
        assert store.verify().bad == []


def assert_done(action: str, path: Path) -> None:
    with open_store(path, tiny()) as store:
        specs = SETTINGS[action].specs
        found = {(row.node_id, row.kind, row.detail) for row in store.probe_rows()}
        nodes = [row.node_id for row in store.nodes()]
        assert found == {
            (name, kind, spec.detail) for name in nodes for kind, spec in specs.items()
        }
        assert store.verify().bad == []
        store.gc()
        here = {p for p in (path / "nodes").glob("*/*/*") if p.is_dir()}
        assert len(here) == len(nodes) * (1 + len(specs)), "something nobody needs is left"


@pytest.mark.slow
@pytest.mark.parametrize("action", SETTINGS)
def test_a_change_of_probe_layouts_killed_at_any_step_can_be_run_again(
    action, forking, prepared: dict[str, Path], tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(test_kill, "run_and_die", run_and_die)
    whole = tmp_path / "whole"
    shutil.copytree(prepared[action], whole)
    total = test_kill.attempt(forking, action, whole, -1)
    assert total is not None
    assert_done(action, whole / "kv")
    for step in sorted({total * i // KILLS for i in range(KILLS)}):
        folder = tmp_path / str(step)
        shutil.copytree(prepared[action], folder)
        assert test_kill.attempt(forking, action, folder, step) is None
        assert_sound(folder / "kv")
        assert test_kill.attempt(forking, action, folder, -1) is not None
        assert_done(action, folder / "kv")
        shutil.rmtree(folder)
