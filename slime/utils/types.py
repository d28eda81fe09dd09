"""The nouns that travel between the parts: one sampled answer (`Sample`) and what describes it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

RolloutBatch = dict[str, Any]
"""Train data: column name → one value per sample (see `slime.ray.train_data`)."""


@dataclass
class SpecInfo:
    """Speculative decoding counters of one sample, summed over its requests."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Accepted draft tokens per drafted token."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Tokens produced per verification step."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def add(self, meta_info: dict[str, Any]) -> None:
        """Add the counters of one finished request."""
        self.spec_accept_token_num += meta_info.get("spec_accept_token_num", 0)
        self.spec_draft_token_num += meta_info.get("spec_draft_token_num", 0)
        self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
        self.completion_token_num += meta_info.get("completion_tokens", 0)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SpecInfo:
        return cls(**{f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data})


@dataclass
class PrefixCacheInfo:
    """How much of the prompts the engine found in its prefix cache, summed over the sample's requests."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def add(self, meta_info: dict[str, Any]) -> None:
        """Add the counters of one finished request."""
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PrefixCacheInfo:
        return cls(**{f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data})


@dataclass
class Sample:
    """One prompt and one answer to it, with all that training needs to know.

    `tokens` is prompt + response; `loss_mask`, `rollout_log_probs` and `teacher_log_probs` cover the response
    only, one value per response token. Any further attribute may be set; it survives `to_dict`/`from_dict`.
    """

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None
    rollout_routed_experts: torch.Tensor | None = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    def to_dict(self) -> dict[str, Any]:
        """All attributes, free ones included, with the status and the info objects as plain values."""
        data = dict(self.__dict__)
        data["status"] = self.status.value
        data["spec_info"] = self.spec_info.to_dict()
        data["prefix_cache_info"] = self.prefix_cache_info.to_dict()
        return data

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Sample:
        """The inverse of `to_dict`; unknown keys become attributes."""
        data = dict(data)
        if "status" in data:
            data["status"] = Sample.Status(data["status"])
        if isinstance(data.get("spec_info"), dict):
            data["spec_info"] = SpecInfo.from_dict(data["spec_info"])
        if isinstance(data.get("prefix_cache_info"), dict):
            data["prefix_cache_info"] = PrefixCacheInfo.from_dict(data["prefix_cache_info"])
        names = {f.name for f in dataclasses.fields(Sample)}
        sample = Sample(**{key: value for key, value in data.items() if key in names})
        for key in data.keys() - names:
            setattr(sample, key, data[key])
        return sample

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or its entry `args.reward_key` where that is set.

        Raises:
            ValueError: the reward is a dict and no reward_key picks a value, or the key is not in it.
        """
        key = getattr(args, "reward_key", None)
        if not key:
            if isinstance(self.reward, dict):
                raise ValueError(
                    f"{self.name()}: the reward is a dict with keys {sorted(self.reward)}; set --reward-key to one"
                )
            return self.reward
        if not isinstance(self.reward, dict):
            return self.reward
        if key not in self.reward:
            raise ValueError(f"{self.name()}: reward has no key {key!r} (--reward-key); it has {sorted(self.reward)}")
        return self.reward[key]

    @property
    def effective_response_length(self) -> int:
        """Number of trained response tokens."""
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length

    def name(self) -> str:
        """How messages call this sample; with the row of the data that its prompt is, where `row` says so."""
        row = getattr(self, "row", None)
        return f"sample {self.index} (group {self.group_index}{'' if row is None else f', {row}'})"

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: list[int] | None = None,
        log_probs: list[float] | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append tokens to the response and keep every per-token field as long as the response.

        Args:
            args: needed only to shape routed experts (num_layers, moe_router_topk).
            tokens: new token ids; none is fine (a request that ended at once).
            log_probs: the engine's log-prob of each token; required for trainable tokens, forbidden for others
                (those get 0.0 and mask 0).
            meta_info: the engine's `meta_info` of the request that made the tokens. Its counters, weight version
                and status are taken when it carries a finish reason and `update_terminal_info` is set.
            text: appended to `response`.

        Raises:
            ValueError: the lengths don't fit together; the message names the sample and the field.
        """
        from slime.utils.sample_append import append_engine_arrays, append_tokens, read_terminal_info

        append_tokens(self, list(tokens or []), log_probs, trainable)
        append_engine_arrays(self, args, len(tokens or []), trainable, meta_info)
        if text is not None:
            self.response += text
        if update_terminal_info and meta_info is not None and meta_info.get("finish_reason"):
            read_terminal_info(self, meta_info)
        self.check_lengths()

    def check_lengths(self) -> None:
        """Raise ValueError when a per-token field is not as long as the response."""
        fields = ("loss_mask", "rollout_log_probs", "teacher_log_probs")
        for name in fields:
            value = getattr(self, name)
            if value is not None and len(value) != self.response_length:
                raise ValueError(
                    f"{self.name()}: {name} has {len(value)} entries for response_length {self.response_length}"
                )
        if len(self.tokens) < self.response_length:
            raise ValueError(
                f"{self.name()}: tokens has {len(self.tokens)} entries for response_length {self.response_length}"
            )
        offsets = self.rollout_top_p_token_offsets
        if offsets is not None and len(offsets) != self.response_length + 1:
            raise ValueError(
                f"{self.name()}: rollout_top_p_token_offsets has {len(offsets)} entries"
                f" for response_length {self.response_length} (expected one more)"
            )


# Plug-ins reach these classes through Sample.
Sample.SpecInfo = SpecInfo  # type: ignore[attr-defined]
Sample.PrefixCacheInfo = PrefixCacheInfo  # type: ignore[attr-defined]


@dataclass(frozen=True)
class ParamInfo:
    """What a rank must know of a parameter that another rank holds."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    attrs: dict[str, Any]
    size: int
    src_rank: int


@dataclass(frozen=True)
class MultimodalType:
    """A kind of input beside text, and its placeholder in prompt strings."""

    name: str
    placeholder: str


class MultimodalTypes:
    """The kinds that prompts may hold."""

    IMAGE = MultimodalType("image", "<image>")
    VIDEO = MultimodalType("video", "<video>")
    AUDIO = MultimodalType("audio", "<audio>")

    @classmethod
    def all(cls) -> list[MultimodalType]:
        return [cls.IMAGE, cls.VIDEO, cls.AUDIO]

    @classmethod
    def get(cls, name: str) -> MultimodalType:
        """The type called `name`; ValueError lists the names there are."""
        for kind in cls.all():
            if kind.name == name:
                return kind
        raise ValueError(f"unknown multimodal type {name!r}; there are {[kind.name for kind in cls.all()]}")
