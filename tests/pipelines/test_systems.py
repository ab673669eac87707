"""Systems: the table, toggles, chunk sizes, and the engine's values that follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipelines.systems import SYSTEMS, TOGGLES, make_system
from store.errors import InvalidValueError
from store.files import ORDERS
from store.itf.options import ATTEND, EVIDENCE, SparseOptions
from store.tier.policy import POLICIES


def test_the_table_holds_the_published_systems_and_ours():
    assert list(SYSTEMS) == [
        "recompute",
        "as-like",
        "as-h2o-lru",
        "as-h2o-lfu",
        "impress-paper",
        "impress",
    ]
    for name, one in SYSTEMS.items():
        assert one.name == name
        assert one.evidence in EVIDENCE
        assert one.attend in ATTEND
        assert one.policy in POLICIES
        assert one.order in ORDERS


def test_baselines_use_the_published_chunks_and_the_original_order():
    for name in ("as-like", "as-h2o-lru", "as-h2o-lfu"):
        one = SYSTEMS[name]
        assert (one.chunk_tokens, one.order, one.probe, one.reuse) == (64, "original", "none", True)
    assert not SYSTEMS["recompute"].reuse
    policies = {name: SYSTEMS[name].policy for name in ("as-h2o-lru", "as-h2o-lfu", "impress")}
    assert policies == {"as-h2o-lru": "lru", "as-h2o-lfu": "lfu", "impress": "score"}


def test_the_toggles_lead_from_the_strongest_baseline_to_the_published_system():
    made = make_system("as-h2o-lfu+itf+reorder+score")
    assert replace(made, name="impress-paper") == SYSTEMS["impress-paper"]
    itf = make_system("as-h2o-lfu+itf")
    assert (itf.evidence, itf.probe, itf.order, itf.policy) == ("heads", "heads", "original", "lfu")
    assert make_system("as-h2o-lfu+reorder").order == "importance"


def test_the_toggles_and_the_chunk_size_lead_on_to_ours():
    name = "impress-paper+sketch+loaded+ahead@16"
    assert make_system(name) == replace(SYSTEMS["impress"], name=name, evidence="sketch")


def test_policies_can_be_exchanged_and_only_one_of_them_ages():
    policies = [make_system(f"impress{toggle}") for toggle in ("", "+lfu", "+lru", "+aged")]
    assert [one.policy for one in policies] == ["score", "lfu", "lru", "score"]
    assert [one.half_life is None for one in policies] == [True, True, True, False]


def test_the_chunk_size_of_any_stored_layout_can_be_chosen():
    assert make_system("as-like@16").chunk_tokens == 16
    assert make_system(" as-h2o-lfu+itf@128 ").chunk_tokens == 128
    assert make_system(" as-h2o-lfu+itf@128 ").name == "as-h2o-lfu+itf@128"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("impres", r"'impres' is not known; use one of recompute, as-like, .*\+itf, \+reorder"),
        ("", "'' is not known"),
        ("as-like@", "'as-like@' is not known"),
        ("as-h2o-lfu+fast", "'fast' .* is not known; use one of itf, reorder, score, lfu"),
        ("recompute+score", "no effect on 'recompute', which uses nothing that is stored"),
        ("as-like+itf", "no effect on 'as-like', which loads everything"),
        ("impress+score", "changes nothing"),
        ("impress@8", "chunks of '8' tokens .* use 16 to 256"),
        ("impress@x", "chunks of 'x' tokens"),
        ("recompute@16", "a chunk size has no effect on 'recompute'"),
    ],
)
def test_what_is_not_known_or_has_no_effect_is_named(text: str, says: str):
    with pytest.raises(InvalidValueError, match=says):
        make_system(text)


def test_options_take_the_rest_from_a_base():
    base = SparseOptions(alpha=1.5, sets="per-head", rows="all", retention=0.9, seed=4)
    given = SYSTEMS["impress-paper"].options(0.25, base)
    expected = replace(base, retention=0.25, evidence="heads", attend="selected", ahead=False)
    assert given == expected
    assert SYSTEMS["impress"].options(0.5) == SparseOptions(retention=0.5)


def test_systems_that_load_everything_know_no_retention():
    for name in ("recompute", "as-like"):
        assert SYSTEMS[name].options(0.25, SparseOptions(alpha=1.5)) == SparseOptions(alpha=1.5)


def test_every_toggle_changes_some_system():
    for name in TOGGLES:
        base = "as-h2o-lru" if name == "lfu" else "as-h2o-lfu"
        assert make_system(f"{base}+{name}") != replace(SYSTEMS[base], name=f"{base}+{name}")
