"""Settings of experts that have no meaning, or that would silently be wrong; samples' experts; whom requests go to."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.rollout import engine_choice
from slime.rollout.engine_choice import EngineList, generate_url
from slime.rollout.sample_checks import check_routed_experts
from slime.utils.types import Sample
from tests.support.base_config import BaseConfig
from tests.unit.test_config_rules import refused

MOE = ["--num-experts", "8", "--moe-ffn-hidden-size", "32"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--use-routing-replay"], "--use-routing-replay needs a model with experts"),
        (["--moe-enable-routing-replay"], "--moe-enable-routing-replay alone replays nothing"),
        ([*MOE, "--use-routing-replay", "--moe-router-fusion"], "--moe-router-fusion can't replay"),
        ([*MOE, "--use-routing-replay", "--loss-type", "sft_loss"], "without advantages there is no such pass"),
        (
            [*MOE, "--moe-router-load-balancing-type", "global_aux_loss", "--moe-aux-loss-coeff", "0.1"],
            "its gradient shrinks with the number of data-parallel ranks",
        ),
        ([*MOE, "--moe-aux-loss-coeff", "0.1", "--calculate-per-token-loss"], "scale the router's loss by all tokens"),
        ([*MOE, "--moe-router-enable-expert-bias"], "needs --moe-router-score-function sigmoid"),
        (["--enable-mtp-training"], "--enable-mtp-training needs --mtp-num-layers"),
    ],
)
def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], part: str) -> None:
    assert part in refused(BaseConfig(tmp_path), capsys, *words)


ARGS = Namespace(num_layers=2, moe_router_topk=2, num_experts=4, use_rollout_routing_replay=True)


def sample(rows: int | None, mask: list[int], experts: int = 4) -> Sample:
    """Two tokens of prompt, and experts of the first `rows` tokens."""
    tokens = list(range(2 + len(mask)))
    chosen = None if rows is None else torch.arange(rows * 4).reshape(rows, 2, 2) % experts
    return Sample(
        index=7, group_index=1, tokens=tokens, response_length=len(mask), loss_mask=mask, rollout_routed_experts=chosen
    )


def test_experts_are_needed_up_to_the_last_trained_token() -> None:
    for fine in (sample(4, [1, 1, 1]), sample(2, [1, 0, 0]), sample(0, [0, 0, 0]), sample(4, [1, 0, 1])):
        check_routed_experts(ARGS, fine)


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        (sample(None, [1]), r"sample 7 \(group 1\) has no rollout_routed_experts"),
        (sample(3, [1, 1, 1]), "3 rows for 5 tokens, of which 4"),
        (sample(6, [1, 1, 1]), "6 rows for 5 tokens"),
        (sample(4, [1, 1, 1], experts=9), "ids from 0 to 8, the model has experts 0 to 3"),
    ],
)
def test_experts_that_are_missing_or_foreign_name_the_sample(wrong: Sample, part: str) -> None:
    """P15"""
    with pytest.raises(ValueError, match=part):
        check_routed_experts(ARGS, wrong)


def test_requests_with_experts_go_past_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ["http://b:1", "http://a:1"]

    async def urls(args: Any) -> list[str]:
        return known

    monkeypatch.setattr(engine_choice, "worker_urls", urls)
    args = Namespace(sglang_router_ip="r", sglang_router_port=9, use_rollout_routing_replay=True)

    def choose(engines: EngineList, session: str | None = None) -> str:
        return asyncio.run(generate_url(args, engines, Sample(session_id=session)))

    engines = EngineList()
    assert sorted(choose(engines) for _ in range(4)) == ["http://a:1/generate"] * 2 + ["http://b:1/generate"] * 2
    assert len({choose(engines, "s1") for _ in range(4)}) == 1
    known.clear()
    with pytest.raises(RuntimeError, match="r:9 knows no engine"):
        choose(EngineList())
    args.use_rollout_routing_replay = False
    assert choose(engines) == "http://r:9/generate"
