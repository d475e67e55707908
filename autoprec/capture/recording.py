"""Record one training step of a workload as an executable graph, and replay it."""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from autoprec.capture.op_graph import op_graph_of
from autoprec.capture.recorder import Recorder
from autoprec.graph.opgraph import OpGraph
from autoprec.runtime.forwards import replace_forward, restore_forward
from autoprec.workload import Workload, load_batches
from autoprec.workload.batches import tensors_of
from autoprec.workload.loss import check_loss
from autoprec.workload.seeding import MODEL_STREAM, seeded

_STEP_STREAM = MODEL_STREAM + 1  # that of the first step of a training run


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One forward and loss of a workload, in FP32, as an executable graph.

    `graph_module(*inputs)` returns the loss; its parameters and buffers are `model`'s. `op_graph` describes the same
    nodes as plain values. `loss` is the loss that was recorded.
    """

    graph_module: fx.GraphModule
    op_graph: OpGraph
    model: nn.Module
    inputs: tuple[torch.Tensor, ...]
    loss: float
    seed: int
    device: str
    digests: Mapping[str, tuple[int, ...]]
    initial: Mapping[str, torch.Tensor]

    def replay(self, visit: Callable[[fx.Node, Any], None] | None = None) -> torch.Tensor:
        """Run the graph once more from the recorded state and return its loss, with its autograd graph.

        `visit(node, value)` is called after each node. Buffers that the step writes to are as they were afterwards.
        """
        self._restore()
        try:
            with seeded(self.seed, _STEP_STREAM, self.device):
                loss: torch.Tensor = _Visitor(self.graph_module, visit).run(*self.inputs)
        finally:
            self._restore()
        return loss

    @property
    def replay_matches(self) -> bool:
        """Return whether a replay gives the recorded loss bit for bit."""
        return same_loss(self.replay().item(), self.loss)

    def _restore(self) -> None:
        """Give constants and buffers that the step writes to their recorded values again."""
        for name, value in self.initial.items():
            owner, _, attribute = name.rpartition(".")
            _overwrite(getattr(self.graph_module.get_submodule(owner), attribute), value)


class _Visitor(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, visit: Callable[[fx.Node, Any], None] | None) -> None:
        super().__init__(module)
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
    with seeded(seed, MODEL_STREAM, device):
        model = workload.model().to(device)
    (batch,) = load_batches(workload, 1, device)
    state = {name: tensor.detach().clone() for name, tensor in model.named_buffers()}
    recorder = Recorder(_named_tensors(model), digests=digests)
    inputs = tuple(tensors_of(batch))
    for tensor in inputs:
        recorder.add_input(tensor)
    with ExitStack() as stack:
        for path, module in model.named_modules():
            replace_forward(module, partial(_in_frame, recorder, path))
            stack.callback(restore_forward, module)
        stack.enter_context(seeded(seed, _STEP_STREAM, device))
        stack.enter_context(recorder.watching_functions())
        stack.enter_context(recorder)
        loss = check_loss(workload.loss(model, batch))
    recorder.finish(loss)
    recorder.written |= _restore_buffers(model, state)
    return _recording(recorder, model, inputs, loss=loss.item(), seed=seed, device=device)


def _recording(
    recorder: Recorder, model: nn.Module, inputs: tuple[torch.Tensor, ...], *, loss: float, seed: int, device: str
) -> Recording:
    root = nn.Module()
    targets = {str(node.target) for node in recorder.graph.nodes if node.op == "get_attr"}
    named = _named_tensors(model)
    attributes = {name: named[name] if name in named else recorder.attributes[name] for name in targets}
    for name, value in attributes.items():
        _set_attribute(root, name, value)
    graph_module = fx.GraphModule(root, recorder.graph, class_name="RecordedStep")
    unique = dict.fromkeys(inputs)
    return Recording(
        graph_module=graph_module,
        op_graph=op_graph_of(recorder.graph, model),
        model=model,
        inputs=tuple(unique),
        loss=loss,
        seed=seed,
        device=device,
        digests={n.name: n.meta["digest"] for n in recorder.graph.nodes if "digest" in n.meta},
        initial={name: attributes[name].detach().clone() for name in sorted(recorder.written & targets)},
    )


def _restore_buffers(model: nn.Module, state: Mapping[str, torch.Tensor]) -> set[str]:
    """Give the buffers of `model` their values in `state` again; return the names of those that had others.

    Fused kernels write to running statistics behind autograd's back, so version counters do not tell.
    """
    changed = set()
    for name, tensor in model.named_buffers():
        if name in state and state[name].shape == tensor.shape and not torch.equal(state[name], tensor):
            _overwrite(tensor, state[name])
            changed.add(name)
    return changed


def _overwrite(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Write `value` behind autograd's back: a loss that is still to be differentiated holds on to the tensor."""
    tensor.data.copy_(value)


def _in_frame(recorder: Recorder, path: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with recorder.frame(path):
        return original(*args, **kwargs)


def _named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers by qualified name; a tied tensor has each of its names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


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
