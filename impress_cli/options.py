"""Options that several commands share, so that they read and behave the same everywhere.

Owns their names and help texts, and turns the I/O options into the engine's values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from impress_cli.units import parse_duration, parse_rate

if TYPE_CHECKING:
    from store.disk.io import IOOptions


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
HostBudgetOption = Annotated[
    str | None,
    typer.Option(
        "--host-budget",
        metavar="SIZE",
        help="Most memory for sketches that stay loaded between questions. Default: 1GiB.",
        show_default=False,
    ),
]
IoOption = Annotated[
    IoMode,
    typer.Option("--io", help="direct: past the page cache where possible; buffered: through it."),
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
