"""Layouts that megatron-core trains with wrong gradients, without a word: each is refused, or can't be reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.backends.megatron_utils.arguments import optimizer_config_from_args, transformer_config_from_args
from tests.support.base_config import HF_CONFIG, BaseConfig

EXPERTS = {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "norm_topk_prob": True, "decoder_sparse_step": 1,
}  # fmt: skip
TWO = ("--actor-num-gpus-per-node", "2")
TP2 = (*TWO, "--tensor-model-parallel-size", "2")
VPP2 = (*TWO, "--pipeline-model-parallel-size", "2", "--virtual-pipeline-model-parallel-size", "2")


@pytest.fixture
def base(tmp_path: Path) -> BaseConfig:
    return BaseConfig(tmp_path)


@pytest.mark.parametrize(
    ("experts", "words", "message"),
    [
        (False, (*VPP2, "--no-overlap-p2p-communication"), "gives wrong gradients"),
        (True, (*TP2, "--sequence-parallel", "--expert-tensor-parallel-size", "1"), "gives wrong expert gradients"),
        (True, TP2, "experts with --tensor-model-parallel-size above 1 need --sequence-parallel"),
        (True, ("--moe-token-dispatcher-type", "allgather"), "can't take sequences of different lengths"),
        (False, ("--cross-entropy-loss-fusion",), "rounds gradients to bfloat16"),
    ],
    ids=["vpp_batched_p2p", "etp1", "moe_tp_without_sp", "allgather", "fused_cross_entropy"],
)
def test_refused(
    base: BaseConfig, capsys: pytest.CaptureFixture[str], experts: bool, words: tuple[Any, ...], message: str
) -> None:
    if experts:
        base.write_model_config({**HF_CONFIG, **EXPERTS})
    with pytest.raises(SystemExit):
        base.parse(*words)
    assert message in " ".join(capsys.readouterr().err.split())


def test_not_reachable(base: BaseConfig) -> None:
    """What has no flag: p2p of interleaved stages, the fused loss, a minimum learning rate of None."""
    config = transformer_config_from_args(base.parse(*VPP2))
    assert config.overlap_p2p_comm and not config.batch_p2p_comm and not config.deallocate_pipeline_outputs
    assert not config.cross_entropy_loss_fusion and config.variable_seq_lengths
    assert config.moe_token_dispatcher_type == "alltoall"
    assert optimizer_config_from_args(base.parse()).min_lr == 0.0
