"""Rules grade the answer, not the text of the stop token behind it, in training and evaluation alike."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from slime.rollout.eval_rollout import eval_sampling_params
from slime.rollout.generate_state import base_sampling_params
from slime.rollout.rm_hub import answer_text
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.types import Sample


@pytest.mark.parametrize(
    ("response", "graded"),
    [
        ("-7<|im_end|>", "-7"),
        ("-7<|im_end|><|endoftext|>", "-7"),
        ("-7", "-7"),
        ("<|im_end|>-7", "<|im_end|>-7"),
        ("<|im_end|>", ""),
    ],
)
def test_final_special_tokens_are_not_graded(tiny_model_dir: Path, response: str, graded: str) -> None:
    args = Namespace(hf_checkpoint=str(tiny_model_dir))
    assert answer_text(args, Sample(response=response)) == graded


def test_evaluation_stops_as_training_does() -> None:
    """A setting that an evaluation set leaves open is training's, not the engine's default."""
    config = EvalDatasetConfig(name="heldout", path="heldout.jsonl", temperature=0.5)
    params = eval_sampling_params(Namespace(), config)
    assert params["no_stop_trim"] is base_sampling_params(Namespace())["no_stop_trim"] is True
    assert params["temperature"] == 0.5
