"""Encoders of transformers' on sound of other lengths than the example's; random weights."""

from __future__ import annotations

import pytest
import torch
from deadness import close_some
from differences import run_onnx

import l0prune

transformers = pytest.importorskip("transformers")
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
CONVOLUTIONS = {"conv_dim": (8, 8, 8), "conv_kernel": (10, 3, 3), "conv_stride": (5, 2, 2)}
POSITIONS = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}


@pytest.mark.slow
def test_wav2vec_takes_any_length(tmp_path):
    config = transformers.Wav2Vec2Config(
        **TINY, **CONVOLUTIONS, **POSITIONS, intermediate_size=24, num_feat_extract_layers=3
    )
    torch.manual_seed(0)
    model = transformers.Wav2Vec2Model(config).eval()
    l0prune.gate(model, torch.randn(2, 800), dynamic_shapes={"input_values": {1: "samples"}})
    small = l0prune.export(close_some(model, seed=1))
    assert small.rebuilt
    (piece,) = small.pieces
    assert piece.free.names == ("samples",)
    (file,) = small.save_onnx(tmp_path / "model.onnx")
    for samples in (400, 801, 1511):
        sound = torch.randn(3, samples)
        with torch.no_grad():
            expected, found = (each(sound).last_hidden_state for each in (model, small.module))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(run_onnx(file, sound)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_whispers_own_code_asks_for_one_length_and_the_survey_says_where():
    config = transformers.WhisperConfig(
        vocab_size=99, d_model=16, encoder_layers=1, decoder_layers=1, num_mel_bins=8,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
        decoder_ffn_dim=24, max_source_positions=20, pad_token_id=1,
    )  # fmt: skip
    encoder = transformers.WhisperModel(config).get_encoder().eval()
    shapes = {"input_features": {2: "frames"}}
    fixed = l0prune.survey(
        encoder, torch.randn(2, 8, 40), dynamic_shapes=shapes, own_class=False
    ).fixed
    assert list(fixed) == ["frames"]
    assert "but 40 alone: the model's code fixes it at modeling_whisper.py:" in fixed["frames"]
    assert "expected_seq_length" in fixed["frames"]
