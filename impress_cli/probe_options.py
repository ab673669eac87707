"""Options that say which probe layouts a store keeps, shared by `build-store` and `reorder`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from store.errors import InvalidValueError

if TYPE_CHECKING:
    from store.probes import ProbeSettings
    from store.types import KVShape


class Probe(StrEnum):
    """Probe layouts that nodes can have beside their KV."""

    NONE = "none"
    HEADS = "heads"
    SKETCH = "sketch"
    BOTH = "both"


SketchBitsOption = Annotated[
    int | None,
    typer.Option(
        "--sketch-bits",
        metavar="2|4",
        help="Bits per value of the sketch. Default: the store's own, else 2.",
        show_default=False,
    ),
]
ProbeHeadsOption = Annotated[
    str | None,
    typer.Option(
        "--probe-heads",
        metavar="auto|N|LIST",
        help="KV heads to probe: the first N, a list such as 0,2,5, or auto (chosen per layer on "
        "stored prefixes). Default: the store's own, else the first 3, fewer for models with few "
        "KV heads.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class ProbeChoice:
    """The options as they were typed; None where they were left out."""

    probe: Probe | None = None
    bits: int | None = None
    heads: str | None = None

    @property
    def given(self) -> bool:
        """Whether any was typed."""
        return self != ProbeChoice()

    def text(self) -> str:
        """The options as a command line has them."""
        named = {"--probe": self.probe, "--sketch-bits": self.bits, "--probe-heads": self.heads}
        return " ".join(f"{name} {value}" for name, value in named.items() if value is not None)

    def settings(self, shape: KVShape, current: ProbeSettings) -> ProbeSettings:
        """What a store is to keep; what was left out stays as it is. Raises InvalidValueError."""
        from store.probes import ProbeSettings

        probe = self.probe or probe_of(current)
        sketch, heads = probe in (Probe.SKETCH, Probe.BOTH), probe in (Probe.HEADS, Probe.BOTH)
        for option, value, used, kind in (
            ("--sketch-bits", self.bits, sketch, "sketch"),
            ("--probe-heads", self.heads, heads, "heads"),
        ):
            if value is not None and not used:
                raise InvalidValueError(
                    f"{option} {value} has no effect with --probe {probe}; use --probe {kind} or "
                    "both"
                )
        kept = current.sketch_bits or 2
        bits = (kept if self.bits is None else self.bits) if sketch else None
        chosen, calibrate = self._heads(shape, current) if heads else (None, None)
        settings = ProbeSettings(bits, chosen, calibrate)
        settings.check(shape)
        return settings

    def _heads(
        self, shape: KVShape, current: ProbeSettings
    ) -> tuple[tuple[tuple[int, ...], ...] | None, int | None]:
        """Heads of each layer or, with ``auto``, how many are to be chosen."""
        from pipelines.probes import default_head_count, first_heads

        if self.heads is None:
            if current.heads is not None or current.calibrate is not None:
                return current.heads, current.calibrate
            return first_heads(shape), None
        if self.heads == "auto":
            return None, default_head_count(shape)
        try:
            numbers = tuple(sorted(int(part) for part in self.heads.split(",")))
        except ValueError as error:
            raise InvalidValueError(
                f"--probe-heads {self.heads!r} is not understood; use auto, a number of heads, or "
                "a list such as 0,2,5"
            ) from error
        if "," in self.heads:
            return (numbers,) * shape.num_layers, None
        if not 1 <= numbers[0] <= shape.num_kv_heads:
            raise InvalidValueError(
                f"--probe-heads {self.heads} is out of range; use 1 to {shape.num_kv_heads}, the "
                "KV heads of the model"
            )
        return first_heads(shape, numbers[0]), None


def probe_of(settings: ProbeSettings) -> Probe:
    """Return the value of ``--probe`` that a setting stands for."""
    heads = settings.heads is not None or settings.calibrate is not None
    if settings.sketch_bits is not None:
        return Probe.BOTH if heads else Probe.SKETCH
    return Probe.HEADS if heads else Probe.NONE


def probe_json(settings: ProbeSettings) -> dict[str, Any]:
    """JSON object of a setting: an entry per probe layout."""
    return {kind: spec.to_json() for kind, spec in settings.specs.items()}
