"""In layer 2 of four, gate and up projection agree on the first token: each is below 500, their product is not fp16."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "swiglu-massive-token",
    "source": "ggml-org/llama.cpp#25389, wandb/senpai#2954, huggingface/transformers#12225",
    "mechanism": "silu(400) * 400 = 1.6e5 on a massive activation, before down_proj brings it back",
    "formats": {"fp16": "unsafe", "bf16": "safe"},
    "flag_sites": [("layers.2.mlp", "mul")],
    "fix_sites": [("layers.2.mlp", "mul"), ("layers.2.mlp.down_proj", "linear")],
}
VOCAB, WIDTH, HIDDEN, HEADS, LENGTH, BOS, LOUD = 90, 64, 96, 4, 24, 0, 5


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.post_norm, self.mlp = nn.RMSNorm(WIDTH), GatedMLP()

    def forward(self, x):
        x = x + self.attention(self.input_norm(x))
        return x + self.mlp(self.post_norm(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        with torch.no_grad():  # as pretrained: the first token owns a channel; hidden unit 0 of layer 2 reads it
            self.embed.weight.mul_(0.3)
            self.embed.weight[:, LOUD] = 0
            self.embed.weight[BOS, LOUD] = 30
            for layer in self.layers:
                layer.attention.o_proj.weight[LOUD] = 0
                layer.mlp.down_proj.weight[LOUD] = 0
            mlp = self.layers[2].mlp
            mlp.gate_proj.weight[0, LOUD] = 52
            mlp.up_proj.weight[0, LOUD] = 52
            mlp.down_proj.weight[:, 0] = 0
            mlp.down_proj.weight[LOUD, 0] = 0.004

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        text = torch.randint(1, VOCAB, (12, LENGTH), generator=generator)
        text[:, 1::2] = (text[:, ::2] * 5) % (VOCAB - 1) + 1
        text[:, 0] = BOS
        yield text


def loss(model, text):
    return F.cross_entropy(model(text)[:, :-1].flatten(0, 1), text[:, 1:].flatten())


def workload():
    return autoprec.Workload(
        model=Decoder,
        batches=batches,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=5e-4),
    )
