"""Write the golden stores of the current format. Run once per format, never to fix a test.

``python -m tests.golden.make`` from the repository's root.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from store.info import FORMAT_VERSION
from tests.helpers import ask, ids_of, new_store, put
from tests.tiny import make_tiny

HERE = Path(__file__).parent


def make(codec: str, dtype: str) -> None:
    """One store of two prefixes that share a beginning."""
    path = HERE / f"format-{FORMAT_VERSION}-{codec if dtype == 'float32' else dtype}"
    if path.exists():
        raise SystemExit(f"{path} exists; golden stores are never rewritten")
    model = make_tiny("gqa", dtype=dtype)
    first, second = ids_of(40), ids_of(60)
    second[25:] = ids_of(35, seed=9)
    with new_store(path, model, codec=codec) as store:
        put(store, model, first, "first")
        put(store, model, second, "second")
        given = ask(store, model, second, ids_of(5, seed=1))
        store.gc()
    expected = {"logits": [float(x) for x in given.logits[:8]]}
    (path / "expected.json").write_text(json.dumps(expected) + "\n")
    for name in ("leases", "stats"):
        shutil.rmtree(path / name, ignore_errors=True)
    for lock in path.glob("*.lock"):
        lock.unlink()


if __name__ == "__main__":
    for codec in ("none", "zstd", "lz4"):
        make(codec, "float32")
    make("none", "bfloat16")
