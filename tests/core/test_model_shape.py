import json

import pytest

from tevatron.core.errors import ConfigError
from tevatron.core.model_shape import ModelShape

QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B = {
    **QWEN3_8B,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


def test_parameters_of_qwen3_8b_are_those_of_its_model_card():
    """8.2 billion."""
    assert ModelShape.of(QWEN3_8B).num_params == pytest.approx(8.19e9, rel=1e-3)


def test_parameters_of_qwen3_30b_a3b_are_those_of_its_model_card():
    """30.5 billion, of which 3.3 are active, embeddings and output layer (0.3 each) included."""
    shape = ModelShape.of(QWEN3_30B_A3B)
    assert shape.num_params == pytest.approx(30.5e9, rel=2e-3)
    assert shape.num_active_params + 2 * shape.embedding_params == pytest.approx(3.3e9, rel=2e-2)


def test_shared_experts_are_counted_together():
    shape = ModelShape.of({**QWEN3_30B_A3B, "n_shared_experts": 2})
    assert shape.shared_ffn == 2 * 768


def test_a_config_in_a_folder_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    assert ModelShape.read(tmp_path).num_layers == 36


def test_a_missing_number_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(
        ConfigError, match=r"config.json: expected a positive number 'hidden_size', got None"
    ):
        ModelShape.read(tmp_path)
