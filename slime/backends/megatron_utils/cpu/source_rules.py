"""What stands between unmodified megatron-core and a CPU, as data: text rules and per-module patches.

Megatron-core names CUDA in its source. Each rule rewrites one such expression while the module is imported (see
`import_hook.py`); nothing on disk changes. The rules are ordered: a later one may match what an earlier one wrote.
Written for megatron-core 0.16.1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

WRITTEN_FOR = "0.16.1"

# Sub-packages that the trainer never runs: their CUDA is left alone.
UNTOUCHED = re.compile(
    r"megatron\.core\.(inference|export|extensions|distributed\.fsdp|ssm|post_training|resharding|energy_monitor"
    r"|nccl_allocator|full_cuda_graph)\b"
)


@dataclass(frozen=True)
class Rule:
    """Rewrites every match of `pattern` in every module; `why` says what the expression does on CUDA."""

    name: str
    pattern: str
    replacement: str
    why: str


@dataclass(frozen=True)
class ModulePatch:
    """Changes one module: each (old, new) of `replace` must occur, each of `expects` too, then `append` is added.

    `expects` pins what `append` relies on, so that an upstream change stops the import instead of going unnoticed.
    """

    module: str
    why: str
    expects: tuple[str, ...] = ()
    replace: tuple[tuple[str, str], ...] = ()
    append: str = ""


RULES: tuple[Rule, ...] = (
    Rule(
        "current_device",
        r"torch\.cuda\.current_device\(\)",
        "torch.device('cpu')",
        "an ordinal that is passed on as device=",
    ),
    Rule("device=cuda", r"""device=(['"])cuda(?::0)?\1""", "device='cpu'", "tensors created on the GPU"),
    Rule(
        "init_data",
        r"""init_data\((['"])cuda\1\)""",
        "init_data('cpu')",
        "checkpoint shards that another rank will send are allocated on the GPU",
    ),
    Rule(
        "tensor type",
        r"torch\.cuda\.(Float|Half|BFloat16)Tensor",
        r"torch.\1Tensor",
        "parameters are told apart by tensor.type(), whose text has no 'cuda.' on a CPU",
    ),
    Rule("synchronize", r"torch\.cuda\.synchronize\(\)", "None", "CPU kernels return when they are done"),
    Rule("current_stream", r"torch\.cuda\.current_stream\(\)", "None", "there are no streams"),
    Rule("pin_memory", r",\s*pin_memory=True(?=[\s)])", "", "pinning needs CUDA"),
    Rule(
        ".cuda()",
        r"(?<=[\w\])])\.cuda\((?:non_blocking=True|torch\.device\('cpu'\))?\)",
        "",
        "moves to the GPU (after current_device has been rewritten)",
    ),
    Rule(
        "rng",
        r"torch\.cuda\.(get_rng_state|set_rng_state|manual_seed)\b",
        r"torch.\1",
        "the model-parallel RNG tracker swaps the device's generator, here the CPU's own",
    ),
)

_RNG_STATE = '''

def _get_cuda_rng_state(device=None, clone=False, graph_safe=False):
    """The CPU generator's state; a graph-safe one does not exist here."""
    return torch.get_rng_state()


def _set_cuda_rng_state(new_state, device=-1, graph_safe=False):
    torch.set_rng_state(new_state)
'''

_DISPATCHER = '''

def _host_copies(self, point, tokens_per_expert=None):
    """Stock code copies the split sizes to the host on a side stream; on a CPU they are there already."""
    if not self.drop_and_pad and point == self.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            value = getattr(self, name, None)
            if torch.is_tensor(value):
                setattr(self, name, value.numpy())
    return tokens_per_expert


MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "cpu"  # not None, so that no CUDA stream is made
MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _host_copies
'''

_UNEVEN_COLLECTIVES = '''

def _gather_uneven(outputs, own, group):
    """All-gather of parts whose first dimensions differ; gloo has it for equal parts only."""
    outputs[group.rank()].copy_(own)
    for rank, part in enumerate(outputs):
        torch.distributed.broadcast(part, group_src=rank, group=group)


def _reduce_scatter_uneven(output, parts, group):
    for rank, part in enumerate(parts):
        part = part.clone()
        torch.distributed.reduce(part, group_dst=rank, group=group)
        if rank == group.rank():
            output.copy_(part)
'''

_ROPE = """

_stock_rotary_bshd = _apply_rotary_pos_emb_bshd


def _apply_rotary_pos_emb_bshd(
    t, freqs, rotary_interleaved=False, multi_latent_attention=False, mscale=1.0
):
    from slime.backends.megatron_utils.cpu.rope import rotate_halves

    if rotary_interleaved or multi_latent_attention:
        return _stock_rotary_bshd(t, freqs, rotary_interleaved, multi_latent_attention, mscale)
    return rotate_halves(t, freqs, mscale)
"""

_ADAM = "\nfrom slime.backends.megatron_utils.cpu.adam import CpuFusedAdam as Adam\n"

PATCHES: tuple[ModulePatch, ...] = (
    ModulePatch(
        "megatron.core.optimizer",
        why="a checkpoint can be loaded only into an Adam that keeps its step as Apex's FusedAdam does",
        expects=("import AdamW as Adam", "if USING_PYTORCH_OPTIMIZER:", 'kwargs["adam_w_mode"]'),
        append=_ADAM + "USING_PYTORCH_OPTIMIZER = False\n",
    ),
    ModulePatch(
        "megatron.core.optimizer.distrib_optimizer",
        why="the same, where the distributed optimizer asks whose Adam it has",
        expects=("isinstance(optimizer, (Adam,", "HAVE_APEX_OR_TE = False", "USING_APEX_OPTIMIZER = False"),
        append=_ADAM + "HAVE_APEX_OR_TE = USING_APEX_OPTIMIZER = True\n",
    ),
    ModulePatch(
        "megatron.core.tensor_parallel.random",
        why="dropout regions fork the device's generator, which here is the one of the CPU",
        expects=("def _get_cuda_rng_state(", "def _set_cuda_rng_state("),
        replace=(
            # warns when the CPU generator moves inside a fork of the GPU's; here they are one generator
            ("if not torch.all(cpu_rng_state == torch.get_rng_state()).item():", "if False:"),
        ),
        append=_RNG_STATE,
    ),
    ModulePatch(
        "megatron.core.jit",
        why="torch.compile at import time brings no speed on a CPU and doubles the import time",
        expects=("def disable_jit_fuser(", "\nenable_jit_fuser()"),
        append="\ndisable_jit_fuser()\n",
    ),
    *(
        ModulePatch(
            module,
            why="wandb takes 0.4 s to import in every trainer process, for metrics that slime does not use",
            replace=(("try:\n    import wandb", "try:\n    raise ImportError"),),
        )
        for module in (
            "megatron.core.timers",
            "megatron.core.inference.contexts.dynamic_context",
            "megatron.core.inference.engines.dynamic_engine",
        )
    ),
    ModulePatch(
        "megatron.core.transformer.moe.moe_utils",
        why="0.16 leaves the name undefined without Transformer Engine",
        expects=("te_general_gemm", "HAVE_TE"),
        append="\nif not HAVE_TE:\n    te_general_gemm = None\n",
    ),
    ModulePatch(
        "megatron.core.transformer.multi_latent_attention",
        why="0.16 believes in Transformer Engine because its stand-in classes can be imported",
        expects=("HAVE_TE = True",),
        append="\nHAVE_TE = False\n",
    ),
    ModulePatch(
        "megatron.core.tensor_parallel.mappings",
        why="experts that are tensor parallel gather different numbers of tokens, which gloo can't",
        replace=(
            ("torch.distributed.all_gather(output_tensor_list, ", "_gather_uneven(output_tensor_list, "),
            ("torch.distributed.reduce_scatter(output, ", "_reduce_scatter_uneven(output, "),
        ),
        append=_UNEVEN_COLLECTIVES,
    ),
    ModulePatch(
        "megatron.core.models.common.embeddings.rope_utils",
        why="the unfused rotary embedding copies its input six times, the fused one needs CUDA",
        expects=(
            '    mscale: float = 1.0,\n) -> Tensor:\n    """Apply rotary positional embedding to input tensor T.',
            "t = (t * cos_) + (_rotate_half(t, rotary_interleaved) * sin_)",
        ),
        append=_ROPE,
    ),
    ModulePatch(
        "megatron.core.transformer.moe.token_dispatcher",
        why="the all-to-all dispatcher needs a CUDA stream",
        expects=("class MoEAlltoAllTokenDispatcher", "def _maybe_dtoh_and_synchronize(", "cuda_dtoh_point"),
        append=_DISPATCHER,
    ),
)


def rewrite(source: str, module: str) -> str:
    """`source` of megatron-core's `module`, with every rule and the module's patch applied.

    Raises:
        ImportError: the text that the module's patch relies on is not there.
    """
    if not UNTOUCHED.match(module):
        for rule in RULES:
            source = re.sub(rule.pattern, rule.replacement, source)
    for patch in PATCHES:
        if patch.module == module:
            source = _apply(patch, source)
    return source


def _apply(patch: ModulePatch, source: str) -> str:
    for text in (*patch.expects, *(old for old, _ in patch.replace)):
        if text not in source:
            raise ImportError(
                f"{patch.module} no longer contains {text.strip()!r}: its CPU adaptation was written for "
                f"megatron-core {WRITTEN_FOR} ({patch.why})",
                name=patch.module,
            )
    for old, new in patch.replace:
        source = source.replace(old, new)
    return source + patch.append
