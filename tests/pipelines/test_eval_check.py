"""`check_tasks`: names and data are refused from files alone, and lm-eval's index is built once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is an optional extra", exc_type=ImportError)

import lm_eval.tasks

from pipelines.eval_check import check_tasks
from pipelines.sources import hub, lmtasks, taskfiles
from pipelines.sources.lmtasks import load_task, task_names
from store.errors import SourceError
from tests.pipelines.small_tasks import ROWS, WRITTEN, copa, rte, write_tasks


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return write_tasks(tmp_path)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What was indexed; lm-eval's own index, None, is of one folder here."""
    really, asked = lm_eval.tasks.TaskManager, []
    own = Path(lm_eval.tasks.__file__).parent / "super_glue" / "copa"

    def manager(include_path: str | None = None, **_: Any) -> Any:
        asked.append(include_path)
        return really(include_path=include_path or str(own), include_defaults=False)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", manager)
    return asked


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")


def test_tasks_with_their_data_pass_and_nothing_is_indexed(
    data_dir: Path, built: list[str | None]
) -> None:
    check_tasks([*ROWS, WRITTEN], data_dir=data_dir, include_path=data_dir)
    assert built == []


def test_a_name_that_no_file_has_is_refused_without_the_index(
    data_dir: Path, built: list[str | None]
) -> None:
    for names in (["rtee"], ["both", "rtee"], ["copa", "rtee"]):
        with pytest.raises(SourceError, match=r"task 'rtee' is no task.*did you mean rte\?"):
            check_tasks(names, data_dir=data_dir, include_path=data_dir)
    with pytest.raises(SourceError, match=r"'xyzzyxyzzy' is no task, group or tag of lm-eval; 'lm"):
        check_tasks(["xyzzyxyzzy"], data_dir=None, include_path=None)
    with pytest.raises(SourceError, match="did you mean telling"):
        load_task("tellin", include_path=data_dir)
    assert built == []


def test_the_index_is_built_once_for_groups_and_for_what_is_loaded(
    data_dir: Path, built: list[str | None]
) -> None:
    check_tasks(["both", "super-glue-lm-eval-v1"], data_dir=data_dir, include_path=data_dir)
    assert task_names("both", data_dir) == ["copa", WRITTEN]
    with pytest.raises(SourceError, match="'both' is a group or tag"):
        load_task("both", data_dir=data_dir, include_path=data_dir)
    assert built.count(None) == 1


def test_members_of_a_group_need_their_data_too(data_dir: Path, built: list[str | None]) -> None:
    (data_dir / WRITTEN / "validation.jsonl").unlink()
    with pytest.raises(SourceError, match=rf"{WRITTEN}: no validation\.jsonl \(found: test"):
        check_tasks(["both"], data_dir=data_dir, include_path=data_dir)
    assert built.count(None) == 1


@pytest.mark.parametrize(
    ("task", "split", "field"),
    [
        ("rte", "validation", "sentence2"),
        ("rte", "train", "sentence1"),
        (WRITTEN, "train", "answer"),
    ],
)
def test_a_row_without_a_field_that_a_template_writes_is_named(
    data_dir: Path, task: str, split: str, field: str
) -> None:
    file = data_dir / task / f"{split}.jsonl"
    rows = [ROWS[task](i) for i in range(9)]
    del rows[6][field]
    write_rows(file, rows)
    with pytest.raises(SourceError) as found:
        check_tasks([task], data_dir=data_dir, include_path=data_dir)
    assert str(found.value).startswith(f"{file}:7: no field '{field}' (there: ")
    assert f"task '{task}' needs" in str(found.value)


def test_a_field_that_a_task_can_do_without_may_be_missing(data_dir: Path) -> None:
    text = (data_dir / "telling.yaml").read_text(encoding="utf-8")
    lenient = text.replace("{{question}}", "{{question if question else hint}}")
    (data_dir / "telling.yaml").write_text(lenient, encoding="utf-8")
    check_tasks([WRITTEN], data_dir=data_dir, include_path=data_dir)
    # In a split that nothing is taken from it does not matter either.
    write_rows(data_dir / "rte" / "test.jsonl", [{"idx": 1}])
    check_tasks(["rte"], data_dir=data_dir, include_path=None)


def test_lines_and_files_that_hold_no_rows_are_named(data_dir: Path) -> None:
    file = data_dir / "copa" / "validation.jsonl"
    file.write_text("\n", encoding="utf-8")
    with pytest.raises(SourceError, match=r"validation\.jsonl: no rows; task 'copa'"):
        check_tasks(["copa"], data_dir=data_dir, include_path=None)
    for broken, says in (("[1]", "a JSON list"), ('{"premise": ', "not JSON at column")):
        file.write_text(f"{json.dumps(copa(1))}\n{broken}", encoding="utf-8")
        with pytest.raises(SourceError, match=rf"validation\.jsonl:2: {says}"):
            check_tasks(["copa"], data_dir=data_dir, include_path=None)


def test_a_folder_without_the_task_lists_what_it_has(data_dir: Path) -> None:
    with pytest.raises(SourceError) as found:
        check_tasks(["hellaswag"], data_dir=data_dir, include_path=None)
    assert f"no folder 'hellaswag' (there: {', '.join(sorted(ROWS))})" in str(found.value)
    assert "hellaswag/train.jsonl, hellaswag/validation.jsonl" in str(found.value)


def test_data_of_the_hub_is_asked_for_once_and_only_where_none_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    class Session:
        def head(self, url: str, **_: Any) -> None:
            asked.append(url)
            raise OSError("connection refused")

    hub.hub_problem.cache_clear()
    monkeypatch.setattr("huggingface_hub.get_session", Session)
    for name in ("HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    try:
        for _ in range(2):
            with pytest.raises(SourceError, match=r"\(aps/super_glue\).*connection refused"):
                check_tasks(["copa"], data_dir=None, include_path=None)
        with pytest.raises(SourceError, match="connection refused"):
            load_task("copa")
        assert len(asked) == 1
        (tmp_path / "datasets" / "aps___super_glue").mkdir(parents=True)
        check_tasks(["copa"], data_dir=None, include_path=None)
    finally:
        hub.hub_problem.cache_clear()


def test_a_task_file_that_is_no_yaml_is_left_to_lm_eval(tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text("task: odd\n\tx: [", encoding="utf-8")
    root = lmtasks.require_lm_eval("odd")
    assert taskfiles.single_task("odd", tmp_path, root) is None
    assert taskfiles.may_be_named("odd", tmp_path, root)


def test_without_lm_eval_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmtasks, "own_root", lambda: None)
    with pytest.raises(SourceError, match=r"'rte' need lm-eval.*pip install impress-kv\[eval\]"):
        check_tasks(["rte"], data_dir=None, include_path=None)


def test_rows_that_all_have_the_same_fields_are_shown_with_them(tmp_path: Path) -> None:
    (tmp_path / "copa").mkdir()
    for split in ("train", "validation"):
        write_rows(tmp_path / "copa" / f"{split}.jsonl", [rte(1), rte(2)])
    with pytest.raises(SourceError, match="has label, sentence1, sentence2; check the rows'"):
        load_task("copa", data_dir=tmp_path)
