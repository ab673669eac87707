"""kill -9 at every step of every change leaves the state before or after, and loses nothing."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipelines.attention import prefill
from pipelines.models import LoadedModel
from store.engine import PrefixStore, rebuild_store
from tests.helpers import ask, ids_of, new_store, open_store, put, shuffle, worst
from tests.tiny import make_tiny

#: At how many of the steps that a change takes it is killed, where not at 8.
KILLS = {"reorder": 20}
QUESTION = ids_of(4, seed=50)
FIRST, SECOND = ids_of(60), ids_of(60)
SECOND[25:] = ids_of(35, seed=9)


@functools.cache
def tiny() -> LoadedModel:
    """The model; not made on import, as processes are forked from one that has no threads."""
    return make_tiny("gqa")


def insert(path: Path) -> None:
    """Insert a prefix that splits the one that is there."""
    kv = np.load(path.parent / "kv.npy")
    with PrefixStore.open(path) as store:
        store.insert(SECOND, lambda layer: (kv[layer, 0], kv[layer, 1]), 0, name="second")


def remove(path: Path) -> None:
    with PrefixStore.open(path) as store:
        if any(row.name == "other" for row in store.prefixes()):
            store.remove(store.prefix("other"))


def replace(path: Path) -> None:
    with PrefixStore.open(path) as store:
        name = store.prefix("first").node_id
        store.replace(name, store.node_rows(name).layer)


def reorder(path: Path) -> None:
    with PrefixStore.open(path) as store:
        shuffle(store)


def repair(path: Path) -> None:
    rebuild_store(path)


ACTIONS = {action.__name__: action for action in (insert, remove, replace, reorder, repair)}


def run_and_die(action: str, path: Path, step: int, counted: Path) -> None:
    """In a process of its own: kill it before step ``step``; count the steps if it lives."""
    from store.index.transaction import Transaction

    taken = 0

    def stepping(real: Callable) -> Callable:
        def wrapped(*args, **options):
            nonlocal taken
            if taken == step:
                os.kill(os.getpid(), signal.SIGKILL)
            taken += 1
            return real(*args, **options)

        return wrapped

    for owner, names in (
        (os, ("fsync", "pwrite", "rename", "rmdir", "link", "mkdir", "ftruncate")),
        (Transaction, ("put_node", "put_nodes", "put_prefix", "retire", "delete_node", "end")),
        (shutil, ("rmtree",)),
    ):
        for name in names:
            setattr(owner, name, stepping(getattr(owner, name)))
    ACTIONS[action](path)
    counted.write_text(str(taken))


@pytest.fixture(scope="module")
def forking():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.store.test_kill"])
    return context


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A store with two prefixes, and beside it the KV of the one to insert."""
    model, folder = tiny(), tmp_path_factory.mktemp("kill")
    with new_store(folder / "kv", model) as store:
        put(store, model, FIRST, "first")
        put(store, model, ids_of(40, seed=3), "other")
        run, match = store.begin(SECOND, max_new_tokens=0, load=False)
        with run:
            prefill(model.model, run, SECOND, logits=0)
            layers = range(model.shape.num_layers)
            kv = np.stack([np.stack(run.kv(layer, 0, len(SECOND))) for layer in layers])
        assert match.matched_len == 0
    np.save(folder / "kv.npy", kv)
    return folder


def attempt(forking, action: str, folder: Path, step: int) -> int | None:
    """Steps taken, or None where it was killed."""
    counted = folder / "counted"
    counted.unlink(missing_ok=True)
    child = forking.Process(target=run_and_die, args=(action, folder / "kv", step, counted))
    child.start()
    child.join(60)
    assert child.exitcode in (0, -signal.SIGKILL), child.exitcode
    return int(counted.read_text()) if child.exitcode == 0 else None


def assert_whole(path: Path) -> None:
    """The store is sound, and every prefix it lists is there and right."""
    model = tiny()
    with open_store(path, model) as store:
        assert store.verify().bad == []
        rows = store.prefixes()
        assert "first" in {row.name for row in rows}
        for row in rows:
            ids = store.prefix_ids(row)
            given = ask(store, model, ids, QUESTION)
            assert given.stats.reused_tokens == len(ids)
            assert worst(given, model, ids, QUESTION) <= 1e-4
        store.gc()
        groups = {path for path in (path / "nodes").glob("*/*/*") if path.is_dir()}
        assert len(groups) == len(store.nodes()), "something nobody needs is left"


@pytest.mark.slow
@pytest.mark.parametrize("action", ACTIONS)
def test_a_change_killed_at_any_step_is_done_or_not_done(
    action, forking, prepared: Path, tmp_path: Path
):
    whole = tmp_path / "whole"
    shutil.copytree(prepared, whole)
    total = attempt(forking, action, whole, -1)
    assert total is not None
    assert total >= 4
    assert_whole(whole / "kv")
    kills = KILLS.get(action, 8)
    for number, step in enumerate(random.Random(total).sample(range(total), min(kills, total))):
        folder = tmp_path / str(number)
        shutil.copytree(prepared, folder)
        assert attempt(forking, action, folder, step) is None, f"step {step} of {total} passed"
        if action == "repair" and not (folder / "kv/catalog.sqlite").exists():
            pytest.fail("there was a moment without a catalog")
        assert_whole(folder / "kv")
        assert attempt(forking, action, folder, -1) is not None
        assert_whole(folder / "kv")
        shutil.rmtree(folder)
