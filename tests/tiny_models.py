"""Small models that autoprec's authors did not write: transformers architectures built from configs, and a CNN.

Each entry returns a function that builds the model and one batch for it; the loss is `model(**batch).loss`.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import transformers
from torch import nn
from torch.nn import functional as F

Built: TypeAlias = tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]

VOCABULARY = 64
_NARROW = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_TEXT = {**_NARROW, "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _random(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def _ids(*shape: int) -> torch.Tensor:
    return (_random(*shape) * (VOCABULARY - 3)).long() + 3


def _text(name: str, config: str, **arguments: Any) -> Callable[[], Built]:
    def build() -> Built:
        settings = getattr(transformers, config)(**arguments)
        ids = _ids(2, 16)
        return lambda: getattr(transformers, name)(settings), {"input_ids": ids, "labels": ids}

    return build


def _images(name: str, config: str, size: int, labels: torch.Tensor, **arguments: Any) -> Callable[[], Built]:
    def build() -> Built:
        settings = getattr(transformers, config)(**arguments)
        return lambda: getattr(transformers, name)(settings), {
            "pixel_values": _random(2, 3, size, size),
            "labels": labels,
        }

    return build


def _whisper() -> Built:
    config = transformers.WhisperConfig(
        **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2},
        **{"decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": VOCABULARY},
        **{"num_mel_bins": 16, "max_source_positions": 50, "max_target_positions": 32},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    )
    batch = {"input_features": _random(2, 16, 100), "labels": _ids(2, 16)}
    return lambda: transformers.WhisperForConditionalGeneration(config), batch


def _wav2vec2() -> Built:
    config = transformers.Wav2Vec2Config(
        **{**_NARROW, "vocab_size": 32, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3)},
        **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2},
    )
    return lambda: transformers.Wav2Vec2ForCTC(config), {
        "input_values": _random(2, 2000),
        "labels": _ids(2, 8) % 31 + 1,
    }


class _Output:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class SmallCNN(nn.Module):
    """Convolutions, batch norm, pooling and in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.shrink, self.pool = nn.Conv2d(8, 8, 3, stride=2), nn.MaxPool2d(2)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(8, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> _Output:
        x = self.relu(self.norm(self.enter(images)))
        x = self.pool(self.shrink(x))
        x = x + x.sigmoid()
        return _Output(F.cross_entropy(self.head(x.mean((2, 3))), labels))


def _cnn() -> Built:
    return SmallCNN, {"images": _random(4, 1, 16, 16), "labels": torch.arange(4)}


_TWO_CLASSES = torch.tensor([0, 1])
_HEADS = {"num_key_value_heads": 2}

MODELS: Mapping[str, Callable[[], Built]] = {
    "GPT-2": _text(
        "GPT2LMHeadModel",
        "GPT2Config",
        **{"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 32},
        **{"bos_token_id": 1, "eos_token_id": 2},
    ),
    "BERT": _text("BertForMaskedLM", "BertConfig", **_TEXT),
    "Llama": _text("LlamaForCausalLM", "LlamaConfig", **_TEXT),
    "Qwen2": _text("Qwen2ForCausalLM", "Qwen2Config", **_TEXT, **_HEADS),
    "Gemma2": _text("Gemma2ForCausalLM", "Gemma2Config", **_TEXT, **_HEADS, head_dim=16),
    "Mixtral": _text("MixtralForCausalLM", "MixtralConfig", **_TEXT, **_HEADS, num_local_experts=4),
    "T5": _text(
        "T5ForConditionalGeneration",
        "T5Config",
        **{"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY},
        decoder_start_token_id=0,
    ),
    "Mamba": _text(
        "MambaForCausalLM",
        "MambaConfig",
        **{"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "use_cache": False},
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    ),
    "ViT": _images("ViTForImageClassification", "ViTConfig", 16, _TWO_CLASSES, **_NARROW, image_size=16, patch_size=4),
    "SegFormer": _images(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        64,
        (_random(2, 64, 64) * 4).long(),
        **{"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2]},
        **{"decoder_hidden_size": 32, "num_labels": 4},
    ),
    "ResNet": _images(
        "ResNetForImageClassification",
        "ResNetConfig",
        32,
        _TWO_CLASSES,
        **{"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]},
    ),
    "ConvNeXt": _images(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        32,
        _TWO_CLASSES,
        **{"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2},
    ),
    "Whisper": _whisper,
    "wav2vec2": _wav2vec2,
    "CNN": _cnn,
}
