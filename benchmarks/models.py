"""The nine models of the benchmarks at real sizes, with the blocks at which people checkpoint them by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.models import UNet

__all__ = ["MODELS", "Workload", "gpt2"]


@dataclass
class Workload:
    """A model in training mode with inputs, loss and context of one step.

    Attributes:
        outside_bytes: what the backward of the loss takes beside the gradient that it returns.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], torch.Tensor]
    blocks: list[nn.Module]
    context: Callable[[], Any] = contextlib.nullcontext
    outside_bytes: int = 0

    def step(self, model: nn.Module | None = None) -> torch.Tensor:
        """Forward, loss and backward of ``model`` (by default the plain one); returns the loss."""
        with self.context():
            # The output gets no name: it would hold the logits while backward runs.
            loss = self.loss((model or self.model)(*self.args, **self.kwargs))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def _class_loss(output: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, torch.arange(output.shape[0], device=output.device))


def _own_loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


def _mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _image_model(model: nn.Module, batch: int, blocks: list[nn.Module], side: int = 224) -> Workload:
    return Workload(model.train(), (torch.randn(batch, 3, side, side),), {}, _class_loss, blocks)


def resnet50() -> Workload:
    """ResNet-50 at 4x3x224x224."""
    from torchvision.models import resnet50 as make

    model = make()
    stages = (model.layer1, model.layer2, model.layer3, model.layer4)
    return _image_model(model, 4, [block for stage in stages for block in stage])


def densenet121() -> Workload:
    """DenseNet-121 at 2x3x224x224."""
    from torchvision.models import densenet121 as make

    model = make()
    return _image_model(model, 2, [m for m in model.modules() if type(m).__name__ == "_DenseLayer"])


def unet() -> Workload:
    """U-Net with BatchNorm, 32 base channels, at 1x3x256x256."""
    model = UNet(32, 4).train()
    blocks = [*model.down, *model.merge]
    return Workload(model, (torch.randn(1, 3, 256, 256),), {}, _mean_square, blocks)


def vit_b16() -> Workload:
    """ViT-B/16 at 2x3x224x224."""
    from torchvision.models import vit_b_16

    model = vit_b_16()
    return _image_model(model, 2, list(model.encoder.layers))


def swin_t() -> Workload:
    """Swin-T at 2x3x224x224, stochastic depth on."""
    from torchvision.models import swin_t as make

    model = make()
    return _image_model(model, 2, [m for m in model.modules() if type(m).__name__ == "SwinTransformerBlock"])


def convnext_tiny() -> Workload:
    """ConvNeXt-T at 2x3x224x224, stochastic depth on."""
    from torchvision.models import convnext_tiny as make

    model = make()
    return _image_model(model, 2, [m for m in model.modules() if type(m).__name__ == "CNBlock"])


def gpt2(layers: int = 12, length: int = 512) -> Workload:
    """GPT-2 of GPT-2 small's width at 1x512 with the loss inside and dropout on."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False)).train()
    ids = torch.randint(0, 50257, (1, length))
    return Workload(model, (ids,), {"labels": ids}, _own_loss, list(model.transformer.h))


def llama_bf16(layers: int = 12) -> Workload:
    """A Llama-like model, 12 layers of width 512, at 1x512 under bf16 autocast."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    ids = torch.randint(0, 8192, (1, 512))
    work = Workload(model, (ids,), {"labels": ids}, _own_loss, list(model.model.layers))
    work.context = lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    return work


def mlp_chain() -> Workload:
    """64 times [Linear(512), GELU] at 4096 rows."""
    blocks = [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(64)]
    for block in blocks:
        nn.init.kaiming_normal_(block[0].weight)  # the default would let 64 layers vanish into denormal numbers
    x = torch.randn(4096, 512)
    outside = 2 * x.nbytes  # the square of the output is differentiated in three steps
    return Workload(nn.Sequential(*blocks), (x,), {}, _mean_square, list(blocks), outside_bytes=outside)


MODELS: dict[str, Callable[[], Workload]] = {
    "resnet50": resnet50,
    "unet": unet,
    "densenet121": densenet121,
    "convnext_tiny": convnext_tiny,
    "swin_t": swin_t,
    "vit_b16": vit_b16,
    "gpt2_small": gpt2,
    "llama_bf16": llama_bf16,
    "mlp_chain": mlp_chain,
}
