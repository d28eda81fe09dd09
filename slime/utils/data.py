"""Prompt data sets, and the train data that a data-parallel rank fetches."""

from __future__ import annotations

import json
import logging
import random
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from slime.utils.prompt_build import build_messages
from slime.utils.read_rows import PROBED_ROWS, open_rows, read_file, require_columns, wanted_columns
from slime.utils.types import Sample

__all__ = ["Dataset", "filter_long_prompt", "get_source", "process_rollout_data", "read_file"]

logger = logging.getLogger(__name__)

WHOLE_ROWS, WHOLE_BYTES = 50_000, 64 * 2**20  # read in seconds; what is larger is looked at when it is reached
CHUNK = 1000  # prompts tokenised in one call


class Dataset:
    """The prompts of a file as samples, in file order or shuffled per epoch. Rows are read when they are asked for.

    A file of at most WHOLE_ROWS rows and WHOLE_BYTES is read once at the start: whatever is wrong in it is an error
    then, and prompts that are too long are left out. Of a larger one only the first rows are looked at, so that it
    starts at once: a broken row is an error when it is reached, and long prompts are left out when they are reached
    (`take` goes on to the next).

    Args:
        path: a file or `save_to_disk` folder, optionally `file@[a:b]`.
        max_length: prompts of more tokens are dropped (None: keep all); message-list prompts are kept.
        prompt_key, label_key, tool_key, metadata_key: columns; labels are kept as written.
        multimodal_keys: kind ("image", ...) → column that holds the row's items.
        apply_chat_template: render prompts with the tokenizer's template; otherwise strings stay as they are.
        source_name: written into each sample's metadata, for metrics per source.

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
        source_name: str | None = None,
    ) -> None:
        self.path, self.max_length, self.source_name = path, max_length, source_name
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
        self.num_too_long = 0

        keys = (prompt_key, label_key, tool_key, metadata_key, *self.multimodal_keys.values())
        columns = {key for key in keys if key is not None}
        self._rows = open_rows(path, columns)
        whole = len(self._rows) <= WHOLE_ROWS and self._rows.store.nbytes <= WHOLE_BYTES
        self._kept: Sequence[int] = self._check_rows(len(self._rows) if whole else PROBED_ROWS)
        self._filters_lazily = not whole and max_length is not None
        if not whole:
            self._kept = range(len(self._rows))
        self._order = self._kept

    def shuffle(self, new_epoch_id: int) -> None:
        """Put the file order into the random order of an epoch; it depends on seed and epoch alone."""
        if new_epoch_id == self.epoch_id:
            return
        order = array("q", self._kept)
        random.Random(self.seed + new_epoch_id).shuffle(order)
        self._order = order
        self.epoch_id = new_epoch_id

    def __len__(self) -> int:
        """Number of prompts; of a file that wasn't read whole, those that are too long are counted."""
        return len(self._order)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._sample(number) for number in self._order[index]]
        return self._sample(self._order[index])

    def take(self, position: int, count: int) -> tuple[list[Sample], int]:
        """Up to `count` prompts from `position` on, fewer at the end, and the position behind the last of them."""
        samples: list[Sample] = []
        while len(samples) < count and position < len(self._order):
            step = self._order[position : position + count - len(samples)]
            position += len(step)
            samples += self._without_long([self._sample(number) for number in step])
        return samples, position

    @property
    def samples(self) -> list[Sample]:
        """All prompts in the current order. Reads the whole file."""
        return self.take(0, len(self))[0]

    @property
    def origin_samples(self) -> list[Sample]:
        """All prompts in file order. Reads the whole file."""
        return self._without_long([self._sample(number) for number in self._kept])

    def _without_long(self, samples: list[Sample]) -> list[Sample]:
        if not self._filters_lazily:
            return samples
        fits = prompts_fit(samples, self.tokenizer, self.processor, self.max_length)
        dropped = fits.count(False)
        if dropped and not self.num_too_long:
            logger.warning(
                "%s: prompts of more than %d tokens are left out as they come; len() and epochs count them",
                self.path,
                self.max_length,
            )
        self.num_too_long += dropped
        return [sample for sample, fit in zip(samples, fits, strict=True) if fit]

    def _check_rows(self, count: int) -> array[int]:
        """Read the first rows and see whether they make samples; the numbers of those that are short enough."""
        keys: set[str] = set()
        kept, without_prompt, unmeasured = array("q"), None, 0
        for first in range(0, min(count, len(self._rows)), CHUNK):
            numbers, samples = [], []
            for number in range(first, min(first + CHUNK, count, len(self._rows))):
                row = self._rows.row(number)
                keys.update(row)
                if row.get(self.prompt_key) is None:
                    without_prompt = number if without_prompt is None else without_prompt
                else:  # a row without prompt is an error, but clearer once all keys are known
                    numbers.append(number)
                    samples.append(self._to_sample(number, row))
            fits = prompts_fit(samples, self.tokenizer, self.processor, self.max_length)
            kept.extend(number for number, fit in zip(numbers, fits, strict=True) if fit)
            unmeasured += sum(not isinstance(sample.prompt, str) for sample in samples)
        wanted = wanted_columns(self.prompt_key, self.label_key, self.tool_key, self.multimodal_keys)
        require_columns(self.path, keys, wanted)
        if without_prompt is not None:
            raise ValueError(f"{self._rows.where(without_prompt)} has no prompt under {self.prompt_key!r}")
        if not kept:
            which = "prompt" if count >= len(self._rows) else f"one of the first {count} prompts"
            raise ValueError(f"{self.path}: every {which} is longer than {self.max_length} tokens")
        report_lengths(min(count, len(self._rows)), len(kept), unmeasured, self.max_length)
        return kept

    def _sample(self, number: int) -> Sample:
        row = self._rows.row(number)
        if row.get(self.prompt_key) is None:
            raise ValueError(f"{self._rows.where(number)} has no prompt under {self.prompt_key!r}")
        return self._to_sample(number, row)

    def _to_sample(self, number: int, row: dict[str, Any]) -> Sample:
        where = self._rows.where(number)
        try:
            sample = self._convert(row)
        except Exception as error:
            raise ValueError(f"{where}: {error}") from error
        sample.row = where  # type: ignore[attr-defined]  # a free attribute: for messages
        return sample

    def _convert(self, row: dict[str, Any]) -> Sample:
        prompt = row[self.prompt_key]
        metadata = _read_metadata(row.get(self.metadata_key))
        if self.source_name is not None:
            metadata["source_name"] = self.source_name
        tools = _read_tools(row.get(self.tool_key)) if self.tool_key else None
        if tools:
            metadata["tools"] = tools
        items = {kind: row.get(key) for kind, key in self.multimodal_keys.items() if row.get(key) is not None}
        if not isinstance(prompt, str) or self.apply_chat_template or items:
            prompt = build_messages(prompt, items)
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


def _read_metadata(value: Any) -> dict[str, Any]:
    value = json.loads(value) if isinstance(value, str) and value else value
    if not isinstance(value or {}, dict):
        raise ValueError(f"metadata must be an object, this is {type(value).__name__}")
    return dict(value or {})


def _read_tools(value: Any) -> list[Any] | None:
    value = json.loads(value) if isinstance(value, str) and value else value
    if value is None or len(value) == 0:
        return None
    if isinstance(value, dict):
        raise ValueError("tools must be a list, this is an object")
    return list(value)


def filter_long_prompt(
    origin_samples: list[Sample], tokenizer: Any, processor: Any, max_length: int | None
) -> list[Sample]:
    """The samples whose prompt has at most `max_length` tokens, in their order; all of them without a limit.

    Message-list prompts have no length before a template renders them: they are kept, with one warning.
    """
    fits = prompts_fit(origin_samples, tokenizer, processor, max_length)
    kept = [sample for sample, fit in zip(origin_samples, fits, strict=True) if fit]
    unmeasured = sum(not isinstance(sample.prompt, str) for sample in origin_samples)
    report_lengths(len(origin_samples), len(kept), unmeasured, max_length)
    return kept


def prompts_fit(samples: list[Sample], tokenizer: Any, processor: Any, max_length: int | None) -> list[bool]:
    """Whether each prompt has at most `max_length` tokens; message lists do, for they have no length yet."""
    if max_length is None:
        return [True] * len(samples)
    text = [i for i, s in enumerate(samples) if isinstance(s.prompt, str) and not s.multimodal_inputs]
    lengths = dict(zip(text, _text_lengths(tokenizer, [samples[i].prompt for i in text]), strict=True))
    for i, sample in enumerate(samples):
        if isinstance(sample.prompt, str) and sample.multimodal_inputs:
            lengths[i] = len(processor(text=[sample.prompt], **sample.multimodal_inputs)["input_ids"][0])
    return [lengths.get(i, 0) <= max_length for i in range(len(samples))]


def report_lengths(count: int, kept: int, unmeasured: int, max_length: int | None) -> None:
    """Say what the length limit did, once per file."""
    if max_length is None:
        return
    if unmeasured:
        logger.warning("%d prompts are message lists: their length is not checked against %d", unmeasured, max_length)
    if kept < count:
        logger.warning("%d of %d prompts have more than %d tokens: dropped", count - kept, count, max_length)


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
