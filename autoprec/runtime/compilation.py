"""The model compiled by torch.compile, in place and reversibly."""

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoprec.errors import ApplyError
from autoprec.policy import Policy

# What inductor looks for on a CPU unless CXX names another.
_COMPILERS = ("g++", "clang++", "c++")


def compile_fault(device_kind: str) -> str | None:
    """Return what inductor lacks here to compile for a kind of device; None if all that can be told is there."""
    if device_kind == "cpu":
        named = os.environ.get("CXX")
        if not any(shutil.which(name) for name in ((named,) if named else _COMPILERS)):
            return f"a C++ compiler: {f'CXX is {named!r}' if named else 'none of ' + ', '.join(_COMPILERS)} on the PATH"
        headers = Path(sysconfig.get_paths()["include"])
        return None if (headers / "Python.h").is_file() else f"Python.h, which is not in {headers}: install python3-dev"
    if device_kind == "cuda":
        return None if importlib.util.find_spec("triton") else "triton, which is not installed"
    return f"kernels that torch calls stable on {device_kind}"


class Compilation:
    """The compilation of one model, as its policy says.

    As `model.compile()` does it in place: module identity, state-dict keys and hooks stay. The model is compiled at its
    first call, and anew for shapes that differ.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._compiled: nn.Module | None = None

    def compile(self, model: nn.Module, device_kind: str) -> None:
        """Have the next call of `model` compile it, if the policy says so.

        Raises: `ApplyError` if inductor lacks what it needs on the device.
        """
        if self._policy.compile == "as_given":
            return
        fault = compile_fault(device_kind)
        if fault is not None:
            raise ApplyError(
                f'apply: policy "{self._policy.name}" has compile: {self._policy.compile}, and that lacks {fault}; '
                "install it, or write compile: as_given"
            )
        model._compiled_call_impl = torch.compile(_own_frame(model), backend=self._policy.compile)
        self._compiled = model

    def restore(self) -> None:
        """Have the model run as it is written. Idempotent."""
        if self._compiled is not None:
            self._compiled._compiled_call_impl = None
            self._compiled = None


def _own_frame(model: nn.Module) -> Callable[..., Any]:
    """Return a call of `model` in a frame of its own.

    torch.compile leaves frames of torch.nn alone, as a bare `nn.Sequential` is called in, and counts by code object how
    often it may compile again: `model.compile()` compiles one that all modules share.
    """

    def call(*arguments: Any, **keywords: Any) -> Any:
        return model._call_impl(*arguments, **keywords)

    call.__code__ = call.__code__.replace()
    return call
