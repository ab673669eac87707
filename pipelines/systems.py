"""Systems that are compared: each is a configuration of the one engine, by name.

Owns the table (algorithms of the paper's section on its evaluation, and ours), the toggles that
turn one system into another, and the engine's values that follow. It runs nothing.

A text such as ``as-h2o-lfu+itf+reorder@16`` is a name, toggles from left to right, and a chunk
size.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from store.errors import InvalidValueError
from store.files import IMPORTANCE, ORIGINAL
from store.itf.options import SparseOptions
from store.types import MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS

_TEXT = re.compile(r"(?P<name>[^+@]+)(?P<toggles>(?:\+[^+@]+)*)(?:@(?P<size>[^+@]+))?")


@dataclass(frozen=True, slots=True)
class System:
    """One way to answer behind a prefix.

    Parameters
    ----------
    name
        As it was given, toggles and chunk size included.
    reuse
        Whether stored KV is used at all.
    sparse
        Whether part of it is loaded; else all.
    evidence, attend
        As in `SparseOptions`; ``full`` and ``loaded`` where nothing is left out.
    policy, half_life
        Which chunks stay in memory: one of `store.tier.policy.POLICIES`, and after how many
        requests an access counts half (None: never, as published).
    ahead
        Whether chunks that past queries wanted are read before they are asked for.
    order
        How rows lie on disk: one of `store.files.ORDERS`.
    chunk_tokens, probe
        Layout of its store; ``probe`` is ``none``, ``heads`` or ``sketch``.
    """

    name: str
    reuse: bool
    sparse: bool
    evidence: str
    attend: str
    policy: str
    order: str
    chunk_tokens: int
    probe: str
    half_life: float | None = None
    ahead: bool = False

    def options(self, retention: float, base: SparseOptions | None = None) -> SparseOptions:
        """The engine's value: everything that is not the system's own comes from ``base``.

        ``retention`` counts for sparse systems alone; the others load everything.
        """
        base = base or SparseOptions()
        if not self.sparse:
            return replace(base, retention=1.0)
        return replace(
            base,
            retention=retention,
            evidence=self.evidence,
            attend=self.attend,
            ahead=self.ahead,
        )


def _system(
    name: str,
    *,
    reuse: bool = True,
    sparse: bool = True,
    evidence: str = "full",
    attend: str = "selected",
    policy: str = "lru",
    order: str = ORIGINAL,
    chunk_tokens: int = 64,
    probe: str = "none",
    ahead: bool = False,
) -> System:
    """A system, by default the baseline that reads all keys and keeps what was used last."""
    layout = (order, chunk_tokens, probe)
    return System(name, reuse, sparse, evidence, attend, policy, *layout, ahead=ahead)


#: Every system by name: the published ones as published, then ours.
SYSTEMS: dict[str, System] = {
    one.name: one
    for one in (
        _system("recompute", reuse=False, sparse=False, attend="loaded"),
        _system("as-like", sparse=False, attend="loaded"),
        _system("as-h2o-lru"),
        _system("as-h2o-lfu", policy="lfu"),
        _system("impress-paper", evidence="heads", policy="score", order=IMPORTANCE, probe="heads"),
        _system(
            "impress",
            evidence="auto",
            attend="loaded",
            policy="score",
            order=IMPORTANCE,
            chunk_tokens=16,
            probe="sketch",
            ahead=True,
        ),
    )
}

#: Requests after which an access counts half, of the toggle ``aged``.
HALF_LIFE = 100.0
#: What a toggle changes: the parts of the published system one by one, then those of ours.
TOGGLES: dict[str, Callable[[System], System]] = {
    "itf": lambda one: replace(one, evidence="heads", probe="heads"),
    "reorder": lambda one: replace(one, order=IMPORTANCE),
    "score": lambda one: replace(one, policy="score"),
    "lfu": lambda one: replace(one, policy="lfu", half_life=None),
    "lru": lambda one: replace(one, policy="lru", half_life=None),
    "aged": lambda one: replace(one, policy="score", half_life=HALF_LIFE),
    "sketch": lambda one: replace(one, evidence="sketch", probe="sketch"),
    "loaded": lambda one: replace(one, attend="loaded"),
    "ahead": lambda one: replace(one, ahead=True),
}
#: Toggles that mean something where everything is loaded.
_WITHOUT_SPARSE = ("score", "lfu", "lru", "aged")


def make_system(text: str) -> System:
    """The system that a text such as ``as-h2o-lfu+itf+reorder@16`` means.

    Raises
    ------
    InvalidValueError
        A name, toggle or chunk size that is not known, or one that changes nothing.
    """
    parts = _TEXT.fullmatch(text.strip())
    if parts is None or parts["name"] not in SYSTEMS:
        name = text if parts is None else parts["name"]
        raise InvalidValueError(
            f"system {name!r} is not known; use one of {', '.join(SYSTEMS)}, which may be followed "
            f"by toggles (+{', +'.join(TOGGLES)}) and a chunk size (@16)"
        )
    system = SYSTEMS[parts["name"]]
    for toggle in parts["toggles"].split("+")[1:]:
        system = _toggled(system, toggle, text)
    if parts["size"] is not None:
        system = _sized(system, parts["size"], text)
    return replace(system, name=text.strip())


def _toggled(system: System, toggle: str, text: str) -> System:
    if toggle not in TOGGLES:
        raise InvalidValueError(
            f"toggle {toggle!r} of system {text!r} is not known; use one of {', '.join(TOGGLES)}"
        )
    changed = TOGGLES[toggle](system)
    if not system.reuse or not (system.sparse or toggle in _WITHOUT_SPARSE):
        loads = "loads everything" if system.reuse else "uses nothing that is stored"
        raise InvalidValueError(
            f"toggle {toggle!r} has no effect on {system.name!r}, which {loads}; leave it out"
        )
    if changed == system:
        raise InvalidValueError(
            f"toggle {toggle!r} changes nothing in system {text!r}; leave it out"
        )
    return changed


def _sized(system: System, size: str, text: str) -> System:
    if not system.reuse:
        raise InvalidValueError(
            f"a chunk size has no effect on {system.name!r}, which uses nothing that is stored; "
            "leave it out"
        )
    known = size.isascii() and size.isdigit()
    if not known or not MIN_CHUNK_TOKENS <= int(size) <= MAX_CHUNK_TOKENS:
        raise InvalidValueError(
            f"chunks of {size!r} tokens in system {text!r} are not allowed; use "
            f"{MIN_CHUNK_TOKENS} to {MAX_CHUNK_TOKENS}"
        )
    return replace(system, chunk_tokens=int(size))
