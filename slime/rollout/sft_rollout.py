"""A rollout function for supervised fine-tuning: chat messages become tokens and a loss mask; nothing is generated."""

from __future__ import annotations

from typing import Any

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.utils.mask_utils import MultiTurnLossMaskGenerator, get_response_lengths
from slime.utils.misc import SingletonMeta
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.types import Sample


class _Encoder(metaclass=SingletonMeta):
    """The checkpoint's tokenizer and processor, loaded once per process."""

    def __init__(self, args: Any) -> None:
        self.tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
        self.processor = load_processor(args.hf_checkpoint, trust_remote_code=True)
        self.masks = MultiTurnLossMaskGenerator(self.tokenizer, args.loss_mask_type)


def generate_rollout(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """The next rollout_batch_size conversations; the response reaches from the first trained token to the end.

    Raises:
        ValueError: it is called for evaluation, with several samples per prompt, or for a prompt that is no message
            list with an assistant turn.
    """
    if evaluation:
        raise ValueError("the SFT rollout can't evaluate; set --eval-function-path")
    if args.n_samples_per_prompt != 1:
        raise ValueError(f"SFT needs --n-samples-per-prompt 1, it is {args.n_samples_per_prompt}")
    encoder = _Encoder(args)
    groups = data_buffer.get_samples(args.rollout_batch_size)
    for (sample,) in groups:
        _encode(args, encoder, sample)
    return RolloutFnTrainOutput(samples=groups)


def _encode(args: Any, encoder: _Encoder, sample: Sample) -> None:
    if not isinstance(sample.prompt, list):
        raise ValueError(
            f"{sample.name()}: SFT trains on message lists, this prompt is a string; give --input-key the column with"
            " the messages, without --apply-chat-template"
        )
    ids, mask = _ids_and_mask(encoder, sample)
    if sample.multimodal_inputs and encoder.processor is not None:
        ids, mask = _with_items(encoder, sample)
    (length,) = get_response_lengths([mask])
    if length == 0:
        raise ValueError(f"{sample.name()}: no assistant turn to train on")
    sample.tokens, sample.response_length, sample.loss_mask = ids, length, mask[-length:]
    sample.response = encoder.tokenizer.decode(ids[-length:])
    sample.reward = 0.0
    sample.status = Sample.Status.COMPLETED


def _ids_and_mask(encoder: Any, sample: Sample) -> tuple[list[int], list[int]]:
    from jinja2 import TemplateError

    tools, kwargs = sample.metadata.get("tools"), sample.apply_chat_template_kwargs
    try:
        return encoder.masks.get_loss_mask(sample.prompt, tools, kwargs)
    except (ValueError, TemplateError) as error:
        raise ValueError(f"{sample.name()}: {error}") from error


def _with_items(encoder: Any, sample: Sample) -> tuple[list[int], list[int]]:
    from slime.utils.processing_utils import build_processor_kwargs

    tools, kwargs = sample.metadata.get("tools"), sample.apply_chat_template_kwargs
    text = encoder.processor.apply_chat_template(sample.prompt, tools=tools, tokenize=False, **kwargs)
    output = dict(encoder.processor(text=[text], **build_processor_kwargs(sample.multimodal_inputs)))
    ids = output.pop("input_ids")[0].tolist()
    output.pop("attention_mask", None)
    sample.multimodal_train_inputs = output
    return encoder.masks.get_loss_mask_with_multimodal_alignment(sample.prompt, ids, tools, kwargs)
