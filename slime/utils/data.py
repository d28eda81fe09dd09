"""Prompt data sets, and the train data that a data-parallel rank fetches."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterable
from typing import Any

from slime.utils.prompt_build import build_messages
from slime.utils.read_rows import iter_rows, read_file, require_columns, wanted_columns
from slime.utils.types import Sample

__all__ = ["Dataset", "filter_long_prompt", "get_source", "process_rollout_data", "read_file"]

logger = logging.getLogger(__name__)


class Dataset:
    """The prompts of a file as samples, in file order or shuffled per epoch.

    Args:
        path: `.jsonl` or `.parquet`, optionally `file@[a:b]`.
        max_length: prompts of more tokens are dropped (None: keep all); message-list prompts are kept.
        prompt_key, label_key, tool_key, metadata_key: columns; labels are kept as written.
        multimodal_keys: kind ("image", ...) → column that holds the row's items.
        apply_chat_template: render prompts with the tokenizer's template; otherwise strings stay as they are.

    Raises:
        ValueError: no rows, a key that no row has, a row without a prompt, placeholders that don't match the items.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        processor: Any,
        max_length: int | None,
        *,
        prompt_key: str = "text",
        multimodal_keys: dict[str, str] | None = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.processor = tokenizer, processor
        self.prompt_key, self.label_key, self.tool_key, self.metadata_key = (
            prompt_key,
            label_key,
            tool_key,
            metadata_key,
        )
        self.multimodal_keys = multimodal_keys or {}
        self.apply_chat_template = apply_chat_template
        self.apply_chat_template_kwargs = apply_chat_template_kwargs or {}
        self.seed, self.epoch_id = seed, -1

        samples: list[Sample] = []
        keys: set[str] = set()
        without_prompt = None
        for where, row in iter_rows(path):
            keys.update(row)
            if row.get(prompt_key) is None:
                without_prompt = without_prompt or where  # an error, but clearer once all keys are known
            else:
                samples.append(self._to_sample(where, row))
        self._check_keys(path, keys, without_prompt)
        self.origin_samples = filter_long_prompt(samples, tokenizer, processor, max_length)
        if not self.origin_samples:
            raise ValueError(f"{path}: every prompt is longer than {max_length} tokens")
        self.samples = self.origin_samples

    def shuffle(self, new_epoch_id: int) -> None:
        """Put the file order into the random order of an epoch; it depends on seed and epoch alone."""
        if new_epoch_id == self.epoch_id:
            return
        order = list(range(len(self.origin_samples)))
        random.Random(self.seed + new_epoch_id).shuffle(order)
        self.samples = [self.origin_samples[i] for i in order]
        self.epoch_id = new_epoch_id

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int | slice) -> Any:
        return self.samples[index]

    def _check_keys(self, path: str, keys: set[str], without_prompt: str | None) -> None:
        require_columns(
            path, keys, wanted_columns(self.prompt_key, self.label_key, self.tool_key, self.multimodal_keys)
        )
        if without_prompt is not None:
            raise ValueError(f"{without_prompt} has no prompt under {self.prompt_key!r}")

    def _to_sample(self, where: str, row: dict[str, Any]) -> Sample:
        prompt = row[self.prompt_key]
        metadata = _read_metadata(where, row.get(self.metadata_key))
        tools = _read_tools(where, row.get(self.tool_key)) if self.tool_key else None
        if tools:
            metadata["tools"] = tools
        items = {kind: row.get(key) for kind, key in self.multimodal_keys.items() if row.get(key) is not None}
        if not isinstance(prompt, str) or self.apply_chat_template or items:
            prompt = build_messages(where, prompt, items)
        inputs = self._multimodal_inputs(prompt) if items else None
        if self.apply_chat_template:
            renderer = self.processor if items and self.processor is not None else self.tokenizer
            prompt = renderer.apply_chat_template(
                prompt, tools=tools, tokenize=False, add_generation_prompt=True, **self.apply_chat_template_kwargs
            )
        label = row.get(self.label_key) if self.label_key else None
        return Sample(prompt=prompt, label=label, metadata=metadata, multimodal_inputs=inputs)

    def _multimodal_inputs(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        from slime.utils.processing_utils import process_vision_info

        return process_vision_info(messages, self.processor)


def _read_metadata(where: str, value: Any) -> dict[str, Any]:
    value = json.loads(value) if isinstance(value, str) and value else value
    if not isinstance(value or {}, dict):
        raise ValueError(f"{where}: metadata must be an object, this is {type(value).__name__}")
    return dict(value or {})


def _read_tools(where: str, value: Any) -> list[Any] | None:
    value = json.loads(value) if isinstance(value, str) and value else value
    if value is None or len(value) == 0:
        return None
    if isinstance(value, dict):
        raise ValueError(f"{where}: tools must be a list, this is an object")
    return list(value)


def filter_long_prompt(
    origin_samples: list[Sample], tokenizer: Any, processor: Any, max_length: int | None
) -> list[Sample]:
    """The samples whose prompt has at most `max_length` tokens, in their order; all of them without a limit.

    Message-list prompts have no length before a template renders them: they are kept, with one warning.
    """
    if max_length is None:
        return origin_samples
    text = [i for i, s in enumerate(origin_samples) if isinstance(s.prompt, str) and not s.multimodal_inputs]
    lengths = dict(zip(text, _text_lengths(tokenizer, [origin_samples[i].prompt for i in text]), strict=True))
    skipped = 0
    for i, sample in enumerate(origin_samples):
        if not isinstance(sample.prompt, str):
            skipped += 1
        elif sample.multimodal_inputs:
            ids = processor(text=[sample.prompt], **sample.multimodal_inputs)["input_ids"][0]
            lengths[i] = len(ids)
    if skipped:
        logger.warning("%d prompts are message lists: their length is not checked against %d", skipped, max_length)
    kept = [sample for i, sample in enumerate(origin_samples) if lengths.get(i, 0) <= max_length]
    if len(kept) < len(origin_samples):
        dropped = len(origin_samples) - len(kept)
        logger.warning("%d of %d prompts have more than %d tokens: dropped", dropped, len(origin_samples), max_length)
    return kept


def _text_lengths(tokenizer: Any, prompts: list[Any]) -> Iterable[int]:
    return [len(ids) for ids in tokenizer(prompts, add_special_tokens=False)["input_ids"]] if prompts else []


def process_rollout_data(args: Any, rollout_data_ref: list[Any], dp_rank: int, dp_size: int) -> dict[str, Any]:
    """Fetch a rank's share of the train data from the object store (see `slime.ray.train_data` for the columns).

    `total_lengths` comes for the whole batch and is cut to the rank's samples here; `local_raw_reward` is added.
    """
    import ray

    if len(rollout_data_ref) != dp_size:
        raise ValueError(f"the rollout was split for {len(rollout_data_ref)} data-parallel ranks, there are {dp_size}")
    data = dict(ray.get(rollout_data_ref[dp_rank].inner))
    partition = data["partition"]
    data["total_lengths"] = [data["total_lengths"][i] for i in partition]
    if "raw_reward" in data:
        data["local_raw_reward"] = [data["raw_reward"][i] for i in partition]
    return data


def get_source(sample: Sample) -> str | None:
    """Name of the data source that the sample came from, for metrics per source."""
    return sample.metadata.get("source_name")
