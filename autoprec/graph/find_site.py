"""Find the one site that a person means."""

import difflib
from collections.abc import Sequence

from autoprec.errors import PolicyError
from autoprec.graph.site import Site
from autoprec.policy.pattern import SitePattern

_NUM_NAMES = 4


def the_site(sites: Sequence[Site], text: str) -> Site:
    """Return the site called `text`, or the only one that the site pattern `text` matches.

    Raises: `PolicyError` that names the nearest sites if there is none, and those that match if there are several.
    """
    for site in sites:
        if str(site) == text:
            return site
    try:
        pattern = SitePattern(text)
    except PolicyError:  # an op that no site can have: the nearest sites say more
        matched = []
    else:
        matched = [site for site in sites if pattern.matches(site)]
    if len(matched) == 1:
        return matched[0]
    if matched:
        raise PolicyError(f'"{text}" names {len(matched)} sites, and one is wanted: {_some(matched)}')
    near = _nearest(sites, text)
    hint = f"nearest: {_some(near)}" if near else f"sites: {_some(sites)}"
    raise PolicyError(f'"{text}" names no site of this workload; {hint}; inspect --all shows every site')


def _nearest(sites: Sequence[Site], text: str) -> tuple[Site, ...]:
    """Return the sites that `text` comes near to: their names, or their ops or modules alone."""
    forms: dict[str, dict[Site, None]] = {}
    for site in sites:
        for form in (str(site), f":{site.op}#{site.index}", f":{site.op}", site.module):
            forms.setdefault(form, {})[site] = None
    near = difflib.get_close_matches(text, forms, n=3, cutoff=0.6)
    return tuple(dict.fromkeys(site for form in near for site in forms[form]))


def _some(sites: Sequence[Site]) -> str:
    rest = len(sites) - _NUM_NAMES
    return _quoted([str(site) for site in sites[:_NUM_NAMES]]) + (f" and {rest} more" if rest > 0 else "")


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
