"""Where prompts come from: groups of samples out of a data set, and a buffer of groups to continue or retry."""

from __future__ import annotations

import abc
import copy
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime.rollout.hook_errors import hook_errors
from slime.rollout.prompt_sources import PromptCursor, PromptMix
from slime.utils.data import Dataset
from slime.utils.misc import load_function
from slime.utils.prompt_data import parse_prompt_data
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

COUNTERS = ("sample_offset", "epoch_id", "sample_group_index", "sample_index", "metadata")


def state_path(root: str | Path, rollout_id: int) -> Path:
    """Where the position after a rollout is saved, in a run's folder of checkpoints."""
    return Path(root) / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt"


class DataSource(abc.ABC):
    """A source of prompt groups that can be stopped and resumed."""

    @abc.abstractmethod
    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """The next `num_samples` groups, each of n_samples_per_prompt samples."""

    @abc.abstractmethod
    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Give groups back, to be served again."""

    @abc.abstractmethod
    def save(self, rollout_id: int) -> None:
        """Write the position after rollout `rollout_id`."""

    @abc.abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Go to the position after rollout `rollout_id`."""


class RolloutDataSource(DataSource):
    """Prompts of `--prompt-data`, epoch after epoch; of several files in the ratio of their weights.

    Each group gets the next `group_index`, each sample the next `index`; both count on through epochs and resumes.
    Without a data set (`--disable-rollout-global-dataset`) the groups are empty samples for a rollout function that
    brings its own prompts.

    Attributes:
        lock: held while groups are handed out, given back or saved; a rollout function may do so from a thread.
        outstanding: set by a rollout function that holds groups between rollouts. Given a rollout's id it returns
            those that a checkpoint after it must hold, as nested lists of `Sample.to_dict`.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.sample_group_index = 0
        self.sample_index = 0
        self.metadata: dict[str, Any] = {}
        self.lock = threading.RLock()
        self.outstanding: Callable[[int], list[Any]] | None = None
        self.prompts = self._open_prompts() if args.rollout_global_dataset else None

    @property
    def dataset(self) -> Any:
        """The data set; of several the first, None without any."""
        return self.prompts.cursors[0].dataset if self.prompts is not None else None

    @property
    def epoch_id(self) -> int:
        """How often the (first) data set was gone through."""
        return self.prompts.cursors[0].epoch_id if self.prompts is not None else 0

    @property
    def sample_offset(self) -> int:
        """Position in its present epoch."""
        return self.prompts.cursors[0].offset if self.prompts is not None else 0

    def _open_prompts(self) -> PromptMix | None:
        from slime.utils.processing_utils import load_processor, load_tokenizer

        args = self.args
        if args.prompt_data is None:
            if args.debug_train_only:
                return None  # the samples come from a dump
            raise ValueError("--prompt-data is not set; without prompts use --disable-rollout-global-dataset")
        files = parse_prompt_data(args.prompt_data)
        tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
        processor = load_processor(args.hf_checkpoint, trust_remote_code=True)
        cursors = []
        for file in files:
            dataset = Dataset(
                file.path,
                tokenizer,
                processor,
                args.rollout_max_prompt_len,
                prompt_key=args.input_key,
                multimodal_keys=args.multimodal_keys,
                label_key=args.label_key,
                tool_key=args.tool_key,
                metadata_key=args.metadata_key,
                seed=args.rollout_seed,
                apply_chat_template=args.apply_chat_template,
                apply_chat_template_kwargs=args.apply_chat_template_kwargs,
                source_name=file.name if len(files) > 1 else None,
            )
            weight = file.weight if file.weight is not None else float(len(dataset))
            cursors.append(PromptCursor(file.name, dataset, weight, args.rollout_shuffle))
        return PromptMix(cursors)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        with self.lock:
            prompts = self.prompts.take(num_samples) if self.prompts is not None else [Sample()] * num_samples
            return [self._make_group(prompt) for prompt in prompts]

    def _make_group(self, prompt: Sample) -> list[Sample]:
        group = []
        for _ in range(self.args.n_samples_per_prompt):
            sample = copy_prompt(prompt)
            sample.group_index, sample.index = self.sample_group_index, self.sample_index
            self.sample_index += 1
            group.append(sample)
        self.sample_group_index += 1
        return group

    def add_samples(self, samples: list[list[Sample]]) -> None:
        raise RuntimeError(
            f"{type(self).__name__} has no buffer; use RolloutDataSourceWithBuffer to give samples back"
        )

    def save(self, rollout_id: int) -> None:
        """Write to `{args.save}/rollout/global_dataset_state_dict_{rollout_id}.pt`, whole or not at all."""
        import torch

        path = state_path(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        with self.lock:
            state = self.state_dict(rollout_id)
        torch.save(state, partial)
        partial.replace(path)

    def load(self, rollout_id: int | None = None) -> None:
        """Read what `save` wrote, from under `args.load`; start at the beginning where there is nothing.

        Raises:
            ValueError: the state is of a data set of another size, so its position means nothing here.
        """
        import torch

        if rollout_id is None or rollout_id < 0 or self.args.load is None:
            return
        path = state_path(self.args.load, rollout_id)
        if not path.is_file():
            logger.warning("no data source state %s: prompts start at the beginning", path)
            return
        self.load_state_dict(torch.load(path, weights_only=False))  # our own file; samples may hold any object
        logger.info("data source goes on at epoch %d, prompt %d", self.epoch_id, self.sample_offset)

    def state_dict(self, rollout_id: int | None = None) -> dict[str, Any]:
        """All that `load_state_dict` needs to go on exactly here, after rollout `rollout_id`."""
        size = len(self) if self.prompts is not None else None
        state = {name: getattr(self, name) for name in COUNTERS} | {"dataset_size": size}
        return state if self.prompts is None else state | {"sources": self.prompts.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`.

        Raises:
            ValueError: the state is of other data sets.
        """
        size = state.get("dataset_size")
        if size is not None and self.prompts is not None and size != len(self):
            raise ValueError(f"the saved position is in a data set of {size} prompts, this one has {len(self)}")
        self.sample_group_index, self.sample_index = state["sample_group_index"], state["sample_index"]
        self.metadata = state["metadata"]
        if self.prompts is None:
            return
        if "sources" in state:
            self.prompts.load_state(state["sources"])
        else:  # a state of slime's own making has one data set's position
            self.prompts.cursors[0].go_to(state["epoch_id"], state["sample_offset"])

    def __len__(self) -> int:
        return len(self.prompts) if self.prompts is not None else 0


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Serves groups that were given back first, then new prompts. The buffer is saved and loaded with the position."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.buffer: list[list[Sample]] = []
        self.rollout_id: int | None = None  # set by the rollout function, for the buffer filter
        self.buffer_filter = load_function(args.buffer_filter_path) if args.buffer_filter_path else pop_first

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        with self.lock:
            groups = self._from_buffer(num_samples)
            missing = num_samples - len(groups)
            if missing and self.prompts is None:
                raise ValueError(
                    f"{num_samples} groups were asked for, the buffer gave {len(groups)} and there is no data set"
                    " to take the rest from (--disable-rollout-global-dataset)"
                )
            return [*groups, *super().get_samples(missing)] if missing else groups

    def _from_buffer(self, num_samples: int) -> list[list[Sample]]:
        if not self.buffer:
            return []
        with hook_errors(self.args.buffer_filter_path):
            groups = self.buffer_filter(self.args, self.rollout_id, self.buffer, num_samples)
        if len(groups) > num_samples:
            raise ValueError(f"the buffer filter returned {len(groups)} groups, {num_samples} were asked for")
        return groups

    def add_samples(self, samples: list[list[Sample]]) -> None:
        for group in samples:
            if len(group) != self.args.n_samples_per_prompt:
                raise ValueError(
                    f"a group of {len(group)} samples was given back, --n-samples-per-prompt is"
                    f" {self.args.n_samples_per_prompt}"
                )
        with self.lock:
            self.buffer.extend(samples)

    def state_dict(self, rollout_id: int | None = None) -> dict[str, Any]:
        held = self.outstanding(rollout_id) if self.outstanding is not None and rollout_id is not None else []
        return super().state_dict(rollout_id) | {"buffer": [*held, *(_to_dicts(group) for group in self.buffer)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.buffer = [_from_dicts(group) for group in state.get("buffer", [])]

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        return self.metadata

    def get_buffer_length(self) -> int:
        return len(self.buffer)


def pop_first(args: Any, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """Take the oldest groups out of the buffer."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def copy_prompt(prompt: Sample) -> Sample:
    """A sample of its own with the prompt's content. Inputs that nobody edits (images) are shared."""
    sample = copy.copy(prompt)
    for name, value in vars(prompt).items():
        if isinstance(value, list) and name != "prompt":
            setattr(sample, name, list(value))
        elif name in ("prompt", "metadata", "apply_chat_template_kwargs", "train_metadata", "label"):
            setattr(sample, name, copy.deepcopy(value) if value else copy.copy(value))
    sample.spec_info, sample.prefix_cache_info = copy.copy(prompt.spec_info), copy.copy(prompt.prefix_cache_info)
    return sample


def _to_dicts(group: list[Any]) -> list[Any]:
    return [_to_dicts(item) if isinstance(item, list) else item.to_dict() for item in group]


def _from_dicts(group: list[Any]) -> list[Any]:
    return [_from_dicts(item) if isinstance(item, list) else Sample.from_dict(item) for item in group]
