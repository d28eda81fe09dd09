"""A GPT model behind a vision tower. Written for megatron-core 0.16.1."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from slime.backends.megatron_utils.vision.inputs import ImageTokens, VisionInputs, pack_images
from slime.backends.megatron_utils.vision.rotary import InterleavedRotaryEmbedding
from slime.backends.megatron_utils.vision.tower import build_tower, features_of_images, read_vision_config


class VisionGPTModel(GPTModel):
    """`GPTModel` whose first stage holds a vision tower, `visual`, whole on every rank.

    Features of images stand in the place of their placeholders' embeddings, and all stages rotate by places in time,
    height and width. Passes without images are those of the text model.

    Args:
        args: `hf_checkpoint` gives the tower's config, `vision_tower` says whether it trains.
    """

    def __init__(self, *, args: argparse.Namespace, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if args.position_embedding_type != "rope" or self.config.apply_rope_fusion:
            raise ValueError("a vision tower needs --position-embedding-type rope and --no-rope-fusion")
        config = read_vision_config(args.hf_checkpoint)
        self.image_tokens = ImageTokens(config.image_token_id, config.vision_config.spatial_merge_size)
        self.position_embedding_type = "mrope"
        self.mrope_section = config.text_config.rope_parameters.get("mrope_section", [11, 11, 10])
        width = int(self.config.kv_channels * args.rotary_percent)
        self.rotary_pos_emb = InterleavedRotaryEmbedding(width, args.rotary_base)
        self._trains_tower = args.vision_tower == "trained"
        if self.pre_process:
            self.visual = build_tower(config)
            for parameter in self.visual.parameters():
                parameter.requires_grad_(self._trains_tower)
                # each tensor-parallel rank has the gradient of its part of the sequence: Megatron adds them up
                parameter.sequence_parallel = self.config.sequence_parallel

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        *,
        vision: VisionInputs | None = None,
        packed_seq_params: Any = None,
        padding_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """See `GPTModel`; `position_ids` are those of `vision`, or of text."""
        positions = vision.positions if vision is not None else text_positions(input_ids, packed_seq_params)
        decoder_input = None
        if self.pre_process:
            decoder_input = self._embed(input_ids, vision)
            if padding_mask is not None and self.config.sequence_parallel:
                padding_mask = self._part_of_sequence(padding_mask[0])[None]
        return super().forward(
            input_ids,
            positions,
            attention_mask,
            decoder_input=decoder_input,
            packed_seq_params=packed_seq_params,
            padding_mask=padding_mask,
            **kwargs,
        )

    def _embed(self, input_ids: Tensor, vision: VisionInputs | None) -> Tensor:
        """[sequence, batch, hidden], the sequence cut over tensor-parallel ranks with sequence parallelism."""
        embeddings = self.embedding(input_ids=input_ids, position_ids=None)
        if vision is None or vision.pixel_values is None:
            if self._trains_tower:  # every gradient is waited for, also where there is none
                embeddings = embeddings + 0.0 * sum(parameter.sum() for parameter in self.visual.parameters())
            return embeddings
        with torch.set_grad_enabled(self._trains_tower and torch.is_grad_enabled()):
            features = features_of_images(self.visual, vision.pixel_values.to(input_ids.device), vision.grid_thw)
        index = vision.feature_index
        if self.config.sequence_parallel:
            index = self._part_of_sequence(index)
        places = (index >= 0).nonzero().flatten()
        rows = features[index[places]].to(embeddings.dtype)
        return torch.index_put(embeddings.squeeze(1), (places,), rows)[:, None]

    def _part_of_sequence(self, tokens: Tensor) -> Tensor:
        """This tensor-parallel rank's part of [packed length]."""
        return tensor_parallel.scatter_to_sequence_parallel_region(tokens)


def vision_inputs(model: torch.nn.Module, batch: dict[str, Any]) -> dict[str, VisionInputs]:
    """What a model that sees takes of a micro-batch; nothing for others.

    Raises:
        ValueError: the micro-batch has images and the model, one chunk without wrappers, does not see.
    """
    inputs = batch.get("multimodal_train_inputs") or [None] * len(batch["unconcat_tokens"])
    if isinstance(model, VisionGPTModel):
        length = batch["tokens"].shape[1]
        return {"vision": pack_images(batch["unconcat_tokens"], inputs, length, model.image_tokens)}
    if any(inputs):
        raise ValueError(f"a micro-batch has images, and the model, a {type(model).__name__}, has no vision tower")
    return {}


def text_positions(input_ids: Tensor, packed_seq_params: Any) -> Tensor:
    """[3, batch, length] for text: counted from the start of each sequence."""
    batch, length = input_ids.shape
    positions = torch.arange(length, device=input_ids.device)
    if packed_seq_params is not None:
        bounds = packed_seq_params.cu_seqlens_q.long()
        positions = torch.arange(int(bounds[-1]), device=input_ids.device)  # of all context-parallel ranks
        positions = positions - torch.repeat_interleave(bounds[:-1], bounds.diff())
    return positions.expand(3, batch, -1)
