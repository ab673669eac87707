"""Write the golden stores of the current format. Run once per format, never to fix a test.

``python -m tests.golden.make [NAME]`` from the repository's root.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from store.info import FORMAT_VERSION
from store.probes import ProbeSettings
from tests.helpers import ask, ids_of, new_store, put, shuffle
from tests.tiny import make_tiny

HERE = Path(__file__).parent


def make(
    name: str,
    *,
    codec: str = "none",
    dtype: str = "float32",
    probes: bool = False,
    reordered: bool = False,
) -> None:
    """One store of two prefixes that share a beginning."""
    path = HERE / f"format-{FORMAT_VERSION}-{name}"
    if path.exists():
        raise SystemExit(f"{path} exists; golden stores are never rewritten")
    model = make_tiny("gqa", dtype=dtype)
    first, second = ids_of(40), ids_of(60)
    second[25:] = ids_of(35, seed=9)
    with new_store(path, model, codec=codec) as store:
        if probes:
            store.set_probes(ProbeSettings(2, ((0,), (1,), (0,))))
        put(store, model, first, "first")
        put(store, model, second, "second")
        if reordered:
            shuffle(store)
        given = ask(store, model, second, ids_of(5, seed=1))
        store.gc()
    expected = {"logits": [float(x) for x in given.logits[:8]]}
    (path / "expected.json").write_text(json.dumps(expected) + "\n")
    for name in ("leases", "stats"):
        shutil.rmtree(path / name, ignore_errors=True)
    for lock in path.glob("*.lock"):
        lock.unlink()


#: Golden stores by name, in the order in which the format got them.
STORES: dict[str, dict[str, Any]] = {
    "none": {},
    "zstd": {"codec": "zstd"},
    "lz4": {"codec": "lz4"},
    "bfloat16": {"dtype": "bfloat16"},
    "probes": {"probes": True},
    "reordered": {"probes": True, "reordered": True},
}

if __name__ == "__main__":
    for name in sys.argv[1:] or STORES:
        make(name, **STORES[name])
