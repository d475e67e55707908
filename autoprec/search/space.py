"""The search space: what a study may choose from, read from a YAML file in `search_spaces/`."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

from autoprec.errors import PolicyError, PolicyFileError, SpaceError
from autoprec.policy import (
    PRESETS,
    Compilation,
    MatmulPrecision,
    MemoryFormat,
    OptimizerKernels,
    Parameters,
    SitePattern,
)
from autoprec.policy.yaml_nodes import Entry, compose
from autoprec.runtime.device import DeviceInfo

Grouping: TypeAlias = Literal["pattern", "module"]

SCHEMA_VERSION = 1
LOW_FORMATS = ("bf16", "fp16")
BASELINE_GROUPS = ("default", "all")
# How parameters may be stored; plain bf16, which loses updates, is a baseline and no choice.
STORAGES: Mapping[str, Parameters] = MappingProxyType(
    {
        "fp32": Parameters(),
        "bf16-master": Parameters(storage="bf16", master="fp32"),
        "bf16-stochastic": Parameters(storage="bf16", rounding="stochastic"),
    }
)
_HERE = Path(__file__).resolve().parent.parent
# Space of a data center GPU by its compute capability: A100; H100 and H200; B200.
_DATA_CENTER: Mapping[str, str] = MappingProxyType({"8.0": "a100", "9.0": "hopper", "10.0": "hopper"})
# In an installed package the folder lies inside it; in a checkout, beside it.
_FOLDERS = (_HERE / "search_spaces", _HERE.parent / "search_spaces")


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """What the search may choose from.

    `prefer` are the sites, as globs, that default to FP32 and may be lowered all the same. `slow_limit` is in FP32
    steps, `margin` is the fraction of the horizon that a faithful run may lose, `horizon` 0 means: from the budget.
    `memory_format` is about convolutions and says nothing where there are none.
    `baselines` are names of presets, or `default` or `all`, see `autoprec.search.baselines`.
    """

    low: tuple[str, ...] = LOW_FORMATS
    grouping: Grouping = "pattern"
    prefer: tuple[str, ...] = ()
    float32_matmul: tuple[MatmulPrecision, ...] = ("ieee",)
    storage: tuple[str, ...] = ("fp32",)
    memory_format: tuple[MemoryFormat, ...] = ("as_given",)
    optimizer: tuple[OptimizerKernels, ...] = ("as_given",)
    compile: tuple[Compilation, ...] = ("as_given",)
    loss_scale_initial: tuple[float, ...] = (65536.0,)
    loss_scale_growth_interval: tuple[int, ...] = (2000,)
    slow_limit: float = 5.0
    horizon: int = 0
    margin: float = 0.01
    baselines: tuple[str, ...] = ("default",)

    def fingerprint(self) -> str:
        """Return a hash of all choices: equal for equal spaces, whatever file they came from."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def space_name(device: DeviceInfo) -> str:
    """Return the name of the space for a device's family, as far as its name and capability tell; else its kind."""
    if device.kind == "cpu" and "bf16" in device.native_formats:
        return "cpu-amx"
    if device.kind != "cuda" or "rocm" in device.capability:
        return device.kind
    if "GeForce" in device.name:
        return "rtx"
    return _DATA_CENTER.get(str(device.capability.get("compute_capability")), device.kind)


def space_path(name: str) -> Path:
    """Return the file that ships with autoprec for a family or a kind of device, or the default one.

    Raises: `SpaceError` if the installation lacks them.
    """
    for each in (name, "default"):
        for folder in _FOLDERS:
            if (folder / f"{each}.yaml").is_file():
                return folder / f"{each}.yaml"
    raise SpaceError(f"no search space found in {_FOLDERS[0]}; reinstall autoprec or pass --space FILE")


def load_space(path: Path) -> Space:
    """Return the space that the YAML file `path` describes.

    Raises: `SpaceError` whose message starts with `file:line:`.
    """
    try:
        return _space(compose(path.read_text(encoding="utf-8"), str(path)))
    except OSError as error:
        raise SpaceError(f"cannot read search space {path}: {error.strerror or error}; pass --space FILE") from error
    except UnicodeDecodeError as error:
        raise SpaceError(f"{path}:1: not text in UTF-8: {error.reason} at byte {error.start}") from error
    except PolicyFileError as error:
        raise SpaceError(str(error)) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Key:
    """One key of the file: the field it fills, what it takes, and a check that returns None for anything else."""

    field: str
    allowed: str
    check: Callable[[Any], Any]


def _space(root: Entry) -> Space:
    entries = dict(root.mapping("the search space", ("autoprec_space", *_KEYS, "loss_scale")))
    if "autoprec_space" not in entries:
        root.fail(f"a search space starts with autoprec_space: {SCHEMA_VERSION}")
    version = entries.pop("autoprec_space")
    if version.integer("autoprec_space") != SCHEMA_VERSION:
        version.fail(f"search space of schema {version.node.value}; this autoprec reads {SCHEMA_VERSION}; upgrade it")
    rows = {name: _KEYS[name] for name in entries if name in _KEYS}
    if "loss_scale" in entries:
        inner = entries.pop("loss_scale").mapping("loss_scale", tuple(_LOSS_SCALE_KEYS))
        entries |= {f"loss_scale.{name}": entry for name, entry in inner.items()}
        rows |= {f"loss_scale.{name}": _LOSS_SCALE_KEYS[name] for name in inner}
    return Space(**{rows[name].field: _checked(name, rows[name], entry) for name, entry in entries.items()})


def _checked(name: str, row: _Key, entry: Entry) -> Any:
    plain = entry.plain(name)
    value = row.check(plain)
    if value is None:
        entry.fail(f"{name} is {plain!r}; allowed: {row.allowed}")
    return value


def _list_of(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a check for a non-empty list of different values that each pass `check`."""

    def of_list(value: Any) -> Any:
        items = [check(item) for item in value] if isinstance(value, list) else []
        return tuple(items) if items and None not in items and len(set(items)) == len(items) else None

    return of_list


def _one_of(*allowed: str) -> Callable[[Any], Any]:
    return lambda value: value if value in allowed else None


def _number(kind: type[int] | type[float], *, above: float, below: float = math.inf) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        is_number = type(value) is int or (kind is float and type(value) is float)
        return kind(value) if is_number and above < value < below else None

    return check


def _site_glob(value: Any) -> str | None:
    try:
        return SitePattern(value).text if isinstance(value, str) else None
    except PolicyError:
        return None


def _site_globs(value: Any) -> Any:
    return () if value == [] else _list_of(_site_glob)(value)


def _horizon(value: Any) -> Any:
    return 0 if value == "auto" else _number(int, above=7)(value)


_KEYS: Mapping[str, _Key] = MappingProxyType(
    {
        "low": _Key(field="low", allowed=f"a list of {', '.join(LOW_FORMATS)}", check=_list_of(_one_of(*LOW_FORMATS))),
        "grouping": _Key(field="grouping", allowed="pattern, module", check=_one_of(*get_args(Grouping))),
        "prefer": _Key(field="prefer", allowed='a list of site patterns such as "*:softmax"', check=_site_globs),
        "float32_matmul": _Key(
            field="float32_matmul",
            allowed=f"a list of {', '.join(get_args(MatmulPrecision))}",
            check=_list_of(_one_of(*get_args(MatmulPrecision))),
        ),
        "storage": _Key(
            field="storage", allowed=f"a list of {', '.join(STORAGES)}", check=_list_of(_one_of(*STORAGES))
        ),
        "memory_format": _Key(
            field="memory_format",
            allowed=f"a list of {', '.join(get_args(MemoryFormat))}",
            check=_list_of(_one_of(*get_args(MemoryFormat))),
        ),
        "optimizer": _Key(
            field="optimizer",
            allowed=f"a list of {', '.join(get_args(OptimizerKernels))}",
            check=_list_of(_one_of(*get_args(OptimizerKernels))),
        ),
        "compile": _Key(
            field="compile",
            allowed=f"a list of {', '.join(get_args(Compilation))}",
            check=_list_of(_one_of(*get_args(Compilation))),
        ),
        "baselines": _Key(
            field="baselines",
            allowed=f"a list of {', '.join((*BASELINE_GROUPS, *PRESETS))}",
            check=_list_of(_one_of(*BASELINE_GROUPS, *PRESETS)),
        ),
        "slow_limit": _Key(field="slow_limit", allowed="numbers above 1", check=_number(float, above=1)),
        "horizon": _Key(field="horizon", allowed="auto, or whole numbers from 8", check=_horizon),
        "margin": _Key(field="margin", allowed="fractions between 0 and 1", check=_number(float, above=0, below=1)),
    }
)
_LOSS_SCALE_KEYS: Mapping[str, _Key] = MappingProxyType(
    {
        "initial": _Key(
            field="loss_scale_initial",
            allowed="a list of different numbers from 1 to 2^24",
            check=_list_of(_number(float, above=0.999, below=2.0**24 + 1)),
        ),
        "growth_interval": _Key(
            field="loss_scale_growth_interval",
            allowed="a list of different whole numbers from 1",
            check=_list_of(_number(int, above=0)),
        ),
    }
)
