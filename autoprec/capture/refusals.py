"""What cannot be recorded, and what to do about it."""

import torch

from autoprec.capture.facts import source_line
from autoprec.errors import CaptureError

_TRACING = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)


def refuse_modes(tensors: list[torch.Tensor]) -> None:
    """Return if a call on `tensors` computes what it would compute alone.

    Raises: `CaptureError` under autocast and while torch traces.
    """
    if any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING):
        raise CaptureError(
            f"recording: {source_line()} runs while torch traces it (make_fx, torch.func.linearize, a fake tensor "
            "mode), so there is nothing to record; call the function itself (torch.func.jvp instead of linearize)"
        )
    device = tensors[0].device.type if tensors else "cpu"
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        raise CaptureError(
            f"recording: {source_line()} runs under torch.autocast, so its FP32 run is not FP32; "
            "remove autocast from the workload's model and loss: choosing the formats is autoprec's job"
        )


def unseen(tensor: torch.Tensor) -> CaptureError:
    """Return the error for a tensor that has a way back to the parameters through calls that were not recorded."""
    return CaptureError(
        f"recording: {source_line()} uses a tensor of shape {tuple(tensor.shape)} that requires grad and that no "
        f"recorded call made (its grad_fn is {getattr(tensor.grad_fn, 'name', str)()}). Code that torch functions do "
        "not show made it: torch.jit.script or torch.jit.trace, as_subclass, a torch.func transform that autoprec does "
        "not know, or an earlier step. Use the plain Python original of scripted code, write the rest as plain torch "
        "calls, or as one torch.autograd.Function"
    )


def unsaved_write() -> CaptureError:
    """Return the error for a parameter that was written to before its values could be copied."""
    return CaptureError(
        f"recording: {source_line()} writes to a parameter inside a call that autoprec cannot look into; "
        "make that parameter a buffer, or write to it in forward itself"
    )
