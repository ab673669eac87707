"""What a model computes on and in: device, dtype and threads, checked and resolved."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from store.errors import InvalidValueError
from store.types import KV_DTYPES

MAX_THREADS = 1024


def resolve_device(device: str) -> torch.device:
    """Device for ``auto``, ``cpu``, ``cuda`` or ``cuda:<n>``; InvalidValueError for others."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = ["cpu", *(["cuda"] if count else []), *(f"cuda:{n}" for n in range(count))]
    if device == "auto":
        return torch.device("cuda:0" if count else "cpu")
    if device not in here:
        raise InvalidValueError(
            f"device {device!r} is not available here; use one of auto, {', '.join(here)}"
        )
    return torch.device("cuda:0" if device == "cuda" else device)


def resolve_dtype(dtype: str, device: torch.device | str) -> str:
    """Name of the dtype to compute and store in.

    ``auto`` is bfloat16 where the device computes it natively and float32 elsewhere: emulated
    bfloat16 is slower than float32 and less exact.
    """
    if dtype == "auto":
        return "bfloat16" if _has_native_bfloat16(torch.device(device)) else "float32"
    if dtype not in KV_DTYPES:
        raise InvalidValueError(
            f"dtype {dtype!r} is not supported; use one of auto, {', '.join(KV_DTYPES)}"
        )
    return dtype


def _has_native_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(_cpu_features())


def _cpu_features() -> set[str]:
    """Words of the CPU's feature list; empty where the system doesn't tell."""
    try:
        return set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return set()


def set_threads(threads: int | None) -> None:
    """Set torch's threads in this process; None leaves them. InvalidValueError out of range."""
    if threads is None:
        return
    if not 1 <= threads <= MAX_THREADS:
        raise InvalidValueError(
            f"threads {threads} is out of range; use 1 to {MAX_THREADS} "
            f"(this machine has {os.cpu_count()} cores)"
        )
    torch.set_num_threads(threads)
