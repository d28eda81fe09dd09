"""Scenario of `test_multi_token_prediction`: the layers against transformers' own modules."""

from __future__ import annotations

from typing import Any

import layout_matrix
import torch
from layout_matrix import Case
from torch import Tensor

PACKED = "--use-dynamic-batch-size --max-tokens-per-gpu 90"


def scenario_against_transformers(model_dir: str) -> None:
    torch.manual_seed(0)
    weight = 0.3
    trained = _one_step(model_dir, f"--enable-mtp-training --mtp-loss-scaling-factor {weight}")
    frozen = _one_step(model_dir, "")
    for name, gradient in frozen["gradients"].items():
        assert torch.equal(gradient, trained["gradients"][name]), f"{name}: the prediction layers changed its gradient"
    assert trained["metrics"]["train/loss"] == frozen["metrics"]["train/loss"]
    assert "train/mtp_loss" not in frozen["metrics"]
    assert all(name.startswith("mtp.") for name in trained["gradients"].keys() - frozen["gradients"].keys())
    for name, value in frozen["after"].items():
        assert name.startswith("mtp.") == torch.equal(value, frozen["before"][name]), name
    losses, gradients = _reference(model_dir, trained)
    for depth, loss in enumerate(losses, start=1):
        torch.testing.assert_close(trained["metrics"][f"train/mtp_{depth}_loss"], float(loss), rtol=1e-5, atol=0)
    torch.testing.assert_close(trained["metrics"]["train/mtp_loss"], float(sum(losses)) / 2, rtol=1e-5, atol=0)
    for name, gradient in gradients.items():
        ours = trained["gradients"][name]
        difference = (ours - weight / 2 * gradient).abs().max() / ours.abs().max()
        assert difference < 1e-4, f"{name}: {difference}"


def _one_step(model_dir: str, flags: str) -> dict[str, Any]:
    """Metrics, gradients by name, parameters before and after one supervised step, and the step's data."""
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.model import train
    from slime.backends.megatron_utils.optimizer import setup_model_and_optimizer
    from slime.backends.megatron_utils.update_weight.common import unwrap_model

    case = Case("qwen3", f"--mtp-num-layers 2 --clip-grad 0 {flags}", PACKED)
    args = layout_matrix.case_args(case, model_dir)
    args.loss_type = "sft_loss"
    layout_matrix.init_layout(args)
    model, optimizer, scheduler = setup_model_and_optimizer(args)
    data = layout_matrix.rank_rollout(args, case, model)
    chunk = unwrap_model(model[0])
    before = {name: parameter.detach().clone() for name, parameter in chunk.named_parameters()}
    counts, sizes = data["num_microbatches"][:1], data["global_batch_sizes"][:1]
    metrics = train(args, 0, model, optimizer, scheduler, get_data_iterator(data), counts, sizes)[0]
    named = dict(chunk.named_parameters())
    gradients = {name: parameter.main_grad.clone() for name, parameter in named.items() if parameter.requires_grad}
    after = {name: parameter.detach().clone() for name, parameter in named.items()}
    positions = [i for micro_batch in data["micro_batch_indices"][: counts[0]] for i in micro_batch]
    return {
        "metrics": metrics, "gradients": gradients, "before": before, "after": after, "args": args,
        "config": chunk.config, "samples": [
            tuple(data[column][i] for column in ("tokens", "response_lengths", "loss_masks")) for i in positions
        ],
    }  # fmt: skip


def _reference(model_dir: str, run: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """(loss of each layer, gradients of projections and norms), sample by sample with transformers' modules."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from slime.backends.megatron_utils.families import family_of_checkpoint, shape_from_model

    weights = {name: value.clone().requires_grad_(name.startswith("mtp.")) for name, value in run["before"].items()}
    shape, family = shape_from_model(run["args"], run["config"]), family_of_checkpoint(model_dir)

    def make(prefix: str) -> Any:
        """A transformers model; with a prefix, its first layer is that prediction layer."""
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir), attn_implementation="eager")
        state = {}
        for name, value in run["before"].items():
            if prefix and name.startswith(prefix):
                name = name.replace(prefix, "decoder.layers.0.")
            elif name.startswith("mtp.") or (prefix and name.startswith("decoder.layers.0.")):
                continue
            state |= dict(family.bind(name, shape.num_layers).to_hf(value, shape))
        model.load_state_dict(state)
        return model.eval()

    main = make("")
    ahead = [make(f"mtp.layers.{k}.transformer_layer.") for k in range(2)]
    losses = [torch.zeros(()), torch.zeros(())]
    for tokens, response, mask in run["samples"]:
        with torch.no_grad():
            hidden = main.model(tokens[None]).last_hidden_state
        rotary = main.model.rotary_emb(hidden, torch.arange(len(tokens))[None])
        causal = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
        first = len(tokens) - response
        for k, model in enumerate(ahead):
            name = f"mtp.layers.{k}."
            following = torch.cat([tokens[k + 1 :], torch.zeros(min(k + 1, len(tokens)), dtype=torch.long)])
            embedded = main.model.embed_tokens(following)[None].detach()
            both = [_norm(embedded, weights[f"{name}enorm.weight"]), _norm(hidden, weights[f"{name}hnorm.weight"])]
            projected = torch.cat(both, dim=-1) @ weights[f"{name}eh_proj.weight"].T
            out = model.model.layers[0](projected, attention_mask=causal, position_embeddings=rotary)
            hidden = _norm(out[0] if isinstance(out, tuple) else out, weights[f"{name}final_layernorm.weight"])
            log_probs = main.lm_head(hidden)[0].log_softmax(dim=-1)
            for target in range(max(first, k + 2), len(tokens)):
                token_loss = -log_probs[target - k - 2, tokens[target]]
                losses[k] = losses[k] + token_loss * mask[target - first] / mask.sum().clamp(min=1)
    losses = [loss / len(run["samples"]) for loss in losses]
    chosen = {
        name: value for name, value in weights.items() if value.requires_grad and "transformer_layer" not in name
    }
    gradients = torch.autograd.grad(sum(losses), list(chosen.values()))
    return losses, dict(zip(chosen, gradients, strict=True))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6) * weight
