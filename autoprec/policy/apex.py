"""NVIDIA Apex's amp, opt levels O1, O2 and O3, as policies.

Source: NVIDIA/apex: `apex/amp/frontend.py` (classes O1, O2, O3: the properties of each level), `apex/amp/lists/`
(`torch_overrides.py`, `functional_overrides.py`, `tensor_overrides.py`: the lists of O1), `apex/amp/amp.py`, `init`
(how the lists are applied, recurrent layers), `apex/amp/_initialize.py`, `_initialize` (casts of inputs and outputs),
`apex/fp16_utils/fp16util.py`, `convert_network` (what O2 keeps in FP32), `apex/amp/scaler.py`, `LossScaler`.
The method is that of Micikevicius et al. 2018, Mixed Precision Training, sections 3.1 and 3.2.
"""

from collections.abc import Mapping
from types import MappingProxyType

from autoprec.policy.parameters import Parameters
from autoprec.policy.policy import AS_GIVEN, PROMOTE, LossScale, Policy, Rule

# `LossScaler` has a ceiling and, by default, no floor: this one is the end of what an fp32 scale can hold.
_DYNAMIC = LossScale(
    kind="dynamic",
    initial=2.0**16,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=2000,
    minimum=2.0**-126,
    maximum=2.0**24,
)

# The ops of each list under the names of the catalog; torch, Tensor and functional spellings of an op are one op here.
_FP16 = """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu
    linear addmm addmv addr matmul mm mv addbmm baddbmm bmm
    rnn_relu rnn_tanh gru lstm rnn_relu_cell rnn_tanh_cell gru_cell lstm_cell
"""
_FP32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow
    cumprod cumsum dist norm prod std sum var renorm
    interpolate softplus softmin log_softmax softmax layer_norm group_norm normalize cosine_similarity
    poisson_nll_loss cosine_embedding_loss cross_entropy hinge_embedding_loss kl_div l1_loss mse_loss
    margin_ranking_loss multilabel_margin_loss multi_margin_loss nll_loss binary_cross_entropy_with_logits
    smooth_l1_loss soft_margin_loss triplet_margin_loss
"""
_WIDEST = "addcdiv addcmul atan2 cross bilinear dot add div mul sub equal cat stack"

_LISTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        _FP16: ("fp16", "Apex O1: FP16_FUNCS"),
        _FP32: ("fp32", "Apex O1: FP32_FUNCS"),
        _WIDEST: (PROMOTE, "Apex O1: CASTS, cast to the widest argument"),
    }
)
_LOSS_CODE = Rule(sites="@loss", format=AS_GIVEN, why="Apex leaves code outside the model alone; it reads FP32 outputs")


def apex_o1(device_kind: str) -> Policy:
    """Return O1: functions on two lists cast their arguments, FP32 weights, dynamic loss scale."""
    rules = [Rule(sites=f"*:{op}", format=fmt, why=why) for names, (fmt, why) in _LISTS.items() for op in names.split()]
    rules.append(Rule(sites="*", format=AS_GIVEN, why="on no list of Apex O1"))
    return Policy(
        name="apex-o1", device={"kind": device_kind}, loss_scale=_DYNAMIC, outputs="computed", rules=tuple(rules)
    )


def apex_o2(device_kind: str) -> Policy:
    """Return O2: the model in fp16 except for batch norms, FP32 masters, FP32 outputs, dynamic loss scale."""
    why = "Apex O2: model.half() and fp16 inputs; batch norms keep FP32 parameters and statistics"
    return Policy(
        name="apex-o2",
        device={"kind": device_kind},
        parameters=Parameters(storage="fp16", master="fp32", batch_norm="fp32"),
        loss_scale=_DYNAMIC,
        outputs="fp32",
        rules=(_LOSS_CODE, Rule(sites="*", format="fp16", why=why)),
    )


def apex_o3(device_kind: str) -> Policy:
    """Return O3: all of the model in fp16, no masters, no loss scale, FP32 outputs."""
    return Policy(
        name="apex-o3",
        device={"kind": device_kind},
        parameters=Parameters(storage="fp16"),
        outputs="fp32",
        rules=(_LOSS_CODE, Rule(sites="*", format="fp16", why="Apex O3: model.half() and fp16 inputs")),
    )
