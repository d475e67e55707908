import math
from collections.abc import Iterator

import pytest
import torch

from autoprec.errors import FormatError
from autoprec.numerics import FORMATS
from autoprec.runtime.rounding import carried, round_to, stochastic_bf16

ALL = pytest.mark.parametrize("name", FORMATS)
CONTAINERS = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@pytest.fixture
def flushed_subnormals() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    yield
    torch.set_flush_denormal(False)


@CONTAINERS
@ALL
def test_returns_a_new_tensor_of_the_same_kind(name: str, dtype: torch.dtype) -> None:
    x = torch.ones(2, 3, dtype=dtype)
    rounded = round_to(x, name)
    assert (rounded.dtype, rounded.shape, rounded.device) == (dtype, x.shape, x.device)
    rounded.fill_(7.0)
    assert torch.equal(x, torch.ones(2, 3, dtype=dtype))


@CONTAINERS
@ALL
@pytest.mark.parametrize("mode", ["nearest", "toward_zero", "stochastic"])
@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), ()])
def test_no_elements_and_no_dimensions(name: str, dtype: torch.dtype, mode: str, shape: tuple[int, ...]) -> None:
    x = torch.full(shape, 1.0, dtype=dtype)
    assert torch.equal(round_to(x, name, mode=mode), x)  # type: ignore[arg-type]


@CONTAINERS
@ALL
def test_strides_do_not_matter(name: str, dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 3, 60, dtype=dtype).reshape(3, 4, 5)
    for view in (x.permute(2, 0, 1), x[:, ::2, 1:], x[0, 0, :1].expand(4, 1)):
        assert torch.equal(round_to(view, name, saturate=True), round_to(view.contiguous(), name, saturate=True))
        assert torch.equal(round_to(view, name), round_to(view.contiguous(), name))


@CONTAINERS
def test_special_values(dtype: torch.dtype) -> None:
    x = torch.tensor([math.nan, -math.inf, math.inf, -0.0, 0.0, -1e9], dtype=dtype)
    assert str(round_to(x, "fp16").tolist()) == "[nan, -inf, inf, -0.0, 0.0, -inf]"
    assert str(round_to(x, "fp16", saturate=True).tolist()) == "[nan, -65504.0, 65504.0, -0.0, 0.0, -65504.0]"
    assert str(round_to(x, "fp8_e4m3").tolist()) == "[nan, nan, nan, -0.0, 0.0, nan]"
    assert str(round_to(x, "fp8_e4m3", saturate=True).tolist()) == "[nan, -448.0, 448.0, -0.0, 0.0, -448.0]"
    assert str(round_to(x, "fp8_e5m2", mode="toward_zero").tolist()) == "[nan, -inf, inf, -0.0, 0.0, -57344.0]"


def test_tf32_and_fp8_need_no_device_support() -> None:
    x = torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11, 0.3])
    assert round_to(x[:2], "tf32").tolist() == [1.0, 1 + 2.0**-9]
    assert round_to(x[2:], "fp8_e4m3").item() == 0.3125
    assert round_to(x[2:], "fp8_e5m2").item() == 0.3125


def test_fp64_is_rounded_once() -> None:
    # In two roundings, through fp32, this becomes the tie 1 + 2^-11, which goes down to 1.
    x = torch.tensor(1 + 2.0**-11 + 2.0**-40, dtype=torch.float64)
    assert x.float().half().item() == 1.0
    assert round_to(x, "fp16").item() == 1 + 2.0**-10


@pytest.mark.usefixtures("flushed_subnormals")
@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("saturate", [False, True])
def test_subnormals_survive_a_device_that_flushes_them(name: str, saturate: bool) -> None:
    quantum = FORMATS[name].min_subnormal
    num_quanta = round(quantum / 2.0**-149)
    x = torch.tensor([3 * num_quanta, -num_quanta], dtype=torch.int32)
    signs = torch.tensor([0, -(2**31)], dtype=torch.int32)
    subnormal = (x.abs() | signs).view(torch.float32)
    rounded = round_to(subnormal, name, saturate=saturate)
    assert rounded.view(torch.int32).tolist() == subnormal.view(torch.int32).tolist()


def test_stochastic_is_unbiased_and_seeded() -> None:
    x = torch.full((20_000,), 1 + 0.3 * 2.0**-7)

    def mean(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return (round_to(x, "bf16", mode="stochastic", generator=generator) - 1).mean() * 2**7

    # The standard deviation of the mean of 20000 draws is sqrt(0.3 * 0.7 / 20000) = 0.0032; five of them.
    assert mean(0).item() == pytest.approx(0.3, abs=0.016)
    assert torch.equal(mean(1), mean(1))
    assert not torch.equal(mean(1), mean(2))


def test_stochastic_without_a_generator_follows_the_global_seed() -> None:
    x = torch.full((100,), 1.001)
    torch.manual_seed(3)
    first = round_to(x, "bf16", mode="stochastic")
    torch.manual_seed(3)
    assert torch.equal(round_to(x, "bf16", mode="stochastic"), first)


def test_other_modes_draw_nothing() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    round_to(torch.ones(3), "fp8_e4m3")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("saturate", [False, True])
def test_no_gradient_flows(saturate: bool) -> None:
    x = torch.nn.Parameter(torch.ones(3))
    rounded = round_to(x, "bf16", saturate=saturate)
    assert type(rounded) is torch.Tensor
    assert not rounded.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(FormatError, match=rf"cannot round a {dtype} tensor; convert it to torch.float32"):
        round_to(torch.zeros(2, dtype=dtype), "bf16")


def test_wrong_arguments() -> None:
    x = torch.ones(2)
    with pytest.raises(FormatError, match="fp17"):
        round_to(x, "fp17")
    with pytest.raises(FormatError, match='"up" is not a rounding mode; modes: nearest, toward_zero, stochastic'):
        round_to(x, "bf16", mode="up")  # type: ignore[arg-type]
    with pytest.raises(FormatError, match='mode "nearest" draws no random numbers'):
        round_to(x, "bf16", generator=torch.Generator())


def test_the_carry_is_the_rounding_for_every_random_number() -> None:
    """Of the 2^16 random numbers exactly `dropped` carry, for numbers of every size and either sign."""
    random = torch.arange(1 << 16, dtype=torch.int32)
    for dropped in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        for upper in (0x3F80, 0x0001, 0x7F7E, 0x0080, -0x4080):  # 1, subnormal, near the largest, smallest normal, -1
            x = torch.tensor((upper << 16) | dropped, dtype=torch.int32).view(torch.float32)
            rounded = carried(x.expand(1 << 16), random)
            towards_zero = torch.tensor(upper << 16, dtype=torch.int32).view(torch.float32)
            away = torch.tensor((upper + 1) << 16, dtype=torch.int32).view(torch.float32)
            assert (rounded.float() == away).sum() == dropped
            assert (rounded.float() == towards_zero).sum() == (1 << 16) - dropped


def test_stochastic_bf16_has_no_bias() -> None:
    """The mean of n roundings of 1 + 0.3 ulp has a standard error of ulp sqrt(0.21 / n); five of them are allowed."""
    ulp, count = 2.0**-7, 1 << 16
    x = torch.full((count,), 1 + 0.3 * ulp)
    rounded = stochastic_bf16(x, torch.Generator().manual_seed(1))
    assert rounded.dtype == torch.bfloat16
    assert rounded.unique().tolist() == [1, 1 + ulp]
    bias = (rounded.double().mean() - x.double().mean()) / ulp
    assert abs(bias) < 5 * math.sqrt(0.21 / count)
    again = stochastic_bf16(x, torch.Generator().manual_seed(1))
    assert torch.equal(rounded, again)


def test_stochastic_bf16_of_special_values_strides_and_nothing() -> None:
    exact = [math.nan, math.inf, -math.inf, -0.0, 0.0, 1.5, -3.0, 2.0**-133]
    generator = torch.Generator()
    for _ in range(20):
        assert str(stochastic_bf16(torch.tensor(exact), generator).tolist()) == str(exact)
    odd = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # NaNs of low payload
    assert stochastic_bf16(odd, generator).isnan().all()
    assert stochastic_bf16(torch.ones(0, 3), generator).shape == (0, 3)
    view = torch.arange(12.0).reshape(3, 4).T[::2]
    assert torch.equal(stochastic_bf16(view, generator).float(), view)


def test_each_of_the_four_numbers_of_a_draw_is_uniform() -> None:
    """The mean of n roundings of 1.5 gaps is n/2 with a standard deviation of sqrt(n)/2; five of them are allowed."""
    count = 1 << 14
    up = stochastic_bf16(torch.full((count, 4), 1 + 2.0**-8), torch.Generator().manual_seed(0)) > 1
    assert ((up.sum(0) - count / 2).abs() < 2.5 * math.sqrt(count)).all()
    both = (up.double() - 0.5).T @ (up.double() - 0.5) / count  # products of different columns have the mean 0
    assert (both - torch.diag(both.diag())).abs().max() < 5 * 0.25 / math.sqrt(count)
