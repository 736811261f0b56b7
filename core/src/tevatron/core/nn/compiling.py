"""Compiles a model's layers around packed attention, for training and serving alike.

It owns what is compiled and what is left out, so that passes of any number of prompts and tokens share the code.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface, PreTrainedModel

from tevatron.core.errors import ConfigError
from tevatron.core.nn.attention import ATTENTION, packed_attention


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each decoder layer around its attention; raises `ConfigError` where the model has none."""
    layers = [one for one in model.modules() if type(one).__name__.endswith("DecoderLayer")]
    if not layers:
        raise ConfigError(
            f"compilation: model_type '{model.config.model_type}' has no decoder layers that can be compiled"
        )
    # The lengths of a pass are plain numbers, and compiled code would be made anew for each pass.
    uncompiled = torch.compiler.disable(packed_attention)  # type: ignore[no-untyped-call]
    AttentionInterface.register(ATTENTION, uncompiled)
    for layer in layers:
        layer.compile(dynamic=True)
