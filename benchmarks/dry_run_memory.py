"""What `--dry-run` says about memory beside what a trainer and a real SGLang server take.

    python benchmarks/dry_run_memory.py

One small model with a large vocabulary, so that weights, optimiser state, logits and the KV cache are each tens of
megabytes or more. Prints one JSON line per figure: planned and measured bytes and their ratio. Logits are the rise of
the process's resident memory over a step that has already run once, so activations are in it.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.log_probs import peak_growth
from benchmarks.train_step import Trainer, make_model, slime_trainer
from slime.utils.dry_run.engine_memory import plan_engine_memory
from slime.utils.dry_run.memory import stage_memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=65536)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--max-tokens-per-gpu", type=int, default=1024)
    parser.add_argument("--kv-tokens", type=int, default=65536)
    args = parser.parse_args()
    args.dtype = "float32"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model_dir = Path(folder) / "model"
        make_model(args, model_dir)
        sequences = [torch.randint(0, args.vocab, (args.max_tokens_per_gpu // 4,)) for _ in range(8)]
        trainer = slime_trainer(args, model_dir, sequences, [1] * 8)
        figures = {**trainer_figures(trainer), **engine_figures(args, trainer.flags, model_dir)}
    for name, (planned, measured) in figures.items():
        ratio = round(planned / measured, 3)
        print(json.dumps({"figure": name, "planned": planned, "measured": measured, "ratio": ratio}), flush=True)


def trainer_figures(trainer: Trainer) -> dict[str, tuple[int, int]]:
    """(planned, measured) bytes of a training rank's tensors and of the rise over a step."""
    plan = stage_memory(trainer.flags, 0)
    chunks = trainer.model
    weights = sum(parameter.nbytes for chunk in chunks for parameter in chunk.parameters())
    gradients = sum(buffer.grad_data.nbytes for chunk in chunks for buffer in chunk.buffers)
    trainer.step()
    state = sum(tensor.nbytes for tensor in _state_tensors(trainer))
    rise, _, _ = peak_growth(trainer.step)
    assert plan.log_prob_buffers is not None
    return {
        "weights": (plan.weights, weights),
        "gradients": (plan.gradients, gradients),
        "optimizer state": (plan.optimizer_state, state),
        "log-prob buffers": (plan.log_prob_buffers, rise),
    }


def _state_tensors(trainer: Trainer) -> Iterator[torch.Tensor]:
    for optimizer in trainer.optimizer.chained_optimizers:
        for state in optimizer.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def engine_figures(args: argparse.Namespace, flags: Namespace, model_dir: Path) -> dict[str, tuple[int, int]]:
    """(planned, measured) bytes of the KV cache; the server logs its size."""
    from slime.backends.sglang_utils.server_args import EngineAddress, EngineShape, compute_layers
    from slime.backends.sglang_utils.server_process import ServerProcess
    from slime.utils import accelerator
    from slime.utils.misc import get_free_port

    engine = Namespace(**vars(flags))
    engine.debug_train_only, engine.rollout_num_gpus, engine.rollout_num_gpus_per_engine = False, 1, 1
    engine.sglang_tp_size, engine.sglang_max_total_tokens = 1, args.kv_tokens
    engine.sglang_skip_tokenizer_init = True
    plan = plan_engine_memory(engine)
    assert plan is not None and plan.kv_cache is not None
    device = accelerator.current()
    address = EngineAddress("127.0.0.1", get_free_port(), get_free_port())
    layers = compute_layers(engine, 0, EngineShape(num_gpus=1), address, device.engine_server_args())
    server = ServerProcess(layers, device.engine_env(), model_dir.parent / "sglang.log")
    try:
        server.wait_ready(300)
    finally:
        server.stop()
    log = server.log_path.read_text()
    found = re.search(r"KV Cache is allocated.*K size: ([\d.]+) GB, V size: ([\d.]+) GB", log)
    assert found, f"the server's log names no KV cache: {log[-500:]}"
    return {"KV cache": (plan.kv_cache, round((float(found[1]) + float(found[2])) * 2**30))}


if __name__ == "__main__":
    main()
