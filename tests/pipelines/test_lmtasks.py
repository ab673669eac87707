"""Which single tasks a name stands for: groups in groups, and members that can't be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is an optional extra", exc_type=ImportError)

from pipelines.sources import lmtasks
from pipelines.sources.lmtasks import task_names
from store.errors import SourceError
from tests.pipelines.small_tasks import write_tasks

INLINE = """group: outer
task:
  - group: first
    group_alias: First
    aggregate_metric_list: [{metric: acc, weight_by_size: true}]
    task:
      - copa
      - group: deeper
        task: [rte]
  - task: telling
    task_alias: told
  - both
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tasks of ours; lm-eval's own index is of two tasks here."""
    import lm_eval.tasks

    really = lm_eval.tasks.TaskManager
    own = Path(lm_eval.tasks.__file__).parent / "super_glue"

    def few(include_path: str | None = None, **_: Any) -> Any:
        return really(include_path=include_path or str(own / "copa"), include_defaults=False)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", few)
    lmtasks._own_index.cache_clear()
    root = write_tasks(tmp_path, [])
    (root / "rte.yaml").write_text("task: rte\noutput_type: multiple_choice\n", encoding="utf-8")
    return root


def group(folder: Path, text: str) -> Path:
    (folder / "group.yaml").write_text(text, encoding="utf-8")
    return folder


def test_groups_that_are_written_inside_a_group_stand_for_their_tasks(folder: Path):
    assert task_names("outer", group(folder, INLINE)) == ["copa", "rte", "telling"]


@pytest.mark.parametrize(
    ("member", "message"),
    [
        ("- nowhere", "group 'outer' has a member 'nowhere' that is no task"),
        ("- group: first\n    task: [nowhere]", "group 'first' has a member 'nowhere'"),
        ("- group: nowhere", "member 'nowhere'"),
        ("- dataset_path: anli", r"member None \(dataset_path\)"),
        (
            "- task: copa\n    num_fewshot: 5\n    doc_to_text: x",
            r"group 'outer' changes settings of its member 'copa' \(doc_to_text, num_fewshot\)",
        ),
        ("- group: first\n    task: [copa]\n    include: x", r"member 'first' \(include\)"),
    ],
)
def test_members_that_cannot_be_used_are_named(folder: Path, member: str, message: str):
    text = f"group: outer\ntask:\n  - telling\n  {member}\n"
    with pytest.raises(SourceError, match=message):
        task_names("outer", group(folder, text))


def test_a_group_in_itself_and_an_empty_one_are_no_endless_search(folder: Path):
    text = "group: outer\ntask:\n  - outer\n  - telling\n"
    assert task_names("outer", group(folder, text)) == ["telling"]
    with pytest.raises(SourceError, match="has no tasks in it"):
        task_names("outer", group(folder, "group: outer\ntask:\n  - outer\n"))
