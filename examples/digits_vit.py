"""A small vision transformer that reads scikit-learn's handwritten digits.

pip install scikit-learn
autoprec tune examples/digits_vit.py
"""

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import autoprec

WIDTH, HEADS, DEPTH, BATCH, EPOCH = 96, 4, 4, 32, 50


class ViT(nn.Module):
    """Cuts an 8 x 8 picture into 16 patches and classifies what a learned token gathers from them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, kernel_size=2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.position = nn.Parameter(0.02 * torch.randn(1, 17, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, DEPTH, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], dim=1)
        return self.head(self.encoder(tokens + self.position)[:, 0])


def digits() -> tuple[Tensor, Tensor]:
    """Return all pictures, normalized, and their labels."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)
    return (images - images.mean()) / images.std(), torch.tensor(data.target)


def batches() -> Iterator[dict[str, Tensor]]:
    images, labels = digits()
    generator = torch.Generator().manual_seed(0)
    for _ in range(EPOCH):
        chosen = torch.randint(len(images), (BATCH,), generator=generator)
        yield {"images": images[chosen], "labels": labels[chosen]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"], label_smoothing=0.1)


def evaluate(model: nn.Module) -> float:
    """Return the fraction of all digits that the model reads wrongly."""
    images, labels = digits()
    device = next(model.parameters()).device
    with torch.no_grad():
        wrong = model(images.to(device)).argmax(-1).cpu() != labels
    return wrong.float().mean().item()


def workload() -> autoprec.Workload:
    return autoprec.Workload(
        model=ViT,
        batches=batches,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        evaluate=evaluate,
    )
