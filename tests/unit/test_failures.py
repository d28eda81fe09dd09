"""What a failed run says: the hook, the sample with its row, the user's own frames."""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from slime.ray.failures import describe, report_failure, user_frames
from slime.rollout.base_types import call_rollout_fn
from slime.rollout.hook_errors import hook_errors
from slime.rollout.sample_checks import check_samples
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args

TRACE = """\
ray::RolloutManager.generate() (pid=1, ip=127.0.0.1)
  File "/lib/site-packages/ray/worker.py", line 1, in main
    call()
  File "/home/me/rewards.py", line 12, in score
    return 1 / len(sample.label)
           ~~^~~~~~~~~~~~~~~~~~~
ZeroDivisionError: division by zero
"""


def remote_error() -> BaseException:
    """As `ray.get` raises it."""
    cause = ZeroDivisionError("division by zero")
    cause.add_note("in rewards.score, for sample 3 (group 1, prompts.jsonl:12)")
    task = RayTaskError("generate", TRACE, cause, "ray::RolloutManager.generate", 1, "127.0.0.1")
    return task.as_instanceof_cause()


def test_one_message_with_hook_sample_row_and_own_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        report_failure(Namespace(log_dir=str(tmp_path)), remote_error())
    (shown,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert shown.splitlines() == [
        "the run failed: ZeroDivisionError: division by zero",
        "  in rewards.score, for sample 3 (group 1, prompts.jsonl:12)",
        "in your code:",
        '  File "/home/me/rewards.py", line 12, in score',
        "    return 1 / len(sample.label)",
        "           ~~^~~~~~~~~~~~~~~~~~~",
        "raised in RolloutManager.generate",
        f"full traceback: {tmp_path / 'driver.log'}",
    ]
    (logged,) = [r for r in caplog.records if r.name == "traceback"]
    assert "ray::RolloutManager.generate() (pid=1" in logged.getMessage()


def test_frames_of_slime_and_libraries_are_left_out() -> None:
    try:
        check_samples(rollout_args(), [])
    except ValueError as error:
        import traceback

        frames = user_frames("".join(traceback.format_exception(error)))
        assert len(frames) == 1 and __file__ in frames[0]
        assert describe(error) == "ValueError: the rollout returned no samples"


def test_hooks_are_named_with_their_samples() -> None:
    samples = [Sample(index=i, group_index=0) for i in range(6)]
    samples[0].row = "p.jsonl:3"  # type: ignore[attr-defined]
    with pytest.raises(KeyError) as raised, hook_errors("my.hook", [[samples[0], samples[1]], samples[2:]]):
        raise KeyError("x")
    (note,) = raised.value.__notes__
    assert note.startswith("in my.hook, for sample 0 (group 0, p.jsonl:3), sample 1 (group 0), ")
    assert note.endswith(" and 2 more")


def raises(args: Any, rollout_id: int, source: Any, evaluation: bool) -> Any:
    raise OSError("no buffer server")


def test_a_rollout_function_is_named() -> None:
    with pytest.raises(OSError, match="no buffer server") as raised:
        call_rollout_fn(raises, rollout_args(), 0, None, evaluation=False)
    assert raised.value.__notes__ == [f"in {__name__}.raises"]


def test_a_pending_sample_never_trains() -> None:
    sample = Sample(index=1, tokens=[1, 2], response_length=1, loss_mask=[1], rollout_log_probs=[-1.0], reward=1.0)
    with pytest.raises(ValueError, match=r"sample 1 .*status is still pending; made by my\.generate"):
        check_samples(rollout_args(custom_generate_function_path="my.generate"), [sample])


def test_a_sample_without_prompt_tokens_never_trains() -> None:
    sample = Sample(index=1, tokens=[1, 2], response_length=2, reward=1.0, status=Sample.Status.COMPLETED)
    with pytest.raises(ValueError, match=r"sample 1 .*tokens must be prompt and response, but response_length 2"):
        check_samples(rollout_args(), [sample])
