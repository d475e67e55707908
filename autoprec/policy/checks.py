"""Checks that the fields of a policy share."""

from collections.abc import Iterable

from autoprec.errors import PolicyError


def check_text(what: str, value: object) -> None:
    """Raise `PolicyError` unless `value` is text."""
    if not isinstance(value, str):
        raise PolicyError(f"{what} is {value!r}; allowed: text")


def check_choice(what: str, value: object, allowed: Iterable[str]) -> None:
    """Raise `PolicyError` unless `value` is one of `allowed`."""
    if value not in tuple(allowed):
        raise PolicyError(f"{what} is {value!r}; allowed: {', '.join(allowed)}")


def check_kind(what: str, value: object, kind: type) -> None:
    """Raise `PolicyError` unless `value` is of the class that the field holds."""
    if not isinstance(value, kind):
        raise PolicyError(f"{what} is {value!r}; allowed: an autoprec.{kind.__name__}")
