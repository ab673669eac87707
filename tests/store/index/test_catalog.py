from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from store.errors import (
    CatalogError,
    FormatVersionError,
    PrefixNotFoundError,
    ReadOnlyStoreError,
    StoreError,
    StoreLockedError,
)
from store.index import connection as connection_module
from store.index.catalog import Catalog, GarbageRow, NodeRow, PrefixRow, QuarantineRow
from store.index.connection import filesystem_type, is_network

REPO = Path(__file__).parents[3]


def node(name: str, parent: str | None = None, start: int = 0, generation: int = 0) -> NodeRow:
    return NodeRow(name, parent, start, 8, b"\1\0\0\0" * 8, "d" + name, generation, "g" + name, 100)


def prefix(prefix_id: str, name: str, node_id: str = "a", length: int = 8) -> PrefixRow:
    return PrefixRow(prefix_id, name, length, node_id, "digest", 12.5, "{}")


def bad(node_id: str, chunk: int, reason: str = "corrupt") -> QuarantineRow:
    return QuarantineRow(node_id, 0, "k", 3, chunk, 16 * chunk, reason, 1.5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.sqlite"


@pytest.fixture
def catalog(path: Path) -> Iterator[Catalog]:
    with Catalog.open(path, readonly=False, create=True) as catalog:
        yield catalog


@pytest.fixture
def filled(catalog: Catalog) -> Catalog:
    with catalog.transaction() as txn:
        txn.put_node(node("a"))
        txn.put_prefix(prefix("abcd1111", "docs/a.txt"))
        txn.put_prefix(prefix("abcd2222", "docs/b.txt"))
        txn.put_prefix(prefix("ef012345", "essay"))
    return catalog


def test_what_is_put_comes_back_after_reopening(catalog: Catalog, path: Path) -> None:
    with catalog.transaction() as txn:
        txn.put_nodes([node("b", "a", 8), node("a")])
        txn.put_prefix(prefix("abcd1111", "essay", "b", 16))
        txn.quarantine(bad("b", 2))
        txn.retire("a", 4)
        txn.tombstone("gone", 7)
        txn.set_meta("key", "value")
        txn.put_verdict('{"first": 1}', created=1.0)
        txn.put_verdict('{"second": 2}', created=2.0)
    catalog.close()
    with Catalog.open(path, readonly=True) as again:
        assert again.epoch == 1
        assert again.nodes() == [node("a"), node("b", "a", 8)]
        assert again.prefixes() == [prefix("abcd1111", "essay", "b", 16)]
        assert again.quarantined() == [bad("b", 2)]
        assert again.garbage() == [GarbageRow("a", 4, 1)]
        assert (again.tombstoned_generation("gone"), again.tombstoned_generation("a")) == (7, -1)
        assert again.tombstones() == {"gone": 7}
        assert (again.meta("key"), again.meta("other")) == ("value", None)
        assert again.verdicts() == ['{"first": 1}', '{"second": 2}']


def test_a_split_moves_children_and_prefixes_to_the_right_half(catalog: Catalog) -> None:
    with catalog.transaction() as txn:
        txn.put_nodes([node("old"), node("child", "old", 8)])
        for name, length in (("short", 3), ("edge", 4), ("long", 5)):
            txn.put_prefix(prefix(f"{name}-id", name, "old", length))
        txn.put_prefix(prefix("other-id", "other", "child", 16))
    with catalog.transaction() as txn:
        txn.reassign_prefixes("old", 4, "upper", "lower")
        txn.reparent("old", "lower")
        txn.delete_node("old")
        txn.put_nodes([node("lower", "upper", 4), node("upper")])
    where = {row.name: row.node_id for row in catalog.prefixes()}
    assert where == {"short": "upper", "edge": "upper", "long": "lower", "other": "child"}
    parents = {row.node_id: row.parent_id for row in catalog.nodes()}
    assert parents == {"upper": None, "lower": "upper", "child": "lower"}


def test_an_exception_undoes_the_whole_transaction(filled: Catalog) -> None:
    before = (filled.epoch, filled.nodes(), filled.prefixes())

    def fail() -> None:
        with filled.transaction() as txn:
            txn.put_node(node("b", "a", 8))
            txn.delete_prefix("ef012345")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert (filled.epoch, filled.nodes(), filled.prefixes()) == before
    with filled.transaction() as txn:
        txn.put_node(node("b", "a", 8))
    assert filled.epoch == before[0] + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda txn: txn.delete_node("a"),
        lambda txn: txn.put_node(node("b", "missing", 8)),
        lambda txn: txn.put_prefix(prefix("0123", "lost", "missing")),
    ],
    ids=["node of a prefix", "parent of a node", "node of a new prefix"],
)
def test_a_transaction_that_would_break_a_link_is_undone(
    filled: Catalog, change: Callable[..., None]
) -> None:
    before = (filled.epoch, filled.nodes(), filled.prefixes())

    def run() -> None:
        with filled.transaction() as txn:
            change(txn)

    with pytest.raises(CatalogError, match="none of it was written"):
        run()
    assert (filled.epoch, filled.nodes(), filled.prefixes()) == before


def test_a_transaction_is_dead_after_its_block(catalog: Catalog) -> None:
    with catalog.transaction() as txn:
        pass
    with pytest.raises(AssertionError, match="has ended"):
        txn.put_node(node("a"))
    assert catalog.nodes() == []


def test_replacing_a_generation_changes_only_what_belongs_to_it(filled: Catalog) -> None:
    with filled.transaction() as txn:
        txn.replace_generation("a", 3, "digest-3", 222)
        txn.retire("a", 0)
    assert filled.nodes() == [node("a")._replace(generation=3, group_digest="digest-3", bytes=222)]
    with filled.transaction() as txn:
        txn.forget_garbage("a", 0)
    assert filled.garbage() == []


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda txn: txn.replace_generation("b", 1, "", 0), CatalogError),
        (lambda txn: txn.delete_node("b"), CatalogError),
        (lambda txn: txn.delete_prefix("abcd"), PrefixNotFoundError),
    ],
    ids=["replace_generation", "delete_node", "delete_prefix"],
)
def test_changing_what_is_not_there_is_an_error(
    filled: Catalog, change: Callable[..., None], error: type[StoreError]
) -> None:
    def run() -> None:
        with filled.transaction() as txn:
            change(txn)

    with pytest.raises(error):
        run()


def test_a_lower_tombstone_does_not_hide_a_higher_one(catalog: Catalog) -> None:
    for generation in (2, 5, 3):
        with catalog.transaction() as txn:
            txn.tombstone("a", generation)
    assert catalog.tombstoned_generation("a") == 5


def test_quarantine_holds_one_row_per_chunk_and_goes_with_its_node(filled: Catalog) -> None:
    with filled.transaction() as txn:
        txn.put_node(node("b", "a", 8))
        for row in (bad("a", 1), bad("a", 1, "missing"), bad("a", 2), bad("b", 1)):
            txn.quarantine(row)
    assert filled.quarantined() == [bad("a", 1, "missing"), bad("a", 2), bad("b", 1)]
    with filled.transaction() as txn:
        txn.clear_quarantine("a")
        txn.delete_node("b")
    assert filled.quarantined() == []


@pytest.mark.parametrize("key", ["ef012345", "essay", "ef01", "EF01"])
def test_a_prefix_is_found_by_id_by_name_and_by_the_beginning_of_its_id(
    filled: Catalog, key: str
) -> None:
    assert filled.prefix(key).prefix_id == "ef012345"


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("abcd", r"abcd1111 \(docs/a.txt\), abcd2222 \(docs/b.txt\); give more"),
        ("ef0", r"4 or more characters"),
        ("esay", r"did you mean ef012345 \(essay\)\?"),
        ("%%%%", r"4 or more characters"),
        ("", r"4 or more characters"),
    ],
)
def test_a_key_that_fits_no_single_prefix_gets_a_hint(
    filled: Catalog, key: str, message: str
) -> None:
    with pytest.raises(PrefixNotFoundError, match=message):
        filled.prefix(key)


def test_an_ambiguous_key_lists_three_candidates(filled: Catalog) -> None:
    with filled.transaction() as txn:
        for digit in "3456":
            txn.put_prefix(prefix(f"abcd{digit}", "same name"))
    with pytest.raises(PrefixNotFoundError, match="several") as caught:
        filled.prefix("abcd")
    assert str(caught.value).count("abcd") == 1 + 3
    with pytest.raises(PrefixNotFoundError, match="fits several"):
        filled.prefix("same name")


def test_a_store_without_prefixes_says_so(catalog: Catalog) -> None:
    with pytest.raises(PrefixNotFoundError, match="build-store"):
        catalog.prefix("abcd")


def test_another_connection_sees_a_commit_once(filled: Catalog, path: Path) -> None:
    with Catalog.open(path, readonly=True) as reader:
        assert not reader.changed()
        with filled.transaction() as txn:
            txn.put_node(node("b", "a", 8))
        assert reader.changed()
        assert not reader.changed()
        assert len(reader.nodes()) == 2


def test_own_commits_and_counters_are_no_change(filled: Catalog, path: Path) -> None:
    with Catalog.open(path, readonly=False) as other:
        with filled.transaction() as txn:
            txn.set_meta("key", "own")
        assert not filled.changed()
        assert other.changed()
        other.add_counters({"queries": 1})
        assert not filled.changed()


def test_a_foreign_commit_before_an_own_one_is_not_lost(filled: Catalog, path: Path) -> None:
    with Catalog.open(path, readonly=False) as other:
        with other.transaction() as txn:
            txn.set_meta("key", "foreign")
        with filled.transaction() as txn:
            txn.set_meta("key", "own")
        assert filled.changed()
        assert not filled.changed()


def test_reads_of_a_snapshot_see_one_commit(filled: Catalog, path: Path) -> None:
    with Catalog.open(path, readonly=True) as reader:
        with reader.snapshot():
            before = reader.epoch
            with filled.transaction() as txn:
                txn.put_node(node("b", "a", 8))
            assert (reader.epoch, len(reader.nodes())) == (before, 1)
        assert (reader.epoch, len(reader.nodes())) == (before + 1, 2)


def test_counters_add_up_and_leave_the_epoch_alone(filled: Catalog, path: Path) -> None:
    before = filled.epoch
    filled.add_counters({"queries": 1, "hit_tokens": 10.5})
    with Catalog.open(path, readonly=False) as other:
        other.add_counters({"queries": 2})
    assert filled.counters() == {"queries": 3.0, "hit_tokens": 10.5}
    assert filled.epoch == before


def test_threads_share_one_catalog(catalog: Catalog) -> None:
    def add(name: str) -> None:
        for step in range(10):
            with catalog.transaction() as txn:
                txn.put_node(node(f"{name}{step}"))

    threads = [threading.Thread(target=add, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (catalog.epoch, len(catalog.nodes())) == (30, 30)


def test_a_read_only_catalog_refuses_changes(filled: Catalog, path: Path) -> None:
    with Catalog.open(path, readonly=True) as reader:
        with pytest.raises(ReadOnlyStoreError, match=str(path)), reader.transaction():
            pass
        with pytest.raises(ReadOnlyStoreError):
            reader.add_counters({"queries": 1})
        assert reader.journal_note is None


def test_a_second_writer_is_told_to_wait(
    filled: Catalog, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "BUSY_S", 0.01)
    with (
        Catalog.open(path, readonly=False) as other,
        filled.transaction(),
        pytest.raises(StoreLockedError, match="try again"),
        other.transaction(),
    ):
        pass


@pytest.mark.parametrize("readonly", [True, False])
@pytest.mark.parametrize("content", [None, b"", b"not a database " * 300])
def test_a_missing_or_damaged_file_names_the_path_and_the_repair(
    path: Path, readonly: bool, content: bytes | None
) -> None:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CatalogError, match=f"{path}.*impress repair --store {path.parent}"):
        Catalog.open(path, readonly=readonly)


def test_damage_met_while_reading_names_the_repair(filled: Catalog, path: Path) -> None:
    with filled.transaction() as txn:
        txn.put_nodes([node(f"n{index:04}") for index in range(2000)])
    filled.close()
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * (size - size // 2))
    with (
        Catalog.open(path, readonly=True) as damaged,
        pytest.raises(CatalogError, match="impress repair"),
    ):
        damaged.nodes()


def test_a_catalog_of_another_version_is_refused_with_both_versions(path: Path) -> None:
    Catalog.open(path, readonly=False, create=True).close()
    raw = sqlite3.connect(path)
    raw.execute("UPDATE catalog SET version = 9")
    raw.commit()
    raw.close()
    with pytest.raises(FormatVersionError, match=r"version 9.*version 1"):
        Catalog.open(path, readonly=True)


def test_creating_a_catalog_that_exists_keeps_its_rows(filled: Catalog, path: Path) -> None:
    with Catalog.open(path, readonly=False, create=True) as again:
        assert again.nodes() == [node("a")]


KILLED = """
import sys, time
from tests.store.index.test_catalog import Catalog, Path, node
catalog = Catalog.open(Path(sys.argv[1]), readonly=False)
with catalog.transaction() as txn:
    txn.delete_prefix("ef012345")
    txn.put_nodes(node(f"n{index}", "a", 8) for index in range(int(sys.argv[2])))
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("rows", [1, 30_000], ids=["in memory", "spilled to the journal"])
def test_a_process_killed_in_a_transaction_leaves_the_old_state(
    filled: Catalog, path: Path, rows: int
) -> None:
    before = (filled.epoch, filled.nodes(), filled.prefixes())
    filled.close()
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path), str(rows)], stdout=subprocess.PIPE, cwd=REPO
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGKILL)
    with Catalog.open(path, readonly=False) as after:
        assert (after.epoch, after.nodes(), after.prefixes()) == before
        with after.transaction() as txn:
            txn.put_node(node("b", "a", 8))


@pytest.fixture
def locked_folder() -> Iterator[Path]:
    """A folder that anyone may read and no one may write, with the catalog of a closed store."""
    # Not tmp_path: pytest keeps other users out of the folders above it.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            Catalog.open(folder / "catalog.sqlite", readonly=False, create=True) as catalog,
            catalog.transaction() as txn,
        ):
            txn.put_node(node("a"))
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)


# In a process of its own, because permissions don't count for root: it gives up its rights.
READ_LOCKED = """
import os, sys
from tests.store.index.test_catalog import Catalog, Path, node
if os.geteuid() == 0:
    os.setuid(65534)
with Catalog.open(Path(sys.argv[1]), readonly=True) as catalog:
    assert catalog.nodes() == [node("a")]
    assert not catalog.changed()
    print(catalog.journal_note)
"""


def test_a_folder_that_cant_be_written_is_read_and_left_as_it_is(locked_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", READ_LOCKED, str(locked_folder / "catalog.sqlite")],
        cwd=REPO,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert "folder can't be written" in done.stdout
    assert [entry.name for entry in locked_folder.iterdir()] == ["catalog.sqlite"]


MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
tmpfs /home/me/fast tmpfs rw 0 0
sshfs /mnt/my\\040disk fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/var/kv", "ext4", False),
        ("/home/me/kv", "nfs4", True),
        ("/home/me/fast/kv", "tmpfs", False),
        ("/homestead", "ext4", False),
        ("/mnt/my disk/kv", "fuse.sshfs", True),
    ],
)
def test_the_file_system_of_a_path_is_that_of_its_longest_mount(
    path: str, kind: str, network: bool
) -> None:
    assert filesystem_type(Path(path), MOUNTS) == kind
    assert is_network(kind) is network


def test_a_network_file_system_gets_a_rollback_journal_and_a_note(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "filesystem_type", lambda path: "nfs4")
    with Catalog.open(path, readonly=False, create=True) as catalog:
        with catalog.transaction() as txn:
            txn.put_node(node("a"))
        assert catalog.journal_note is not None
        assert "nfs4" in catalog.journal_note
        assert not path.with_name("catalog.sqlite-wal").exists()


def test_a_local_file_system_gets_a_write_ahead_log(filled: Catalog, path: Path) -> None:
    assert filled.journal_note is None
    assert path.with_name("catalog.sqlite-wal").exists()
