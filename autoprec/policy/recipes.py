"""Recipes by which people train on the hardware they have: GPT-style on TPUs, ResNets on RTX cards, FP8 on H100."""

from autoprec.ops import CATALOG
from autoprec.policy.policy import FLOAT8, Policy, Rule
from autoprec.policy.torch_presets import GRAD_SCALER

_LOSS_CODE = Rule(sites="@loss", format="fp32", why="the loss is computed from FP32 outputs")


def tpu_bf16(device_kind: str) -> Policy:
    """Return bf16 at every site but softmaxes, norms and losses; parameters stay FP32, which is their master.

    Flax modules with `dtype=bfloat16, param_dtype=float32` store no other copy: parameters are cast where used.

    Source: flax `linen/normalization.py`, `_compute_stats` (statistics in FP32) and `_normalize` (FP32 scale and bias);
    google-research/t5x `t5x/losses.py`, `compute_weighted_cross_entropy`, and `float32_attention_logits` of `T5Config`;
    Shazeer et al. 2018, Mesh-TensorFlow, `VariableDType` (master, slice and activation types).
    """
    kept = _kept_fp32("norm", "statistics in FP32") + _kept_fp32("softmax", "in FP32") + _kept_fp32("loss", "in FP32")
    return Policy(
        name="tpu-bf16",
        device={"kind": device_kind},
        rules=(_LOSS_CODE, *kept, Rule(sites="*", format="bf16", why="activations in bf16")),
    )


def fp16_resnet(device_kind: str) -> Policy:
    """Return fp16 but for softmaxes and losses, channels last; FP32 weights and norm statistics; dynamic loss scale.

    Source: Micikevicius et al. 2018, Mixed Precision Training, sections 3.1 (FP32 weights, rounded where used),
    3.2 (loss scaling) and 3.3 (statistics and softmax in FP32); NVIDIA/DeepLearningExamples,
    `PyTorch/Classification/ConvNets/image_classification/training.py`, with `--amp` and `--memory-format nhwc`.
    """
    norm = Rule(
        sites="*:batch_norm",
        format="fp16",
        why="fp16 activations; its parameters and statistics stay FP32, as they are stored",
    )
    kept = _kept_fp32("softmax", "in FP32") + _kept_fp32("loss", "in FP32")
    return Policy(
        name="fp16-resnet",
        device={"kind": device_kind},
        memory_format="channels_last",
        loss_scale=GRAD_SCALER,
        rules=(
            _LOSS_CODE,
            norm,
            *kept,
            Rule(sites="*", format="fp16", why="convolutions, linear and pointwise in fp16"),
        ),
    )


def fp8_h100(device_kind: str) -> Policy:
    """Return FP8 in every `linear`, FP32 in softmaxes and losses, bf16 at all other sites; FP32 parameters.

    Source: Micikevicius et al. 2022, FP8 Formats for Deep Learning, sections 3 and 4 (e4m3 operands, e5m2 gradients, a
    factor a tensor); torchao `float8/config.py`, recipe `tensorwise`; NVIDIA/TransformerEngine
    `transformer_engine/common/recipe/__init__.py`, `Float8CurrentScaling`, the recipe with the same factors.
    """
    linear = Rule(sites="*:linear", format=FLOAT8, why="e4m3 operands, e5m2 gradients, one factor a tensor and call")
    kept = _kept_fp32("softmax", "in FP32") + _kept_fp32("loss", "in FP32")
    return Policy(
        name="fp8-h100",
        device={"kind": device_kind},
        rules=(_LOSS_CODE, linear, *kept, Rule(sites="*", format="bf16", why="all that is no linear layer, in bf16")),
    )


def _kept_fp32(family: str, why: str) -> tuple[Rule, ...]:
    """Return a rule for each op of the family that may be cast."""
    ops = [op for op in CATALOG.values() if op.family == family and op.is_site]
    return tuple(Rule(sites=f"*:{op.name}", format="fp32", why=f"{op.family}: {why}") for op in ops)
