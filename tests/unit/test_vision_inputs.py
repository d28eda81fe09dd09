"""Where images stand among tokens and in space, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.vision.inputs import ImageTokens, image_starts, pack_images, spatial_positions
from slime.backends.megatron_utils.vision.rotary import InterleavedRotaryEmbedding
from slime.backends.megatron_utils.vision.tower import build_tower, keep_frequencies_exact
from slime.ray.train_data import convert_samples_to_train_data, split_train_data_by_dp
from slime.rollout.engine_request import prompt_token_ids
from slime.utils.data import Dataset
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args
from tests.support.toy_tokenizer import byte_tokenizer

TEMPLATE = """
{%- if messages[0].content is string %}{{ messages[0].content }}{% else %}{% for part in messages[0].content -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
{%- endfor %}{% endif %}"""
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


def image_processor(tokenizer: Any) -> Any:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    images = Qwen2VLImageProcessor(size={"shortest_edge": 256, "longest_edge": 4096}, **sizes)
    videos = Qwen3VLVideoProcessor(**sizes)
    return Qwen3VLProcessor(images, tokenizer, videos, chat_template=TEMPLATE)


def test_images_of_a_row_reach_its_rank(tmp_path: Path) -> None:
    """D9: a file whose first row has none; each sample keeps its own images, through the split over ranks."""
    from PIL import Image

    from slime.backends.megatron_utils.data import DataIterator, get_batch

    sizes = {"wide": (40, 24), "tall": (16, 32)}
    for name, size in sizes.items():
        Image.effect_noise(size, 50).convert("RGB").save(tmp_path / f"{name}.png")
    both = [str(tmp_path / f"{name}.png") for name in sizes]
    rows = [
        {"input": "none"},
        {"input": "<image>a<image>b", "pictures": both},
        {"input": "<image>", "pictures": both[1:]},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [*rows, rows[0]])))
    tokenizer = byte_tokenizer(TEMPLATE)
    tokenizer.add_tokens(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"], special_tokens=True)
    processor = image_processor(tokenizer)
    options: dict[str, Any] = {
        "prompt_key": "input",
        "multimodal_keys": {"image": "pictures"},
        "apply_chat_template": True,
    }
    data = Dataset(str(tmp_path / "rows.jsonl"), tokenizer, processor, None, **options)
    state = SimpleNamespace(processor=processor, tokenizer=tokenizer, encode=tokenizer.encode)
    samples = data[0:4]
    for index, sample in enumerate(samples):
        sample.tokens = [*prompt_token_ids(state, sample), index]
        sample.index, sample.group_index, sample.response_length = index, index, 1
        sample.reward, sample.rollout_log_probs, sample.status = 1.0, [-0.5], Sample.Status.COMPLETED
    args = rollout_args(global_batch_size=4, micro_batch_size=2)
    args.use_dynamic_batch_size = args.balance_data = args.balance_by_flops = False
    parallel = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    kind = ImageTokens(processor.image_token_id, 2)
    expected = {0: 0, 1: 10 * 6 // 4 + 4 * 8 // 4, 2: 4 * 8 // 4, 3: 0}
    for shard in split_train_data_by_dp(args, convert_samples_to_train_data(args, samples), parallel):
        batch = get_batch(DataIterator(shard, shard["micro_batch_indices"]), ("tokens", "multimodal_train_inputs"), 1)
        images = pack_images(
            batch["unconcat_tokens"], batch["multimodal_train_inputs"], batch["tokens"].shape[1], kind
        )
        count = sum(expected[i] for i in shard["partition"])
        assert (images.feature_index >= 0).sum() == count
        assert images.pixel_values is not None and len(images.pixel_values) == 4 * count
        assert torch.equal(batch["tokens"][0] == kind.token_id, images.feature_index >= 0)
