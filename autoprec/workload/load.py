"""Load a workload from a Python file: `file.py`, `file.py:name`, or the plain names of a training script."""

import difflib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from autoprec.errors import AutoprecError, WorkloadError, a_or_an
from autoprec.workload import script
from autoprec.workload.origin import origin
from autoprec.workload.workload import Workload

_TEN_LINES = """
    import autoprec

    def workload():
        return autoprec.Workload(
            model=...,      # () -> nn.Module, fresh
            batches=...,    # () -> iterable of batches, the same ones in the same order every time
            loss=...,       # (model, batch) -> scalar tensor; left out: model(**batch).loss
            optimizer=...,  # (params) -> Optimizer; left out: AdamW(lr=1e-3)
            evaluate=None,  # (model) -> float, smaller is better
        )
"""


@dataclass(frozen=True, kw_only=True)
class LoadedWorkload:
    """A workload, the name its runs go by (the file's stem, and `-name` where one was asked for), and its file."""

    workload: Workload
    name: str
    path: Path


def load(spec: str) -> LoadedWorkload:
    """Return the workload that `spec`, `file.py` or `file.py:name`, stands for.

    `name` is a `Workload` or a function that returns one. Without it the file's `workload` counts, or else the plain
    names of a training script, as `autoprec.workload.script` describes them. The file runs with its folder first on
    `sys.path` and without command-line arguments; what it guards by `if __name__ == "__main__"` does not run.

    Raises: `WorkloadError` if the file is missing, raises, or offers no workload.
    """
    text, name = _split(spec)
    path = _existing_file(text)
    module = _run_file(path)
    if name is not None:
        return LoadedWorkload(workload=_named(module, name, path), name=f"{path.stem}-{name}", path=path)
    if hasattr(module, "workload"):
        return LoadedWorkload(workload=_named(module, "workload", path), name=path.stem, path=path)
    if script.offers(vars(module)):
        with _blamed_on(path, "the workload of its plain names cannot be built: it"):
            return LoadedWorkload(workload=script.workload_of(vars(module), path.name), name=path.stem, path=path)
    raise WorkloadError(
        f"{path} offers no workload: it has no workload() and, of the plain names, lacks "
        f"{' and '.join(script.missing(vars(module)))}. Add these ten lines to it:\n{_TEN_LINES}"
    )


def _split(spec: str) -> tuple[str, str | None]:
    file, colon, name = spec.rpartition(":")
    if colon and name.isidentifier() and not Path(spec).exists():
        return file, name
    if colon and file.endswith(".py"):
        raise WorkloadError(f'"{spec}": "{name}" is not a Python name; write file.py or file.py:name')
    return spec, None


def _existing_file(text: str) -> Path:
    path = Path(text).expanduser()
    if path.is_file() and path.suffix == ".py":
        return path.resolve()
    if path.is_file():
        raise WorkloadError(f'"{text}" is not a Python file; a workload is loaded from a file that ends in .py')
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        raise WorkloadError(f'cannot load "{text}": there is no folder "{folder}" (looked from {Path.cwd()})')
    names = sorted(entry.name for entry in folder.glob("*.py"))
    near = names[:5] if path.is_dir() else difflib.get_close_matches(_with_suffix(path.name), names, n=3, cutoff=0.5)
    hint = f"nearest: {', '.join(str(folder / each) for each in near)}" if near else f"it has {len(names)} .py files"
    reason = "it is a folder, not a file" if path.is_dir() else f'"{folder}" has no such file'
    raise WorkloadError(f'cannot load "{text}": {reason}; {hint}')


def _with_suffix(name: str) -> str:
    return name if name.endswith(".py") else f"{name}.py"


def _run_file(path: Path) -> ModuleType:
    """Return the module that `path` makes when it runs; it stays in `sys.modules` so that its classes pickle."""
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WorkloadError(f"cannot load {path}: Python has no loader for it")
    module = importlib.util.module_from_spec(spec)
    replaced = sys.modules.get(name)
    sys.modules[name] = module
    try:
        with _blamed_on(path, "running the file"), _as_a_script(path):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name)
        if replaced is not None:
            sys.modules[name] = replaced
        raise
    return module


def _module_name(path: Path) -> str:
    """Return the file's stem if siblings may import it by that name, or else a name that hides no other module."""
    stem = path.stem
    loaded = sys.modules.get(stem)
    if loaded is not None:
        is_free = getattr(loaded, "__file__", None) == str(path)
    else:
        elsewhere = [folder for folder in sys.path if Path(folder or ".").resolve() != path.parent]
        is_free = stem not in sys.builtin_module_names and not importlib.machinery.PathFinder.find_spec(stem, elsewhere)
    return stem if stem.isidentifier() and is_free else f"autoprec_workload_{abs(hash(str(path)))}"


@contextmanager
def _as_a_script(path: Path) -> Iterator[None]:
    """Put the file's folder first on `sys.path` and hide autoprec's own arguments while the file runs.

    Afterwards the folder stays as the last entry: imports inside the file's functions and in data-loading processes
    still find its siblings, and no sibling hides a module that autoprec has yet to import.
    """
    folder, arguments = str(path.parent), sys.argv
    sys.path.insert(0, folder)
    sys.argv = [str(path)]
    try:
        yield
    finally:
        sys.argv = arguments
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)


@contextmanager
def _blamed_on(path: Path, attempted: str) -> Iterator[None]:
    """Turn what the user's code raises into a `WorkloadError` that names its line and keeps it as the cause."""
    try:
        yield
    except AutoprecError as error:
        where = origin(error, path)
        raise WorkloadError(f"{where}: {error}" if where else f"{path.name}: {error}") from error
    except SystemExit as error:
        where = origin(error, path) or str(path)
        advice = 'keep what only a command may do below `if __name__ == "__main__":`'
        raise WorkloadError(f"{where}: {attempted} ended the program (SystemExit: {error}); {advice}") from error
    except Exception as error:
        where = origin(error, path) or str(path)
        advice = f"; install it beside this Python, {sys.executable}" if isinstance(error, ModuleNotFoundError) else ""
        raise WorkloadError(f"{where}: {attempted} raised {type(error).__name__}: {error}{advice}") from error


def _named(module: ModuleType, name: str, path: Path) -> Workload:
    if not hasattr(module, name):
        offers = [key for key, value in vars(module).items() if _may_be_workload(value, module)]
        near = difflib.get_close_matches(name, offers, n=3, cutoff=0.5) or offers[:5]
        hint = f"nearest: {', '.join(near)}" if near else f"add a function of that name:\n{_TEN_LINES}"
        raise WorkloadError(f'{path} has no "{name}"; {hint}')
    value = getattr(module, name)
    if isinstance(value, Workload):
        return value
    if not callable(value):
        raise WorkloadError(f"{path}:{name} is {a_or_an(value)}; it must be a Workload or return one")
    function: Callable[[], object] = value
    with _blamed_on(path, f"{name}()"):
        made = function()
    if not isinstance(made, Workload):
        raise WorkloadError(f"{path}:{name}() returned {a_or_an(made)}; it must return an autoprec.Workload")
    return made


def _may_be_workload(value: object, module: ModuleType) -> bool:
    own_function = isinstance(value, type(_split)) and value.__module__ == module.__name__
    return own_function or isinstance(value, Workload)
