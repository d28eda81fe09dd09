"""One generate request to an engine: what is sent for a sample, and what its answer holds."""

from __future__ import annotations

import math
import sys
import zlib
from typing import Any

from slime.utils.http_utils import RETRY_SECONDS
from slime.utils.types import Sample

SESSION_HEADER = "X-SMG-Routing-Key"
SESSION_POLICIES = ("consistent_hashing", "manual")  # router policies that look at the session


def router_url(address: tuple[str, int], endpoint: str) -> str:
    """`http://host:port/endpoint`, with brackets round an IPv6 host."""
    host, port = address
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"http://{host}:{port}{endpoint}"


def sampling_seed(rollout_seed: int, sample_index: int) -> int:
    """A sample's seed for deterministic sampling: the same in every run and after a resume."""
    return zlib.crc32(f"{rollout_seed}:{sample_index}".encode()) & 0x7FFFFFFF


def prompt_token_ids(state: Any, sample: Sample) -> list[int]:
    """Token ids of the sample's prompt: a string as it stands, a message list through the chat template.

    With images the processor makes the ids; what it makes beside them is kept as `multimodal_train_inputs`.
    """
    prompt = sample.prompt
    if not isinstance(prompt, str):
        renderer = state.processor if sample.multimodal_inputs and state.processor is not None else state.tokenizer
        tools = sample.metadata.get("tools")
        prompt = renderer.apply_chat_template(
            prompt, tools=tools, tokenize=False, add_generation_prompt=True, **sample.apply_chat_template_kwargs
        )
    if not sample.multimodal_inputs:
        return list(state.encode(prompt))  # the same for every answer of a group
    from slime.utils.processing_utils import build_processor_kwargs

    output = dict(state.processor(text=[prompt], **build_processor_kwargs(sample.multimodal_inputs)))
    ids = output.pop("input_ids")[0].tolist()
    output.pop("attention_mask", None)
    sample.multimodal_train_inputs = output or None
    return ids


def check_token_ids(args: Any, sample: Sample, tokenizer: Any) -> None:
    """An id outside the model's vocabulary kills the engine: refuse it here.

    Raises:
        ValueError: naming the sample, the position and the id.
    """
    vocab_size = getattr(args, "vocab_size", None) or len(tokenizer)
    if sample.tokens and not (min(sample.tokens) >= 0 and max(sample.tokens) < vocab_size):
        position = next(i for i, token in enumerate(sample.tokens) if not 0 <= token < vocab_size)
        raise ValueError(
            f"{sample.name()}: token id {sample.tokens[position]} at position {position} is outside the model's"
            f" vocabulary of {vocab_size}"
        )


def response_budget(args: Any, sample: Sample, max_new_tokens: int | None) -> int:
    """Tokens that the sample may still get: of its own limit, and of the context's."""
    budgets = []
    if max_new_tokens is not None:
        budgets.append(max_new_tokens - sample.response_length)
    if getattr(args, "rollout_max_context_len", None) is not None:
        budgets.append(args.rollout_max_context_len - len(sample.tokens))
    if not budgets:
        raise ValueError("neither --rollout-max-response-len nor --rollout-max-context-len bounds the answers")
    return min(budgets)


def retry_limits(args: Any) -> dict[str, Any]:
    """How long `post` tries again. With fault tolerance it may take as long as new engines take to start."""
    if not getattr(args, "use_fault_tolerance", False):
        return {}
    return {"max_retries": sys.maxsize, "retry_seconds": args.engine_start_timeout + RETRY_SECONDS}


def build_payload(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> dict[str, Any]:
    """Body of the request: ids in, ids and log-probs out."""
    payload: dict[str, Any] = {"sampling_params": sampling_params, "return_logprob": True}
    if getattr(args, "use_rollout_routing_replay", False):
        # What earlier weights sampled keeps the experts that sampled it.
        known = 0 if sample.rollout_routed_experts is None else len(sample.rollout_routed_experts)
        payload |= {"return_routed_experts": True, "routed_experts_start_len": known}
    images = (sample.multimodal_inputs or {}).get("images")
    if not images:
        return payload | {"input_ids": sample.tokens}
    from slime.utils.processing_utils import encode_image_for_rollout_engine

    if not isinstance(sample.prompt, str):
        raise ValueError(f"{sample.name()}: prompts with images need --apply-chat-template")
    return payload | {
        "text": sample.prompt + sample.response,
        "image_data": [encode_image_for_rollout_engine(image) for image in images],
    }


def next_payload(args: Any, state: Any, sample: Sample, sampling_params: dict[str, Any]) -> dict[str, Any] | None:
    """Body of the request for the (rest of the) sample's answer; fills in the prompt's ids.

    None when there is none to send, with the reason as the sample's status: the rollout is being stopped (ABORTED),
    or nothing is left of its budget (TRUNCATED).

    Args:
        state: the process's `GenerateState`.
    """
    if state.aborted:
        sample.status = Sample.Status.ABORTED
        return None
    if sample.response_length == 0:
        sample.tokens = prompt_token_ids(state, sample)
    check_token_ids(args, sample, state.tokenizer)
    budget = response_budget(args, sample, sampling_params["max_new_tokens"])
    if budget <= 0:
        sample.status = Sample.Status.TRUNCATED
        return None
    return build_payload(args, sample, {**sampling_params, "max_new_tokens": budget})


def request_headers(args: Any, sample: Sample) -> dict[str, str] | None:
    """Keeps a session on one engine where the router's policy can, as slime's own router does."""
    sticky = getattr(args, "use_slime_router", False) or getattr(args, "router_policy", None) in SESSION_POLICIES
    if sample.session_id and sticky:
        return {SESSION_HEADER: sample.session_id}
    return None


def read_output(
    args: Any, sample: Sample, output: dict[str, Any], payload: dict[str, Any] | None = None
) -> tuple[list[int], list[float]]:
    """(token ids, log-probs) of an answer to `payload`.

    Notes in its meta_info at which token its routed experts start, which the engine doesn't say.

    Raises:
        ValueError: the answer lacks what was asked for; names the sample.
    """
    meta = output["meta_info"]
    entries = meta.get("output_token_logprobs") or []
    if not entries and meta.get("completion_tokens", 0) > 0:
        raise ValueError(f"{sample.name()}: the engine returned tokens without output_token_logprobs")
    if entries and getattr(args, "use_rollout_routing_replay", False) and meta.get("routed_experts") is None:
        raise ValueError(
            f"{sample.name()}: --use-rollout-routing-replay is set, but the engine returned no routed experts:"
            " start engines with --sglang-enable-return-routed-experts, and a router that passes the request on whole"
        )
    if payload is not None and meta.get("routed_experts") is not None:
        meta.setdefault("routed_experts_start_len", payload.get("routed_experts_start_len", 0))
    if not entries:
        return [], []
    values, ids, *_ = zip(*entries, strict=True)
    tokens, log_probs = list(ids), list(values)
    if None in values or not all(map(math.isfinite, values)):
        raise ValueError(f"{sample.name()}: the engine returned a log-prob that is not finite")
    return tokens, log_probs
