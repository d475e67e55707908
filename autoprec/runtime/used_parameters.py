"""In which formats a policy has each parameter used: by the sites that read it, or by those its module should have."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from autoprec.graph.site import LOSS_MODULE, Site
from autoprec.policy import INSIDE_FP32, Policy

if TYPE_CHECKING:
    from autoprec.graph.uses import Uses

# The site that reads the parameters of a module, by the module's class: what is assumed without a recording.
_MAIN_OPS: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.Linear, "linear"),
    (nn.Bilinear, "bilinear"),
    (nn.Embedding, "embedding"),
    (nn.EmbeddingBag, "embedding_bag"),
    (nn.LayerNorm, "layer_norm"),
    (nn.RMSNorm, "rms_norm"),
    (nn.GroupNorm, "group_norm"),
    (nn.modules.batchnorm._BatchNorm, "batch_norm"),
    (nn.PReLU, "prelu"),
    (nn.LSTM, "lstm"),
    (nn.GRU, "gru"),
    *((getattr(nn, f"Conv{n}d"), f"conv{n}d") for n in (1, 2, 3)),
    *((getattr(nn, f"ConvTranspose{n}d"), f"conv_transpose{n}d") for n in (1, 2, 3)),
)


@dataclass(frozen=True, kw_only=True)
class UsedParameter:
    """A parameter, the modules that hold it, the sites that read it, and the formats in which they do.

    `home` is the innermost module that holds every holder and every reader; a tied parameter has several holders.
    """

    name: str
    holders: tuple[str, ...]
    sites: tuple[Site, ...]
    formats: frozenset[str]
    home: str

    @property
    def format(self) -> str:
        """Return the format that holds what every reader needs."""
        return next(iter(self.formats)) if len(self.formats) == 1 else "fp32"


def used_parameters(model: nn.Module, policy: Policy, uses: "Uses | None" = None) -> tuple[UsedParameter, ...]:
    """Return every parameter once. One that the recorded step did not read is used as its module's class says.

    Loss code is no reader: it reads parameters as they are stored.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    modules = dict(model.named_modules(remove_duplicate=False))
    recorded: Mapping[str, tuple[Site, ...]] = {} if uses is None else uses.parameters
    as_stored: frozenset[Site] = frozenset() if uses is None else uses.as_stored
    found = []
    for first, *others in names.values():
        holders = tuple(dict.fromkeys(name.rpartition(".")[0] for name in (first, *others)))
        readers = (site for site in recorded.get(first, ()) if site.module != LOSS_MODULE)
        sites = tuple(readers) or tuple(Site(path, main_op(modules[path]) or "unknown", 0) for path in holders)
        formats = {format_on_tensors(policy.format_of(site)[0]) for site in sites if site not in as_stored}
        found.append(
            UsedParameter(
                name=first,
                holders=holders,
                sites=sites,
                formats=frozenset(formats or {"fp32"}),
                home=_common((*holders, *(site.module for site in sites))),
            )
        )
    return tuple(found)


def main_op(module: nn.Module) -> str | None:
    """Return the op that reads the parameters of a module of torch's own classes."""
    return next((op for kind, op in _MAIN_OPS if isinstance(module, kind)), None)


def format_on_tensors(name: str) -> str:
    """Return the format of the tensors that a site of format `name` is given: fp32 where it takes what is stored."""
    return "fp32" if name in ("as_given", "promote", *INSIDE_FP32) else name


def is_inside(path: str, module: str) -> bool:
    """Return whether the module at `path` is `module` or below it."""
    return module in ("", path) or path.startswith(module + ".")


def units(model: nn.Module, parameters: Iterable[UsedParameter]) -> Iterator[tuple[str, str, list[UsedParameter]]]:
    """Yield modules to gather as one, children first, each with its format and with its parameters.

    A unit is the outermost module below which all formats agree; what is left goes with the module around it. A unit
    has a `forward`, and its parameters are read nowhere else. The root is one if parameters are left for it.
    """
    yield from _units_below(model, "", list(parameters))


def _units_below(
    module: nn.Module, path: str, parameters: list[UsedParameter]
) -> Iterator[tuple[str, str, list[UsedParameter]]]:
    left = [each for each in parameters if any(is_inside(holder, path) for holder in each.holders)]
    if not left:
        return
    if _gathers(module, path, left) and len({each.format for each in left}) == 1:
        yield path, left[0].format, left
        return
    for name, child in module.named_children():
        for unit in _units_below(child, f"{path}.{name}" if path else name, left):
            yield unit
            taken = {each.name for each in unit[2]}
            left = [each for each in left if each.name not in taken]
    if left and _gathers(module, path, left):
        formats = {each.format for each in left}
        yield path, formats.pop() if len(formats) == 1 else "fp32", left


def _gathers(module: nn.Module, path: str, parameters: Iterable[UsedParameter]) -> bool:
    if path == "":
        return True
    runs = type(module).forward is not nn.Module.forward  # a ModuleList has no forward to hook
    return runs and all(is_inside(each.home, path) for each in parameters)


def _common(paths: Iterable[str]) -> str:
    first, *others = (path.split(".") for path in paths)
    length = 0
    while length < len(first) and all(other[: length + 1] == first[: length + 1] for other in others):
        length += 1
    return ".".join(first[:length])
