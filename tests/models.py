"""Small versions of the models that people train: same code, fewer channels.

Sizes are such that activations weigh more than parameters wherever the architecture allows it, and that one
training step takes well under a second on two cores. :func:`get` imports a model's library on first use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

__all__ = ["MODELS", "ModelCase", "UNet", "chain", "get"]

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class ModelCase:
    """A model with inputs, its loss, and the context of its forward."""

    name: str
    build: Callable[[], Built]
    loss: Callable[[Any], torch.Tensor]
    context: Callable[[], Any] | None = None
    library: str = "torch"


MODELS: dict[str, ModelCase] = {}


def get(name: str) -> ModelCase:
    """The model ``name``; skips the test if its library is missing."""
    case = MODELS[name]
    pytest.importorskip(case.library)
    return case


def _register(
    loss: Callable[[Any], torch.Tensor], library: str = "torch", context: Callable[[], Any] | None = None
) -> Any:
    def add(build: Callable[[], Built]) -> Callable[[], Built]:
        name = build.__name__
        MODELS[name] = ModelCase(name, build, loss, context, library)
        return build

    return add


def _class_loss(output: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, torch.arange(output.shape[0], device=output.device) % output.shape[1])


def _own_loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


@functools.cache
def _weights(shape: torch.Size) -> torch.Tensor:
    return torch.linspace(-1, 1, shape.numel()).reshape(shape)


def _weighted_sum(output: torch.Tensor) -> torch.Tensor:
    return (output * _weights(output.shape)).sum()


def _bf16() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def _images(batch: int, side: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 3, side, side),)


@_register(_class_loss, "torchvision")
def resnet() -> Built:
    """In-place ReLU and additions, BatchNorm; the blocks of ResNet-50, fewer of them."""
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [1, 2, 2, 1], num_classes=10).train(), _images(4, 64), {}


@_register(_class_loss, "torchvision")
def densenet121() -> Built:
    """Concatenations of everything before, BatchNorm, in-place ReLU."""
    from torchvision.models import DenseNet

    model = DenseNet(growth_rate=8, block_config=(2, 3, 4, 2), num_init_features=16, num_classes=10)
    return model.train(), _images(2, 64), {}


@_register(_class_loss, "torchvision")
def vit_b16() -> Built:
    """Multi-head attention and a class token."""
    from torchvision.models import VisionTransformer

    model = VisionTransformer(32, 4, 4, 4, 48, 96, num_classes=10, dropout=0.1)
    return model.train(), _images(4, 32), {}


@_register(_class_loss, "torchvision")
def swin_t() -> Built:
    """Shifted windows (roll, pad, permute), patch merging, stochastic depth."""
    from torchvision.models import SwinTransformer

    model = SwinTransformer([4, 4], 16, [2, 2, 2], [1, 2, 4], [4, 4], stochastic_depth_prob=0.2, num_classes=10)
    return model.train(), _images(2, 64), {}


class UNet(nn.Module):
    """Encoder and decoder with BatchNorm, whose skips are concatenated."""

    def __init__(self, width: int = 32, depth: int = 4, classes: int = 2) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(self._block(3 if i == 0 else widths[i - 1], widths[i]) for i in range(depth + 1))
        self.up = nn.ModuleList(nn.ConvTranspose2d(widths[i + 1], widths[i], 2, 2) for i in reversed(range(depth)))
        self.merge = nn.ModuleList(self._block(2 * widths[i], widths[i]) for i in reversed(range(depth)))
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)]
            layers += [nn.ReLU(inplace=True)]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images ``(n, 3, h, w)`` to logits ``(n, classes, h, w)``; ``h`` and ``w`` are multiples of 2**depth."""
        skips: list[torch.Tensor] = []
        for index, block in enumerate(self.down):
            x = block(x if index == 0 else functional.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        logits: torch.Tensor = self.head(x)
        return logits


@_register(_weighted_sum)
def unet() -> Built:
    """Skips that live from the first layers to the last."""
    return UNet(8, 3).train(), _images(2, 64), {}


@_register(_class_loss, "timm")
def convnext() -> Built:
    """Depthwise convolutions, layer scale, stochastic depth."""
    from timm.models.convnext import ConvNeXt

    model = ConvNeXt(depths=(1, 2, 2, 1), dims=(16, 32, 48, 64), drop_path_rate=0.3, num_classes=10)
    return model.train(), _images(2, 64), {}


def _tokens(vocabulary: int, batch: int, length: int) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
    ids = torch.randint(0, vocabulary, (batch, length))
    return (ids,), {"labels": ids.clone()}


@_register(_own_loss, "transformers")
def gpt2() -> Built:
    """Loss inside, dropout on, a key/value cache among the outputs."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=211, n_positions=64, n_embd=48, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)
    return (GPT2LMHeadModel(config).train(), *_tokens(211, 2, 48))


@_register(_own_loss, "transformers")
def bert() -> Built:
    """Loss inside, dropout on, an attention mask."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=211,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=64,
    )
    ids, kwargs = _tokens(211, 2, 48)
    mask = torch.ones(2, 48, dtype=torch.long)
    mask[1, 40:] = 0
    return BertForMaskedLM(config).train(), ids, {**kwargs, "attention_mask": mask}


@_register(_own_loss, "transformers", _bf16)
def llama_bf16() -> Built:
    """Rotary embeddings, RMSNorm in fp32, grouped heads, bf16 autocast."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=211,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return (LlamaForCausalLM(config).train(), *_tokens(211, 2, 48))


def chain(layers: int, width: int, rows: int, activation: type[nn.Module] | None = None) -> Built:
    """``layers`` linear layers of ``width``, the last one of 1, with ``activation`` between, at ``rows`` rows."""
    modules: list[nn.Module] = []
    for _ in range(layers - 1):
        modules += [nn.Linear(width, width)] + ([activation()] if activation else [])
    modules.append(nn.Linear(width, 1))
    return nn.Sequential(*modules), (torch.randn(rows, width),), {}


@_register(_weighted_sum)
def chain64() -> Built:
    """64 linear layers, nothing else."""
    return chain(64, 16, 512)


@_register(_weighted_sum)
def chain64_gelu() -> Built:
    """64 linear layers, a GELU after each."""
    return chain(64, 16, 512, nn.GELU)


@_register(_class_loss)
def tutorial_a() -> Built:
    """Linear, ReLU, Softmax."""
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 10), nn.Softmax(dim=1))
    return model, (torch.randn(64, 20),), {}


@_register(_class_loss, "torchvision")
def tutorial_b() -> Built:
    """ResNet-50, all of it, with a new head of ten classes."""
    from torchvision.models import resnet50 as make

    model = make()
    model.fc = nn.Linear(model.fc.in_features, 10)
    return model.train(), _images(2, 64), {}


@_register(_weighted_sum)
def tutorial_c() -> Built:
    """Three linear layers of a thousand."""
    return nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(3))), (torch.randn(64, 1000),), {}
