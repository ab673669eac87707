"""What every JSON object of the command carries: schema, versions, environment.

``docs/json.md`` documents the keys. Keys may be added, never renamed or removed.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from impress_cli.options import DiskSettings

_DISTRIBUTIONS = ("impress-kv", "torch", "transformers", "zarr", "numcodecs", "numpy")


def impress_version() -> str:
    """Version of the installed distribution."""
    return _version_of("impress-kv")


def _version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what an answer is."""
    found = {name: _version_of(name) for name in _DISTRIBUTIONS}
    return {"python": platform.python_version(), **found}


def environment(device: str | None = None, disk: DiskSettings | None = None) -> dict[str, Any]:
    """Machine state that belongs to a measurement: cores, load, device, page cache, emulation."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "machine": f"{platform.system()} {platform.machine()}",
        "device": device,
        "page_cache": None if disk is None else "bypassed" if disk.direct else "used",
        "emulation": _emulation(disk),
    }


def _emulation(disk: DiskSettings | None) -> dict[str, Any] | None:
    if disk is None or not disk.emulated:
        return None
    return {
        "disk_bandwidth_bytes_s": disk.bandwidth_bytes_s,
        "disk_latency_s": disk.latency_s,
    }


def envelope(
    command: str,
    body: dict[str, Any],
    *,
    device: str | None = None,
    disk: DiskSettings | None = None,
) -> dict[str, Any]:
    """Wrap a command's result into its versioned object."""
    return {
        "schema": f"impress.{command}/1",
        **body,
        "versions": versions(),
        "environment": environment(device, disk),
    }
