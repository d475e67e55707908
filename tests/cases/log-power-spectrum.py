"""A vocoder loss compares log power spectra with a floor of 1e-10, which fp16 does not have: silent frames give log 0."""
import math

import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "log-power-spectrum",
    "source": "qiuqiangkong/audioset_tagging_cnn#17, csteinmetz1/auraloss#63, "
              "LIHANG-HONG/birdclef2023-2nd-place-solution#2, kan-bayashi/ParallelWaveGAN#247",
    "mechanism": "the power of a quiet frame is below 6e-8 and so is the floor: both 0 in fp16, log is -inf",
    "formats": {"fp16": "unsafe", "bf16": "safe"},
    "flag_sites": [("spectrum", "pow"), ("spectrum", "add"), ("spectrum", "matmul"),
                   ("spectrum", "log10")],
    "fix_sites": [("spectrum", "pow"), ("spectrum", "add"), ("spectrum", "matmul"), ("spectrum", "log10")],
}
FRAME, HOP, BANDS = 64, 32, 16


class LogBands(nn.Module):
    """Windowed DFT as a convolution, power, triangular bands, decibels."""

    def __init__(self):
        super().__init__()
        time, window = torch.arange(FRAME), torch.hann_window(FRAME)
        phase = 2 * math.pi * torch.arange(FRAME // 2)[:, None] * time / FRAME
        self.register_buffer("cosine", (phase.cos() * window / FRAME)[:, None])
        self.register_buffer("sine", (phase.sin() * window / FRAME)[:, None])
        distance = (torch.arange(FRAME // 2)[:, None] - 2 * torch.arange(BANDS) - 1).abs()
        self.register_buffer("bands", (1 - distance / 2).clamp(min=0))

    def forward(self, wave):
        real, imaginary = (F.conv1d(wave[:, None], basis, stride=HOP) for basis in (self.cosine, self.sine))
        power = real.pow(2) + imaginary.pow(2)
        return torch.log10(torch.matmul(power.transpose(1, 2), self.bands) + 1e-10)


class Vocoder(nn.Module):
    """Refines a noisy waveform."""

    def __init__(self):
        super().__init__()
        self.inward, self.outward = nn.Conv1d(1, 24, 9, padding=4), nn.Conv1d(24, 1, 9, padding=4)
        self.layers = nn.ModuleList(nn.Conv1d(24, 24, 3, padding=2 ** i, dilation=2 ** i) for i in range(3))
        self.spectrum = LogBands()

    def forward(self, wave):
        x = self.inward(wave[:, None])
        for layer in self.layers:
            x = x + 0.5 * torch.tanh(layer(F.leaky_relu(x, 0.1)))
        return wave * (1 + torch.tanh(self.outward(x).squeeze(1)))


def loss(model, batch):
    noisy, clean = batch
    made = model(noisy)
    return F.l1_loss(made, clean) + 0.1 * F.l1_loss(model.spectrum(made), model.spectrum(clean))


def batches():
    generator = torch.Generator().manual_seed(0)
    time = torch.arange(512) / 64
    for _ in range(8):
        pitch = 6.28 * (2 + 8 * torch.rand(8, 1, generator=generator))
        loud = torch.where(torch.arange(512) < 430, 0.5, 1e-4)  # the speaker pauses
        clean = loud * (torch.sin(pitch * time) + 0.2 * torch.randn(8, 512, generator=generator))
        yield clean + 0.4 * loud * torch.randn(8, 512, generator=generator), clean


def workload():
    return autoprec.Workload(
        model=Vocoder,
        batches=batches,
        loss=loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
    )
