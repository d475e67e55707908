"""Times and sizes as people read them: in the unit that fits, in three digits."""

_BYTES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def seconds_text(seconds: float) -> str:
    """Return a time in the unit that fits it, in three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def bytes_text(number: int) -> str:
    """Return a size in the unit that fits it, in three digits."""
    for unit, size in _BYTES:
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number} B"
