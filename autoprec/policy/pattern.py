"""The site pattern: the one glob that policies, search spaces and the command line name sites with."""

import difflib
import re
from dataclasses import dataclass, field

from autoprec.errors import PolicyError
from autoprec.graph.site import Site
from autoprec.ops import CATALOG, ENTERED, canonical_name

_SHAPE = re.compile(r"(?P<module>[^:#]*)(?::(?P<op>[^:#]+)(?:#(?P<index>[0-9*?]+))?)?", re.DOTALL)
_WILDCARDS = frozenset("*?")


@dataclass(frozen=True, slots=True)
class SitePattern:
    """An anchored glob `module[:op[#index]]`: `*` is any run of characters, dots included, and `?` any one.

    A part that is left out matches everything: `blocks.*` names all sites of the modules under `blocks`, and `*`
    every site. The root module is the empty path: `:add` names its additions.
    """

    text: str
    _parts: tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compile the parts.

        Raises: `PolicyError` if the text is not of the form above, or names an op literally that is never a site.
        """
        shape = _SHAPE.fullmatch(self.text)
        if shape is None:
            raise PolicyError(
                f'"{self.text}" is not a site pattern; a pattern reads module, module:op or module:op#index '
                'with * and ? as wildcards, as in "blocks.*.attn:softmax"'
            )
        module, op, index = shape["module"], shape["op"] or "*", shape["index"] or "*"
        _check_op(self.text, op)
        object.__setattr__(self, "_parts", (anchored(module), anchored(op), anchored(index)))

    def matches(self, site: Site) -> bool:
        """Return whether the pattern names `site`."""
        module, op, index = self._parts
        return bool(module.fullmatch(site.module) and op.fullmatch(site.op) and index.fullmatch(str(site.index)))

    def matches_module(self, module: str) -> bool:
        """Return whether the pattern names sites of `module`, whatever their op."""
        return self._parts[0].fullmatch(module) is not None

    def matches_op(self, op: str) -> bool:
        """Return whether the pattern names sites of `op`, whatever their module."""
        return self._parts[1].fullmatch(op) is not None

    @property
    def names_index(self) -> bool:
        """Return whether the pattern tells the calls of one op in one module apart."""
        return re.fullmatch(r"\*+", self.text.partition("#")[2] or "*") is None

    @property
    def catches_all(self) -> bool:
        """Return whether the pattern names every site there can be."""
        return all(re.fullmatch(r"\*+", part) for part in re.split("[:#]", self.text))


def pattern_of(site: Site) -> str:
    """Return the narrowest pattern text that names `site`.

    An op that the catalog lacks cannot be named literally; its last character becomes `?`.
    """
    op = site.op if _is_known(site.op) else site.op[:-1] + "?"
    return f"{site.module}:{op}#{site.index}"


def _is_known(op: str) -> bool:
    return op in CATALOG and CATALOG[op].is_site


def _check_op(text: str, op: str) -> None:
    """Refuse an op that is named literally and can have no site: a typo, another spelling, or never cast."""
    if _WILDCARDS & set(op) or _is_known(op):
        return
    canonical = canonical_name(op)
    if op in CATALOG:
        what = f'op "{op}" ({CATALOG[op].family}) is never cast, so no site has it; name an op that computes'
    elif op in ENTERED:
        what = f'op "{op}" is entered and has no site; name the ops inside it, or all ops of its module'
    elif canonical != op and _is_known(canonical):
        what = f'op "{op}" is called "{canonical}" in a policy'
    else:
        sites = [name for name in CATALOG if _is_known(name)]
        near = ", ".join(f'"{name}"' for name in difflib.get_close_matches(op, sites, n=3, cutoff=0.5))
        what = f'op "{op}" is not in the catalog; nearest: {near or "none"}; an op of your own is named with a wildcard'
    raise PolicyError(f'pattern "{text}": {what}')


def anchored(glob: str) -> re.Pattern[str]:
    """Return what matches the whole of a name: `*` is any run of characters, `?` any one."""
    pieces = {"*": ".*", "?": "."}
    # Runs of stars are one star: `.*.*.*` would take time exponential in their number.
    return re.compile("".join(pieces.get(c, re.escape(c)) for c in re.sub(r"\*+", "*", glob)), re.DOTALL)
