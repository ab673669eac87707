"""Options that several commands share, so that they read and behave the same everywhere.

Owns their names and help texts, and turns the I/O options into the engine's values.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer

from impress_cli.units import format_bytes, parse_budget, parse_duration, parse_rate
from store.errors import InvalidValueError

if TYPE_CHECKING:
    from store.disk.io import IOOptions
    from store.engine import PrefixStore
    from store.run_maker import MemoryOptions


class Dtype(StrEnum):
    """Number formats of the model's weights and of stored KV."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Template(StrEnum):
    """Whether text is framed by the model's chat template."""

    AUTO = "auto"
    NONE = "none"


class IoMode(StrEnum):
    """How files are read."""

    DIRECT = "direct"
    BUFFERED = "buffered"


class Policy(StrEnum):
    """Which chunks stay in memory."""

    SCORE = "score"
    LRU = "lru"
    LFU = "lfu"


StoreOption = Annotated[Path, typer.Option("--store", metavar="DIR", help="Folder of the store.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of text.", show_default=False)
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Short name, hub id, folder, .gguf file, or random:SHAPE. See `impress models`.",
        show_default=False,
    ),
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        "--dtype",
        help="Number format of weights and KV. Default: the store's own, for a new store auto "
        "(bfloat16 where the device computes it natively, else float32).",
        show_default=False,
    ),
]
DeviceOption = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads", min=1, help="CPU threads for the model. Default: all.", show_default=False
    ),
]
TemplateOption = Annotated[
    Template,
    typer.Option(
        "--template",
        help="auto: frame text with the chat template of instruct models (a stored prefix keeps "
        "the framing it was stored with); none: text as it is.",
    ),
]
BandwidthOption = Annotated[
    str | None,
    typer.Option(
        "--disk-bandwidth",
        metavar="RATE",
        help="Emulate a slower disk, such as 250MB/s.",
        show_default=False,
    ),
]
LatencyOption = Annotated[
    str | None,
    typer.Option(
        "--disk-latency",
        metavar="TIME",
        help="Emulate a disk's latency per read, such as 200us.",
        show_default=False,
    ),
]
DeviceBudgetOption = Annotated[
    str | None,
    typer.Option(
        "--device-budget",
        metavar="SIZE",
        help="Most memory for KV that stays where the model runs between questions. Default: 0.",
        show_default=False,
    ),
]
HostBudgetOption = Annotated[
    str | None,
    typer.Option(
        "--host-budget",
        metavar="SIZE",
        help="Most host memory for sketches and KV that stay loaded between questions, 0 for "
        "none. Default: 1GiB.",
        show_default=False,
    ),
]
PolicyOption = Annotated[
    Policy | None,
    typer.Option(
        "--policy",
        help="Which KV stays in memory: score (default), accesses times the share that mattered; "
        "lru, used last; lfu, used most.",
        show_default=False,
    ),
]
IoOption = Annotated[
    IoMode,
    typer.Option("--io", help="direct: past the page cache where possible; buffered: through it."),
]


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """What may stay in memory between questions, in bytes; None leaves the engine's own."""

    device_bytes: int | None = None
    host_bytes: int | None = None
    policy: str | None = None
    half_life: float | None = None

    @classmethod
    def parse(cls, device: str | None, host: str | None, policy: Policy | None) -> MemorySettings:
        """Read the options' texts. Raises InvalidValueError."""
        return cls(
            None if device is None else parse_budget(device, "--device-budget"),
            None if host is None else parse_budget(host, "--host-budget"),
            None if policy is None else policy.value,
        )

    def of_system(self, name: str) -> Self:
        """Return settings where a system fills in the policy that was not said."""
        from pipelines.systems import make_system

        system = make_system(name)
        if self.policy is not None or not system.reuse:
            return self
        return replace(self, policy=system.policy, half_life=system.half_life)

    def options(self) -> MemoryOptions:
        """Return the engine's value."""
        from store.run_maker import MemoryOptions

        given = {name: value for name, value in asdict(self).items() if value is not None}
        return MemoryOptions(**given)

    def check(self, store: PrefixStore) -> None:
        """Refuse a budget that was asked for and is too small to be of use to a store."""
        need = store.memory_need()
        # Sketches take at most half of the host's.
        host_least = need.layer_bytes * (2 if need.sketch_bytes else 1)
        for name, given, size, least in (
            ("device", self.device_bytes, self.device_bytes or 0, need.layer_bytes),
            ("host", self.host_bytes, need.chunk_bytes, host_least),
        ):
            if given and size < need.layer_bytes:
                raise InvalidValueError(
                    f"--{name}-budget {format_bytes(given)} is too small: it leaves "
                    f"{format_bytes(size)} for KV, and a layer of the longest prefix "
                    f"({need.tokens} tokens) takes {format_bytes(need.layer_bytes)}; give at least "
                    f"{-(-least // 1000)}KB, or 0 for none"
                )

    def notes(self) -> list[str]:
        """Return what should be said of tiers that were turned off, one sentence each."""
        off = {"device": self.device_bytes, "host": self.host_bytes}
        also = {"device": "", "host": " and no sketch"}
        return [
            f"{name} budget 0: no KV{also[name]} stays in {name} memory between questions"
            for name, size in off.items()
            if size == 0
        ]


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """The I/O options of a command, parsed; ``latency_s`` and the rate in bytes per second."""

    bandwidth_bytes_s: float | None = None
    latency_s: float = 0.0
    direct: bool = True

    @classmethod
    def parse(cls, bandwidth: str | None, latency: str | None, mode: IoMode) -> DiskSettings:
        """Read the options' texts. Raises InvalidValueError."""
        return cls(
            None if bandwidth is None else parse_rate(bandwidth, "--disk-bandwidth"),
            0.0 if latency is None else parse_duration(latency, "--disk-latency"),
            mode is IoMode.DIRECT,
        )

    @property
    def emulated(self) -> bool:
        """Whether reads are slowed down on purpose."""
        return self.bandwidth_bytes_s is not None or self.latency_s > 0

    def io_options(self) -> IOOptions:
        """Return the engine's value."""
        from store.disk.io import IOOptions

        return IOOptions(
            direct=self.direct,
            bandwidth_bytes_s=self.bandwidth_bytes_s,
            latency_s=self.latency_s,
        )
