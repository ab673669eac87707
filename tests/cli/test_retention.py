"""What a query keeps: options, what they exclude, what is said about those without effect."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from impress_cli import retention
from impress_cli.asking import lone_head, missing_evidence
from impress_cli.options import HostBudgetOption
from impress_cli.query import command
from impress_cli.retention import Choice, idle
from impress_cli.units import parse_size
from store.errors import InvalidValueError
from store.itf import options
from store.itf.options import SparseOptions
from store.run_maker import MemoryOptions
from tests.cli.conftest import Run


def test_what_can_be_typed_is_what_the_engine_knows() -> None:
    for kind, known in (
        (retention.Evidence, options.EVIDENCE),
        (retention.Attend, options.ATTEND),
        (retention.Sets, options.SETS),
        (retention.Rows, options.ROWS),
        (retention.Fallback, options.FALLBACK),
    ):
        assert tuple(kind) == known


def test_the_help_names_the_engines_defaults() -> None:
    defaults = SparseOptions()
    for name in ("evidence", "attend", "sets", "rows", "alpha", "fallback"):
        (option,) = [
            part
            for part in command.__annotations__.values()
            if f"{name.capitalize()}Option" in part
        ]
        text = " ".join(str(getattr(retention, option).__metadata__[0].help).split())
        value = getattr(defaults, name)
        assert f"{value} (default)" in text or f"Default: {value}" in text


def test_the_help_names_the_engines_host_budget() -> None:
    help_text = str(HostBudgetOption.__metadata__[0].help)
    default = help_text.split("Default: ")[1].rstrip(".")
    assert parse_size(default, "--host-budget") == MemoryOptions().host_bytes


def test_nothing_said_means_everything_is_loaded() -> None:
    assert Choice().options({}) == SparseOptions()
    assert Choice().notes({}, "auto") == []


def test_what_is_typed_wins_over_the_recipe_and_the_recipe_over_the_default() -> None:
    recipe = {"retention": 0.25, "evidence": "full", "unknown": 1}
    chosen = Choice(evidence="sketch").options(recipe)
    assert chosen == SparseOptions(retention=0.25, evidence="sketch")


def test_alpha_and_threshold_exclude_each_other() -> None:
    with pytest.raises(InvalidValueError, match=r"--alpha 0.5 and --threshold 0.7.*give one"):
        Choice(alpha=0.5, threshold=0.7)


@pytest.mark.parametrize(
    ("choice", "recipe", "plan", "says"),
    [
        ({"evidence": "full"}, {}, "auto", "evidence has no effect at retention 1.0"),
        (
            {"alpha": 0.5, "sets": "one", "retention": 1.0},
            {"retention": 0.25},
            "auto",
            "alpha and sets have no effect at retention 1.0",
        ),
        (
            {"retention": 0.25},
            {},
            "force-recompute",
            "retention has no effect when everything is recomputed",
        ),
        (
            {"retention": 0.25, "evidence": "sketch", "threshold": 0.5},
            {},
            "auto",
            "threshold has no effect with evidence sketch",
        ),
        (
            {"retention": 0.25, "evidence": "heads", "sets": "per-head"},
            {},
            "auto",
            "sets has no effect with evidence heads",
        ),
        (
            {"retention": 0.25, "evidence": "full", "rows": "all"},
            {},
            "auto",
            "rows has no effect with evidence full",
        ),
        (
            {"retention": 0.25, "evidence": "heads", "rows": "auto", "sets": "one"},
            {},
            "auto",
            "rows and sets have no effect with evidence heads",
        ),
        ({"rows": "sampled"}, {}, "auto", "rows has no effect at retention 1.0"),
        ({}, {"retention": 0.25}, "auto", "retention 0.25, as the recipe of this prefix says"),
    ],
)
def test_options_without_effect_and_a_recipes_retention_get_one_note(
    choice: dict[str, Any], recipe: dict[str, Any], plan: str, says: str
) -> None:
    (note,) = Choice(**choice).notes(recipe, plan)
    assert note.startswith(says)


@pytest.mark.parametrize(
    ("choice", "plan"),
    [
        ({"retention": 0.25, "alpha": 0.5}, "auto"),
        ({"retention": 0.25, "evidence": "heads", "threshold": 0.5}, "force-load"),
        ({"retention": 0.25, "evidence": "sketch", "rows": "all"}, "auto"),
        ({"retention": 0.25, "rows": "all"}, "auto"),
        ({}, "force-recompute"),
        ({"retention": 1.0}, "auto"),
    ],
)
def test_options_that_count_get_none(choice: dict[str, Any], plan: str) -> None:
    assert Choice(**choice).notes({}, plan) == []


def test_options_that_only_count_with_heads_are_named_where_auto_took_the_sketch() -> None:
    choice = Choice(retention=0.25, alpha=0.5, fallback="never")
    assert choice.idle("sketch") == ["alpha and fallback have no effect with evidence sketch"]
    assert choice.idle("heads") == []


def test_rows_only_count_with_the_sketch() -> None:
    choice = Choice(retention=0.25, rows="sampled")
    assert choice.idle("sketch") == []
    for evidence in ("heads", "full", "static", "random"):
        assert choice.idle(evidence) == [f"rows has no effect with evidence {evidence}"]


def test_of_several_evidences_one_that_an_option_counts_with_is_enough() -> None:
    given = ("alpha", "rows", "attend")
    assert idle(given, ["sketch", "heads"]) == []
    assert idle(given, ["sketch", "full"]) == ["alpha has no effect with evidence sketch, full"]
    assert idle(given, ["static", "full"]) == [
        "alpha and rows have no effect with evidence static, full"
    ]


@pytest.mark.parametrize(
    ("rows", "attend", "sampled"),
    [
        (None, None, True),
        (None, "selected", False),
        ("auto", "loaded", True),
        ("auto", "selected", False),
        ("all", "loaded", False),
        ("sampled", "selected", True),
    ],
)
def test_rows_are_sampled_where_whole_chunks_are_attended_to_unless_told_otherwise(
    rows: str | None, attend: str | None, sampled: bool
) -> None:
    assert Choice(rows=rows, attend=attend).options({}).sampled == sampled


def test_a_store_without_probe_data_is_named_with_the_command_that_adds_it() -> None:
    def layer(evidence: str, fell_back: bool = False) -> Any:
        return SimpleNamespace(evidence=evidence, fell_back=fell_back)

    sparse = SparseOptions(retention=0.25)

    def said(options: SparseOptions, *layers: Any, keeps: bool = False) -> str | None:
        return missing_evidence(options, layers, Path("kv"), keeps=keeps)

    assert "'impress reorder --store kv --probe sketch'" in str(said(sparse, layer("full")))
    # Naming one kind would drop the other kind of a store that keeps both.
    assert "'impress reorder --store kv'" in str(said(sparse, layer("full"), keeps=True))
    assert said(sparse, layer("full", True), layer("heads")) is None
    assert said(sparse, layer("full", True)) is None
    assert said(sparse, layer("sketch")) is None
    assert said(SparseOptions(retention=0.25, evidence="full"), layer("full")) is None
    assert said(sparse) is None


def test_agreement_that_one_probe_head_cannot_have_is_said() -> None:
    def layer(evidence: str, jaccard: float | None, fell_back: bool = False) -> Any:
        return SimpleNamespace(evidence=evidence, jaccard=jaccard, fell_back=fell_back)

    (note,) = lone_head({"alpha": 0.5, "attend": "loaded"}, [layer("heads", None)])
    assert note.startswith("alpha has no effect with one probe head")
    assert lone_head({"threshold": 0.5}, [layer("full", None, True)])
    assert lone_head({"alpha": 0.5}, [layer("heads", 0.3)]) == []
    assert lone_head({"alpha": 0.5}, [layer("sketch", None)]) == []
    assert lone_head({"attend": "loaded"}, [layer("heads", None)]) == []
    assert lone_head({"alpha": 0.5}, []) == []


def test_rows_reach_the_engine_and_are_said_to_be_idle_without_a_sketch(
    run: Run, built: Path
) -> None:
    asked = ("query", "Who lives by the pier?", "--store", built, "--prefix", "keepers")
    given = ("--retention", "0.25", "--rows", "all", "--max-new-tokens", "1", "--json")
    done = run(*asked, *given)
    assert done.json["sparse"]["rows"] == "all"
    assert "no effect" not in done.err
    assert (
        "note: rows has no effect with evidence full"
        in run(*asked, *given, "--evidence", "full").err
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--retention", "0"), ["--retention '0'", "above 0 and up to 1", "0.25"]),
        (("--retention", "1.5"), ["--retention '1.5'", "above 0 and up to 1"]),
        (("--evidence", "guess"), ["guess", "sketch", "random", "--help"]),
        (("--attend", "all"), ["all", "loaded", "selected"]),
        (("--sets", "two"), ["two", "one", "per-head"]),
        (("--rows", "some"), ["some", "auto", "all", "sampled"]),
        (("--fallback", "maybe"), ["maybe", "auto", "never", "always"]),
        (("--alpha", "-1"), ["alpha -1", "0 or more"]),
        (("--alpha", "nan"), ["alpha nan", "0 or more"]),
        (("--threshold", "1.5"), ["threshold 1.5", "from 0 to 1"]),
        (("--alpha", "0.6", "--threshold", "0.5"), ["--alpha 0.6", "--threshold 0.5", "give one"]),
        (("--host-budget", "much"), ["--host-budget 'much'", "500MB"]),
    ],
)
def test_a_wrong_value_is_refused_before_the_store_is_looked_at(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], says: list[str]
) -> None:
    done = run("query", "who?", "--store", tmp_path / "none", *arguments)
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1
    for text in says:
        assert text in done.err


def test_what_was_typed_reaches_messages_as_it_was_typed() -> None:
    chosen = retention.Choice(evidence=retention.Evidence.HEADS, attend=retention.Attend.SELECTED)
    assert repr(sorted(chosen.given().values())) == "['heads', 'selected']"
    assert repr(chosen.options({}).evidence) == "'heads'"
