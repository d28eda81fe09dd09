"""Seconds and GB/s of each weight route to a real SGLang server, beside a memcpy and a plain gloo broadcast.

    python -m benchmarks.weight_sync

A trainer (this process, one rank) holds a model of SmolLM2-135M's shape with random weights in bf16, 269 MB. Each
route is slime's own updater with its engine actor: pause, flush, transfer, version, continue. Yardsticks run in turn
with the routes, so that a busy machine slows all: a copy of the same bytes in memory, and a gloo broadcast of them to
another process. The median of `--repeats` counts. Deltas: after 1 % and 3 % of the values have changed by one step of
bf16.

Aims: tensor at least 25 % of the copy's speed, distributed at least 60 % of the broadcast's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}
ROUTES = {
    "tensor": "--colocate --no-offload-train --no-offload-rollout",
    "distributed": "--rollout-num-gpus 1",
    "disk": "--rollout-num-gpus 1 --update-weight-transport disk --update-weight-disk-dir {folder}/disk",
    "delta": (
        "--rollout-num-gpus 1 --update-weight-mode delta --update-weight-transport disk "
        "--update-weight-disk-dir {folder}/delta --update-weight-local-checkpoint-dir {folder}/local"
    ),
}
BOUNDS = {"tensor": ("memcpy", 0.25), "distributed": ("gloo broadcast", 0.60)}
BROADCAST_SECONDS = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=SMOLLM2["num_hidden_layers"], help="fewer for a quick look")
    parser.add_argument("--buckets", type=int, nargs="+", default=[512], help="sizes in MiB; each is measured")
    parser.add_argument("--folder", type=Path, help="for the disk routes; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        make_model(Path(folder) / "model", options.layers)
        bench = Bench(Path(folder))
        try:
            for size in options.buckets:
                bench.use_buckets(size)
                report(f"buckets of {size} MiB", bench.measure(options.repeats), bench)
        finally:
            bench.close()


def make_model(directory: Path, layers: int) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    from tools.make_tiny_model import build_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(**{**SMOLLM2, "num_hidden_layers": layers}, architectures=["LlamaForCausalLM"])
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)


class Bench:
    """The trainer, its engine and the yardsticks."""

    def __init__(self, folder: Path) -> None:
        import ray

        from slime.backends.megatron_utils import initialize
        from slime.backends.megatron_utils.optimizer import build_model
        from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers
        from slime.ray.utils import Lock
        from slime.utils.misc import get_free_port

        ray.init(num_cpus=4, include_dashboard=False, object_store_memory=256 * 1024**2, log_to_driver=False)
        self.flags = {name: parse(folder, words.format(folder=folder)) for name, words in ROUTES.items()}
        args = self.flags["distributed"]
        self.engine = start_engine(args)
        initialize.init_process_group(args, 0, 1, "127.0.0.1", get_free_port())
        initialize.init(args)
        model = build_model(args, "actor")
        self._weights = dict(named_params_and_buffers(args, model))
        self._lock = ray.remote(Lock).options(num_cpus=0).remote()
        self._model = model
        self.updaters: dict[str, Any] = {}
        self.use_buckets(512)
        self.size = self.updaters["tensor"]._iterator.total_bytes
        self._source = torch.randint(0, 255, (self.size,), dtype=torch.uint8)
        self._target = torch.zeros_like(self._source)
        self._broadcast = Broadcast(self._source)
        self.wire: dict[str, float] = {}

    def use_buckets(self, mib: int) -> None:
        """Make the updaters anew, with buckets of this size."""
        from slime.backends.megatron_utils.update_weight.base import create_updater

        for name, flags in self.flags.items():
            if name in self.updaters:
                self.updaters[name].disconnect_rollout_engines()
            flags.update_weight_buffer_size = mib * 1024**2
            updater = create_updater(flags, self._model, lambda: self._weights)
            updater.connect_rollout_engines([self.engine], self._lock, [1], [0], [{"tp_size": 1, "pp_size": 1}])
            self.updaters[name] = updater

    def measure(self, repeats: int) -> dict[str, list[float]]:
        """Seconds of each; the first round, in which routes set themselves up, does not count."""
        import ray

        steps: dict[str, Callable[[], Any]] = {
            "memcpy": lambda: self._target.copy_(self._source),
            "gloo broadcast": self._broadcast.run,
            "tensor": self.updaters["tensor"].update_weights,
            "distributed": self.updaters["distributed"].update_weights,
            "disk": self.updaters["disk"].update_weights,
            "delta 1 %": self.updaters["delta"].update_weights,
            "delta 3 %": self.updaters["delta"].update_weights,
        }
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(1 + repeats):
            for name, step in steps.items():
                if (route := name.split()[0]) in self.flags:
                    ray.get(self.engine.use.remote(self.flags[route]), timeout=60.0)
                if route == "delta":
                    self._change(float(name.split()[1]) / 100)
                started = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - started)
                if route == "delta":
                    self.wire[name] = self.updaters["delta"].pop_metrics()["update_weights_wire_bytes"]
        return {name: times[1:] for name, times in seconds.items()}

    @torch.no_grad()
    def _change(self, share: float) -> None:
        for weight in self._weights.values():
            bits = weight.data.view(-1).view(torch.int16)
            bits[torch.randperm(bits.numel())[: int(share * bits.numel())]] += 1

    def close(self) -> None:
        import ray

        self._broadcast.close()
        self.updaters["distributed"].disconnect_rollout_engines()
        ray.get(self.engine.shutdown.remote(), timeout=60.0)
        ray.shutdown()


def parse(folder: Path, words: str) -> Namespace:
    from slime.utils.arguments import parse_args

    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"input": "1+1=", "label": "2"}\n')
    common = f"""
        --hf-checkpoint {folder}/model --prompt-data {prompts} --label-key label --log-dir {folder}/log
        --actor-num-gpus-per-node 1 --num-rollout 1 --rollout-batch-size 1 --n-samples-per-prompt 2
        --global-batch-size 2 --rollout-max-response-len 8 --bf16 --sglang-dtype bfloat16
    """
    return parse_args(argv=f"{common} {words}".split())


def start_engine(args: Namespace) -> Any:
    import ray

    from slime.backends.sglang_utils.sglang_engine import SGLangEngine

    class Engine(SGLangEngine):
        def use(self, flags: Namespace) -> None:
            """Be the engine of another route."""
            self.args = flags

    env = {"SLIME_ACCELERATOR": "cpu", "PYTHONPATH": os.getcwd()}
    options: dict[str, Any] = {"num_cpus": 1, "max_concurrency": 8, "runtime_env": {"env_vars": env}}
    engine = ray.remote(Engine).options(**options).remote(args, 0, base_gpu_id=0)
    address = ray.get(engine.reserve_address.remote(), timeout=120.0)
    ray.get(engine.init.remote(**address), timeout=args.engine_start_timeout + 60.0)
    return engine


class Broadcast:
    """One gloo broadcast of all bytes from this process to another."""

    def __init__(self, source: torch.Tensor) -> None:
        from slime.utils.misc import get_free_port

        self._source = source
        port = get_free_port()
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=receive, args=(port, source.numel(), theirs), daemon=True)
        self._process.start()
        self._group = join_pair(port, 0)

    def run(self) -> None:
        self._connection.send("receive")
        torch.distributed.broadcast(self._source, group=self._group, group_src=0)
        self._connection.recv()

    def close(self) -> None:
        self._connection.send("end")
        self._process.join(10.0)


def join_pair(port: int, rank: int) -> Any:
    from slime.utils.distributed_utils import init_process_group

    store = torch.distributed.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    return init_process_group("gloo", store=store, world_size=2, rank=rank, group_name="pair")


def receive(port: int, size: int, connection: Connection) -> None:
    """The other process."""
    group, target = join_pair(port, 1), torch.zeros(size, dtype=torch.uint8)
    while connection.recv() == "receive":
        torch.distributed.broadcast(target, group=group, group_src=0)
        connection.send("received")


def report(title: str, seconds: dict[str, list[float]], bench: Bench) -> None:
    speed = {name: bench.size / statistics.median(times) / 1e9 for name, times in seconds.items()}
    load = os.getloadavg()[0]
    print(f"\n{title}; {bench.size / 1e6:.0f} MB of weights; load average {load:.1f} on {os.cpu_count()} CPUs")
    print("route            seconds (best)     GB/s   of memcpy   of broadcast   bytes in files")
    for name, times in seconds.items():
        wire = f"{bench.wire[name] / 1e6:.1f} MB ({bench.wire[name] / bench.size:.1%})" if name in bench.wire else ""
        print(
            f"{name:15s} {statistics.median(times):7.3f} ({min(times):6.3f}) {speed[name]:8.3f} "
            f"{speed[name] / speed['memcpy']:10.1%} {speed[name] / speed['gloo broadcast']:13.1%}   {wire}"
        )
    for name, (yardstick, bound) in BOUNDS.items():
        ratio = speed[name] / speed[yardstick]
        verdict = "reached" if ratio >= bound else "missed"
        print(f"{name}: {ratio:.1%} of {yardstick}, the aim of {bound:.0%} is {verdict}", flush=True)


if __name__ == "__main__":
    main()
