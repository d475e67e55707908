"""The site: one op call in a module, the unit a policy speaks about."""

import re
from dataclasses import dataclass

from autoprec.errors import PolicyError

LOSS_MODULE = "@loss"

_SITE = re.compile(r"(?P<module>[^:#]*):(?P<op>[^:#]+)#(?P<index>\d+)")


@dataclass(frozen=True, order=True, slots=True)
class Site:
    """The `index`-th call of `op` within one call of `module`.

    The root module has the empty path; loss code outside the model has the path `@loss`.
    A module that is called twice has each site once: both calls follow the same rule.
    """

    module: str
    op: str
    index: int

    def __str__(self) -> str:
        return f"{self.module}:{self.op}#{self.index}"

    @classmethod
    def parse(cls, text: str) -> "Site":
        """Return the site that `text` (`module:op#index`) names.

        Raises: `PolicyError` if `text` is not of that form.
        """
        match = _SITE.fullmatch(text)
        if match is None:
            raise PolicyError(f'"{text}" is not a site; a site reads module:op#index, as in "blocks.0.attn:softmax#0"')
        return cls(match["module"], match["op"], int(match["index"]))
