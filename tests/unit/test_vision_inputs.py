"""Where images stand among tokens and in space, against transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.vision.inputs import ImageTokens, image_starts, pack_images, spatial_positions
from slime.backends.megatron_utils.vision.rotary import InterleavedRotaryEmbedding
from slime.backends.megatron_utils.vision.tower import build_tower, keep_frequencies_exact

KIND = ImageTokens(token_id=7, merge_size=2)
GRIDS = torch.tensor([[1, 4, 6], [1, 8, 4]])
TOKENS = torch.tensor([1, 2, 3, *[7] * 6, 4, *[7] * 8, 5, 6])


def test_positions_equal_transformers() -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model

    model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    model.get_vision_position_ids = lambda *args, **kwargs: Qwen3_5Model.get_vision_position_ids(
        model, *args, **kwargs
    )
    kinds = (TOKENS == 7).int()
    expected, _ = Qwen3_5Model.get_rope_index(model, TOKENS[None], kinds[None], image_grid_thw=GRIDS)
    ours = spatial_positions(len(TOKENS), image_starts(TOKENS, GRIDS, KIND), GRIDS, KIND)
    assert torch.equal(ours, expected[:, 0])
    assert ours[:, -1].tolist() == [12, 12, 12], "3 + 3 of the first image, 1, 4 of the second, then two of text"


def test_angles_equal_transformers() -> None:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    section = [11, 11, 10]
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": section}
    theirs = Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(head_dim=256, rope_parameters=rope))
    positions = torch.randint(0, 300, (3, 2, 9))
    cos, sin = theirs(torch.zeros(1), positions)
    angles = InterleavedRotaryEmbedding(64, 1e7)(positions, section)[:, :, 0].transpose(0, 1)
    assert torch.allclose(angles.cos(), cos, atol=1e-6) and torch.allclose(angles.sin(), sin, atol=1e-6)


def test_a_sampled_placeholder_is_text() -> None:
    """A policy may sample the placeholder's id; the engine takes it for a token."""
    sampled = torch.cat([TOKENS, torch.tensor([7, 1])])
    inputs = {"pixel_values": torch.zeros(56, 4), "image_grid_thw": GRIDS}
    packed = pack_images([torch.tensor([7, 7, 1]), sampled], [None, inputs], 32, KIND)
    index = packed.feature_index.tolist()
    assert index[:6] == [-1] * 6 and index[6:12] == list(range(6)) and index[13:21] == list(range(6, 14))
    assert index[21:] == [-1] * 11 and packed.positions.shape == (3, 1, 32)
    assert packed.positions[:, 0, :4].tolist() == [[0, 1, 2, 0]] * 3


@pytest.mark.parametrize("tokens", [TOKENS[:12], torch.cat([TOKENS[:4], TOKENS[5:]])])
def test_images_without_their_placeholders_are_an_error(tokens: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"2 images, of \[6, 8\] features, and placeholders \(token 7\)"):
        image_starts(tokens, GRIDS, KIND)


def test_frequencies_stay_exact_in_16_bit() -> None:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig

    vision = Qwen3_5VisionConfig(depth=1, hidden_size=16, num_heads=2, intermediate_size=8, out_hidden_size=8)
    tower: Any = build_tower(SimpleNamespace(vision_config=vision))
    exact = tower.rotary_pos_emb.inv_freq.clone()
    tower.bfloat16()
    assert not torch.equal(tower.rotary_pos_emb.inv_freq.float(), exact)
    keep_frequencies_exact(tower)
    assert torch.equal(tower.rotary_pos_emb.inv_freq, exact)
