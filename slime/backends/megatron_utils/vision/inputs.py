"""A packed micro-batch's images: which token stands for which piece of which image, and where it is in space."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.backends.megatron_utils.cp_utils import current_context_parallel, slice_with_cp

# What an image processor makes of images; the kind of each token follows from its id.
IMAGE_KEYS = frozenset({"pixel_values", "image_grid_thw"})
IGNORED_KEYS = frozenset({"mm_token_type_ids"})


@dataclasses.dataclass(frozen=True)
class ImageTokens:
    """How images stand among tokens: the placeholder's id, and how many patches per side each stands for."""

    token_id: int
    merge_size: int


@dataclasses.dataclass(frozen=True)
class VisionInputs:
    """A micro-batch's images.

    Attributes:
        pixel_values: [patches, values per patch] of all images, on any device; None without images.
        grid_thw: [images, 3], patches of each in time, height and width.
        feature_index: [packed length] on this context-parallel rank: the row among the images' features that takes
            the token's place, -1 for text.
        positions: [3, 1, packed length of all context-parallel ranks], places in time, height and width.
    """

    pixel_values: Tensor | None
    grid_thw: Tensor | None
    feature_index: Tensor
    positions: Tensor


def check_images(index: int, inputs: Mapping[str, Any]) -> None:
    """ValueError, naming the sample by its place, for inputs that are no images, or only half of them."""
    names = set(inputs) - IGNORED_KEYS
    if names - IMAGE_KEYS:
        unknown = ", ".join(sorted(names - IMAGE_KEYS))
        raise ValueError(f"sample {index} of this rank has {unknown} in multimodal_train_inputs: only images train")
    if names and names != IMAGE_KEYS:
        raise ValueError(f"sample {index} of this rank: multimodal_train_inputs lack {', '.join(IMAGE_KEYS - names)}")


def pack_images(
    sequences: Sequence[Tensor], inputs: Sequence[Mapping[str, Any] | None], packed_length: int, kind: ImageTokens
) -> VisionInputs:
    """The images of sequences that `pack_sequences` has packed.

    Args:
        sequences: whole token sequences.
        inputs: their `multimodal_train_inputs`.
        packed_length: with padding, on this context-parallel rank.

    Raises:
        ValueError: the placeholders in a sequence don't fit its images.
    """
    cp = current_context_parallel()
    device = sequences[0].device
    grids = [_grid(sample, device) for sample in inputs]
    indices, positions, first = [], [], 0
    for tokens, grid in zip(sequences, grids, strict=True):
        starts = image_starts(tokens, grid, kind)
        index = feature_rows(len(tokens), starts, grid, kind, first).to(device)
        first += int((index >= 0).sum())
        indices.append(slice_with_cp(index, -1, cp))
        place = spatial_positions(len(tokens), starts, grid, kind).to(device)
        positions.append(F.pad(place, (0, len(indices[-1]) * cp.size - len(tokens))))
    index, place = torch.cat(indices), torch.cat(positions, dim=1)
    index = F.pad(index, (0, packed_length - len(index)), value=-1)
    place = F.pad(place, (0, packed_length * cp.size - place.shape[1]))
    pixels = [sample["pixel_values"] for sample in inputs if sample and "pixel_values" in sample]
    return VisionInputs(
        pixel_values=torch.cat(pixels) if pixels else None,
        grid_thw=torch.cat(grids) if pixels else None,
        feature_index=index,
        positions=place[:, None],
    )


def image_starts(tokens: Tensor, grid_thw: Tensor, kind: ImageTokens) -> list[int]:
    """Where each image's placeholders begin: runs of as many as the image has features, in order.

    Runs of other lengths are text: a policy may sample the placeholder's id.
    """
    edges = torch.diff(F.pad((tokens == kind.token_id).int(), (1, 1)))
    runs = zip((edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist(), strict=True)
    sizes = _features(grid_thw, kind)
    starts: list[int] = []
    for start, end in runs:
        if len(starts) < len(sizes) and end - start == sizes[len(starts)]:
            starts.append(start)
    if len(starts) != len(sizes):
        raise ValueError(
            f"a sequence of {len(tokens)} tokens has {len(sizes)} images, of {sizes} features, and placeholders "
            f"(token {kind.token_id}) for the first {len(starts)} of them"
        )
    return starts


def feature_rows(length: int, starts: Sequence[int], grid_thw: Tensor, kind: ImageTokens, first: int) -> Tensor:
    """[length]: rows of the images' features, counted from `first`, at their placeholders; -1 elsewhere."""
    index = torch.full((length,), -1)
    for start, size in zip(starts, _features(grid_thw, kind), strict=True):
        index[start : start + size] = torch.arange(first, first + size)
        first += size
    return index


def spatial_positions(length: int, starts: Sequence[int], grid_thw: Tensor, kind: ImageTokens) -> Tensor:
    """[3, length]: multimodal rotary positions in time, height and width (Qwen2-VL, arXiv:2409.12191 §2.1).

    A text token's three are the same and count on. An image's begin where the text before it ended, and text after it
    begins as many places on as its longer side has features, as transformers 5 computes it for Qwen3.5.
    """
    pieces, here, following = [], 0, 0
    for start, (frames, height, width) in zip(starts, grid_thw.tolist(), strict=True):
        rows, columns = height // kind.merge_size, width // kind.merge_size
        text = torch.arange(start - here) + following
        following += start - here
        axes = (torch.arange(frames), torch.arange(rows), torch.arange(columns))
        cells = torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1) + following
        pieces += [text.expand(3, -1), cells]
        here, following = start + cells.shape[1], following + max(height, width) // kind.merge_size
    pieces.append((torch.arange(length - here) + following).expand(3, -1))
    return torch.cat(pieces, dim=1)


def _features(grid_thw: Tensor, kind: ImageTokens) -> list[int]:
    return (grid_thw.prod(dim=1) // kind.merge_size**2).tolist()


def _grid(inputs: Mapping[str, Any] | None, device: torch.device) -> Tensor:
    if not inputs or "image_grid_thw" not in inputs:
        return torch.empty(0, 3, dtype=torch.long, device=device)
    return torch.as_tensor(inputs["image_grid_thw"], dtype=torch.long, device=device).reshape(-1, 3)
