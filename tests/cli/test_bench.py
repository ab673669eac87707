"""`impress bench`: options, the documented object, the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run


def test_bench_disk_prints_the_documented_object_and_leaves_nothing(
    run: Run, tmp_path: Path
) -> None:
    done = run("bench", "disk", "--size", "1MB", "--dir", tmp_path, "--json")
    assert done.code == 0
    value = done.json
    assert value["schema"] == "impress.bench-disk/1"
    assert all(
        set(row) == {"kind", "request_bytes", "depth", "bytes_per_s"} for row in value["rows"]
    )
    found = {(row["kind"], row["request_bytes"], row["depth"]) for row in value["rows"]}
    sizes, depths = (24 << 10, 256 << 10), (1, 4, 16)
    kinds = ("sequential", "random")
    assert found == {(kind, size, depth) for kind in kinds for size in sizes for depth in depths}
    assert {"kind", "bytes_per_s", "share_of_ceiling", "share_of_preadv"} <= set(value["reader"])
    assert {"versions", "environment", "ceiling", "direct", "notes"} <= set(value)
    assert value["environment"]["page_cache"] == ("bypassed" if value["direct"] else "used")
    assert list(tmp_path.iterdir()) == []


def test_bench_disk_on_a_store_reads_its_node_and_works_in_its_folder(
    run: Run, built: Path
) -> None:
    before = sorted(path.name for path in built.iterdir())
    value = run("bench", "disk", "--size", "1MB", "--store", built, "--json").json
    (node,) = run("inspect", "--store", built, "--json").json["nodes"]
    assert value["folder"] == str(built)
    assert (value["reader"]["kind"], value["reader"]["tokens"]) == ("node", node["length"])
    assert sorted(path.name for path in built.iterdir()) == before


def test_bench_disk_shows_a_table_the_ceiling_and_what_limits_the_figures(
    run: Run, tmp_path: Path
) -> None:
    done = run("bench", "disk", "--size", "1MB", "--dir", tmp_path, "--io", "buffered")
    assert done.code == 0
    for text in ("16 in flight", "256 KiB", "ceiling", "of bare preadv", "a synthetic node"):
        assert text in done.out
    assert "page cache, as asked" in done.err
    assert "left out" in done.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--size", "1kB"], "--size"),
        (["--size", "much"], "not a size"),
        (["--dir", "nowhere"], "--dir"),
        (["--io", "mmap"], "'buffered'"),
    ],
)
def test_wrong_values_are_one_line_and_exit_2(run: Run, arguments: list[str], says: str) -> None:
    done = run("bench", "disk", *arguments)
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert says in done.err


def test_a_missing_store_and_a_full_disk_fail_with_one_line(run: Run, tmp_path: Path) -> None:
    missing = run("bench", "disk", "--store", tmp_path / "none")
    full = run("bench", "disk", "--dir", tmp_path, "--size", "9000TB")
    assert (missing.code, full.code) == (1, 1)
    assert "no store at" in missing.err
    assert "free" in full.err
    assert len(full.err.splitlines()) == 1


def test_bench_without_a_measurement_lists_them(run: Run) -> None:
    done = run("bench")
    assert done.code == 0
    assert "\n  disk" in done.out
