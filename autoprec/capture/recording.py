"""Record one training step of a workload as an executable graph, and replay it."""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from autoprec.capture.memory import Copies, Memory, fresh, named_tensors
from autoprec.capture.op_graph import op_graph_of
from autoprec.capture.opaque import opaque_calls
from autoprec.capture.recorder import Recorder
from autoprec.errors import WorkloadError
from autoprec.graph.opgraph import OpGraph
from autoprec.runtime.forwards import made_for, original_forward, replace_forward, restore_forward
from autoprec.workload import Workload
from autoprec.workload.batches import first_batches, tensors_of
from autoprec.workload.parts import build_model, check_loss
from autoprec.workload.seeding import MODEL_STREAM, seeded

_HOLDER = "step."  # under which the graph module has its attributes: a model may call its own `code` or `graph`
_STEP_STREAM = MODEL_STREAM + 1  # that of the first step of a training run


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One forward and loss of a workload, in FP32, as an executable graph.

    `graph_module(*inputs)` returns the loss; its parameters and buffers are `model`'s, and it writes to them and to
    its inputs and constants as the step does. `op_graph` describes the same nodes as plain values. `loss` is the loss
    that was recorded. `written` names the inputs and attributes of `graph_module` that the step writes to.
    """

    graph_module: fx.GraphModule
    op_graph: OpGraph
    model: nn.Module
    inputs: tuple[torch.Tensor, ...]
    loss: float
    seed: int
    device: str
    digests: Mapping[str, tuple[int, ...]]
    written: frozenset[str]

    def replay(self, visit: Callable[[fx.Node, Any], None] | None = None) -> torch.Tensor:
        """Run the graph once more and return its loss, with its autograd graph, under `no_grad` too.

        `visit(node, value)` is called after each node. What the step writes to is copied: model and inputs stay as
        they are.
        """
        return _Visitor(self, visit).loss()

    def attribute(self, name: str) -> Any:
        """Return the parameter, buffer or constant of that name as the step reads it; None if it reads none."""
        value: Any = self.graph_module
        for part in (_HOLDER + name).split("."):
            value = getattr(value, part, None)
        return value

    @property
    def replay_matches(self) -> bool:
        """Return whether a replay gives the recorded loss bit for bit."""
        return same_loss(self.replay().item(), self.loss)


def attribute_name(target: str) -> str:
    """Return the name in the model that an attribute of the graph module stands for, given its `get_attr` target."""
    return target.removeprefix(_HOLDER)


class Replay(fx.Interpreter):
    """One run of a recorded step under its seed, on copies of what it writes to."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording.graph_module)
        self._recording = recording
        self._copies: Copies = {}

    def loss(self) -> torch.Tensor:
        """Return the loss, with its autograd graph."""
        recording = self._recording
        flags = [(parameter, parameter.requires_grad) for parameter in recording.model.parameters()]
        with (
            seeded(recording.seed, _STEP_STREAM, recording.device),
            torch.inference_mode(mode=False),
            torch.enable_grad(),
        ):
            try:
                loss: torch.Tensor = self.run(*recording.inputs)
            finally:
                for parameter, requires_grad in flags:
                    parameter.requires_grad_(requires_grad)
        return loss

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return an input of the step."""
        return self._unwritten(target, super().placeholder(target, args, kwargs))

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return a parameter, buffer or constant."""
        return self._unwritten(attribute_name(target), super().get_attr(target, args, kwargs))

    def _unwritten(self, name: str, value: Any) -> Any:
        is_written = name in self._recording.written or isinstance(value, np.ndarray)
        return fresh(value, self._copies) if is_written else value


class _Visitor(Replay):
    def __init__(self, recording: Recording, visit: Callable[[fx.Node, Any], None] | None) -> None:
        super().__init__(recording)
        self._visit = visit

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if self._visit is not None:
            self._visit(n, value)
        return value


def record(workload: Workload, *, device: str = "cpu", seed: int = 0, digests: bool = False) -> Recording:
    """Return the recording of the first training step's forward and loss, made while it really runs.

    With `digests`, a hash of every result is kept, by node, to compare two recordings or a replay with.

    Raises: `WorkloadError` for a loss that is not a scalar tensor that requires grad; `CaptureError` for code that
    cannot be recorded.
    """
    return record_batches(workload, 1, device=device, seed=seed, digests=digests)[0]


def record_batches(
    workload: Workload, num_batches: int, *, device: str = "cpu", seed: int = 0, digests: bool = False
) -> tuple[Recording, ...]:
    """Return recordings of one model's first step on each of the first batches of an epoch, `num_batches` at most.

    Each batch is recorded by itself, since shapes and control flow may depend on it. Raises what `record` does.
    """
    with seeded(seed, MODEL_STREAM, device):
        model = build_model(workload, device)
    _refuse_uninitialized(model)
    batches = first_batches(workload, num_batches, device)
    return tuple(_record(workload, model, batch, device, seed, digests=digests) for batch in batches)


def _record(workload: Workload, model: nn.Module, batch: Any, device: str, seed: int, *, digests: bool) -> Recording:
    inputs = tuple(dict.fromkeys(tensors_of(batch)))
    memory = Memory(model, inputs)
    try:
        with seeded(seed, _STEP_STREAM, device):
            recorder = Recorder(memory, device, digests=digests)
            loss = _run(recorder, workload, model, batch, inputs)
        recorder.finish(loss)
        return _recording(recorder, memory, model, inputs, loss=loss.item(), seed=seed, device=device)
    finally:
        memory.restore()


def _run(
    recorder: Recorder, workload: Workload, model: nn.Module, batch: Any, inputs: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Return the loss of the step, run under `recorder`; code that is compiled runs as it is written."""
    for tensor in inputs:
        recorder.add_input(tensor)
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):  # its forward cannot be replaced
                replace_forward(module, made_for(module, _in_frame(recorder, path)))
                stack.callback(restore_forward, module)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(opaque_calls(recorder.opaque))
        stack.enter_context(recorder)
        return check_loss(workload.loss(model, batch))


def _recording(
    recorder: Recorder,
    memory: Memory,
    model: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    *,
    loss: float,
    seed: int,
    device: str,
) -> Recording:
    root = nn.Module()
    for node in (node for node in recorder.graph.nodes if node.op == "get_attr"):
        name = str(node.target)
        node.target = _HOLDER + name
        _set_attribute(root, node.target, memory.named[name] if name in memory.named else recorder.attributes[name])
    return Recording(
        graph_module=fx.GraphModule(root, recorder.graph, class_name="RecordedStep"),
        op_graph=op_graph_of(recorder.graph, model),
        model=model,
        inputs=inputs,
        loss=loss,
        seed=seed,
        device=device,
        digests={n.name: n.meta["digest"] for n in recorder.graph.nodes if "digest" in n.meta},
        written=memory.written(),
    )


def _refuse_uninitialized(model: nn.Module) -> None:
    names = [name for name, tensor in named_tensors(model).items() if is_lazy(tensor)]
    if names:
        raise WorkloadError(
            f"model() returned a model with {len(names)} uninitialized parameters or buffers, such as {names[0]!r}; "
            "lazy modules get their shapes from a first batch: run one through the model in model()"
        )


def _in_frame(recorder: Recorder, path: str) -> Callable[..., Any]:
    def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        with recorder.frame(path):
            return original_forward(module)(*args, **kwargs)

    return forward


def _set_attribute(root: nn.Module, name: str, value: Any) -> None:
    *path, attribute = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        root.register_buffer(attribute, value, persistent=False)
    else:
        setattr(root, attribute, value)


def same_loss(one: float, other: float) -> bool:
    """Return whether two losses are the same number, NaN being the same as NaN."""
    return one == other or (math.isnan(one) and math.isnan(other))
