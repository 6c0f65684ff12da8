"""Configurations of transformers as JSON data, and models that are built from them again."""

import json

import pytest

from l0prune.capture.configurations import configuration_of, configured

transformers = pytest.importorskip("transformers")


def test_infinite_numbers_are_numbers_again():
    config = transformers.Mamba2Config(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, head_dim=4, num_heads=4, state_size=4,
        expand=2, n_groups=1, time_step_limit=(0.0, float("inf")),
    )  # fmt: skip
    model = transformers.Mamba2ForCausalLM(config)
    data = json.loads(json.dumps(configuration_of(model), allow_nan=False))
    again = configured(type(model), data)
    assert list(again.config.time_step_limit) == [0.0, float("inf")]
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in again.state_dict().items()} == shapes
