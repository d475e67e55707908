"""The smallest selection that still passes: delta debugging by complements.

Source: Zeller and Hildebrandt 2002, Simplifying and Isolating Failure-Inducing Input, section 3.2 (1-minimality).
Chunks are taken out from the end, in halves, quarters and so on, down to single items.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def reduced(
    items: Sequence[T],
    passes: Callable[[Sequence[T]], bool],
    note: Callable[[Sequence[T]], object] = lambda _: None,
) -> tuple[T, ...]:
    """Return a part of `items`, which pass, none of which can be left out alone if more items never hurt.

    What should be kept comes first in `items`. `note` is told what is left before each round of smaller chunks.
    """
    chosen = list(items)
    size = max(len(chosen) // 2, 1)
    while True:
        note(chosen)
        end = len(chosen)
        while end > 0:
            start = max(end - size, 0)
            fewer = [*chosen[:start], *chosen[end:]]
            if passes(fewer):
                chosen = fewer
            end = start
        if size == 1:
            return tuple(chosen)
        size //= 2
