"""Sizes, rates and times as people write and read them.

Owns both directions: text from an option to plain numbers (bytes, bytes per second, seconds),
and plain numbers to text for tables. Decimal units throughout (1 MB = 1 000 000 bytes), with
KiB, MiB, GiB and TiB understood on input.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal, InvalidOperation

from store.errors import InvalidValueError

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "m": 10**6,
    "mb": 10**6,
    "g": 10**9,
    "gb": 10**9,
    "t": 10**12,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
# Decimal, so that 200us is the same float as 0.0002.
_TIME_UNITS = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "min": Decimal(60),
    "h": Decimal(3600),
}
_NUMBER = re.compile(r"\s*([0-9]+(?:[._][0-9]+)*|\.[0-9]+)\s*([a-zA-Zµμ/]*)\s*")


def _split(text: str) -> tuple[Decimal, str] | None:
    """Split ``"250 MB/s"`` into 250 and ``"MB/s"``; None where it is not a number and a unit."""
    found = _NUMBER.fullmatch(text)
    if not found:
        return None
    try:
        return Decimal(found[1]), found[2].replace("μ", "µ")
    except InvalidOperation:
        return None


def parse_size(text: str, option: str) -> int:
    """Bytes from ``"500MB"``, ``"2GiB"`` or a plain number of bytes.

    Raises InvalidValueError naming ``option`` for anything else and for sizes below one byte.
    """
    parts = _split(text)
    factor = _SIZE_UNITS.get(parts[1].lower()) if parts else None
    if parts is None or factor is None:
        raise InvalidValueError(
            f"{option} {text!r} is not a size; write a number and a unit, such as 500MB or 2GiB"
        )
    size = int(parts[0] * factor)
    if size < 1:
        raise InvalidValueError(f"{option} {text!r} leaves no room; give at least one byte")
    return size


def parse_budget(text: str, option: str) -> int:
    """Like `parse_size`, with 0 for none."""
    parts = _split(text)
    nothing = parts is not None and parts[0] == 0 and parts[1].lower() in _SIZE_UNITS
    return 0 if nothing else parse_size(text, option)


def parse_rate(text: str, option: str) -> float:
    """Bytes per second from ``"250MB/s"``. Raises InvalidValueError for anything else."""
    amount = text.strip()
    if not amount.endswith("/s"):
        raise InvalidValueError(
            f"{option} {text!r} is not a rate; write a size per second, such as 250MB/s"
        )
    return float(parse_size(amount.removesuffix("/s"), option))


def parse_duration(text: str, option: str) -> float:
    """Seconds from ``"200us"``, ``"5ms"``, ``"1.5s"`` or ``"0"``.

    Raises InvalidValueError for anything else; only zero may stand without a unit.
    """
    parts = _split(text)
    if parts is not None and not parts[0] and parts[1] == "":
        return 0.0
    factor = _TIME_UNITS.get(parts[1]) if parts else None
    if parts is None or factor is None:
        raise InvalidValueError(
            f"{option} {text!r} is not a time; write a number and a unit "
            f"({', '.join(_TIME_UNITS)}), such as 200us"
        )
    return float(parts[0] * factor)


def parse_retention(text: str, option: str) -> float:
    """Fraction of the prefix to keep, from ``"0.25"`` or ``"25%"``; 0 < value <= 1."""
    number = text.strip()
    try:
        value = float(number.removesuffix("%")) / (100.0 if number.endswith("%") else 1.0)
    except ValueError:
        value = math.nan
    if not 0.0 < value <= 1.0:
        raise InvalidValueError(
            f"{option} {text!r} is out of range; give a fraction above 0 and up to 1, such as 0.25"
        )
    return value


def format_count(number: float) -> str:
    """A whole number with spaces between thousands: ``4 096``."""
    return f"{round(number):,}".replace(",", " ")


def format_bytes(size: float) -> str:
    """A size with three digits or so: ``512 B``, ``29.1 MB``, ``1.24 GB``."""
    value, unit = float(size), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            break
        value /= 1000.0
    if unit == "B":
        return f"{round(value)} B"
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def format_seconds(seconds: float) -> str:
    """A time in the unit that reads best: ``0.4 ms``, ``142 ms``, ``5.9 s``, ``3 min 20 s``."""
    if seconds < 0.9995:
        return f"{format_ms(seconds)} ms"
    if seconds < 99.5:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def format_ms(seconds: float) -> str:
    """Milliseconds without the unit: whole above 10, else one decimal, ``.0`` left out."""
    value = seconds * 1000.0
    text = f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"
    return text.removesuffix(".0")


def format_percent(ratio: float) -> str:
    """A ratio as ``31 %``, with one decimal below 10 %."""
    value = ratio * 100.0
    return f"{value:.0f} %" if value >= 9.95 or value == 0 else f"{value:.1f} %"
