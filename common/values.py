"""Conversions of seeds, numbers and texts."""

import hashlib
import json
import os
import re
from decimal import Decimal
from typing import Any

from common.errors import UserError


def derive_seed(*names) -> int:
    """Derive a 64-bit pseudo-random seed from the names."""
    digest = hashlib.sha256("/".join(map(str, names)).encode()).digest()
    return int.from_bytes(digest[:8], "little")


def env_int(name: str, default: int) -> int:
    """Read an integer environment variable, as set by torchrun; the default if unset or empty.

    Raises UserError if it is not an integer.
    """
    text = os.environ.get(name)
    try:
        return int(text or default)
    except ValueError:
        raise UserError(f"{name} is {text!r}; expected an integer, as set by torchrun") from None


def largest_divisor(n: int, most: int) -> int:
    """Find the largest divisor of n that is at most `most`, or 1."""
    return next(d for d in range(min(n, max(1, most)), 0, -1) if n % d == 0)


UNITS = {"k": 10**3, "m": 10**6, "b": 10**9}


def integer(text: str) -> int:
    """Read an integer such as 1000, 1_000, 1e3, 4k (4,000), 2M or 1.5B. Raises ValueError."""
    unit = UNITS.get(text[-1:].lower(), 1)
    number = text if unit == 1 else text[:-1]
    try:
        value = Decimal(number) * unit
        if value == value.to_integral_value() and abs(value) < 2**63:
            return int(value)
    except ArithmeticError:  # not a number, or not a finite one
        pass
    raise ValueError


def boolean(text: str) -> bool:
    """Read true, 1, false or 0. Raises ValueError."""
    if text.lower() not in ("true", "1", "false", "0"):
        raise ValueError
    return text.lower() in ("true", "1")


def nan_to_none(value: Any) -> Any:
    """Replace numbers that are not finite by None in a dict or list, because JSON has no such."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def printable(text: str) -> str:
    """Replace control characters, which can change a terminal's state."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


def cpu_cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()
