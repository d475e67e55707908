"""Where torch.compile stands in custom autograd Functions, whose code no policy casts.

In eager code the autograd engine runs the backward, where no mode sees it, and the grad mode tells of the forward where
gradients are on. torch.compile traces the backward right after the forward, while the cast mode is on, and where
gradients are off it traces the forward as any other code.
"""

from typing import Any

# What torch.compile calls both halves of such a Function; the backward is traced as a part of the forward.
_FUNCTION = "autograd.Function"


def in_function() -> bool:
    """Return whether torch.compile traces what a custom autograd Function runs. Only while it traces."""
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.misc import AutogradFunctionContextVariable

    frame: Any = InstructionTranslator.current_tx().output.current_tx
    while frame is not None:
        if any(isinstance(value, AutogradFunctionContextVariable) for value in frame.symbolic_locals.values()):
            return True
        frame = getattr(frame, "parent", None)
    return False


def in_backward_of_function() -> bool:
    """Return whether torch.compile traces the backward of a custom autograd Function. Only while it traces.

    What is called there must not be counted either: Dynamo refuses a backward that changes what lies outside of it.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tracer = InstructionTranslator.current_tx().output.current_tracer
    while tracer.parent is not None:
        if tracer.source_target == _FUNCTION == tracer.parent.source_target:
            return True
        tracer = tracer.parent
    return False


# torch.compile calls them while it traces and does not trace them: what `assume_constant_result` would set.
in_function._dynamo_marked_constant = True  # type: ignore[attr-defined]
in_backward_of_function._dynamo_marked_constant = True  # type: ignore[attr-defined]
