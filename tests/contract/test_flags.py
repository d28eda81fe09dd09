"""The surface of flags: changed only on purpose, and in step with the installed packages."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from slime.utils.arguments.flag import Flag
from slime.utils.arguments.groups import SLIME_FLAGS
from slime.utils.arguments.groups.megatron_lm import FLAGS as MEGATRON_LM_FLAGS
from slime.utils.arguments.help_text import help_text
from slime.utils.arguments.megatron_flags import CONFIG_CLASSES, megatron_config_flags, source_fields
from slime.utils.arguments.megatron_names import (
    ATTRIBUTE_OF_FIELD,
    DEFAULT_OF_ATTRIBUTE,
    FIELDS_WITHOUT_FLAG,
    FLAGS_OF_ATTRIBUTE,
    TYPE_OF_ATTRIBUTE,
    attribute_of,
)
from slime.utils.arguments.source import package_folder
from slime.utils.arguments.table import flag_table
from tests.support.base_config import HF_CONFIG, BaseConfig
from tests.support.model_configs import published_config
from tests.support.syntax_tree import syntax_tree

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("slime_flags.txt")
UPDATE = "UPDATE_GOLDEN"


def describe(entry: Flag) -> str:
    kind = "switch" if entry.is_switch else getattr(entry.type, "__name__", str(entry.type))
    parts = [", ".join(entry.spellings), entry.dest, kind]
    parts += [f"nargs={entry.nargs}"] if entry.nargs is not None else []
    parts += [f"choices={','.join(map(str, entry.choices))}"] if entry.choices else []
    parts += ["required" if entry.required else f"default={entry.default!r}"]
    return " | ".join(parts)


def test_slime_flags_are_those_of_the_golden_file() -> None:
    """A flag, name, type or default that changes is changed in slime_flags.txt too (UPDATE_GOLDEN=1 writes it)."""
    text = "".join(describe(entry) + "\n" for entry in (*SLIME_FLAGS, *MEGATRON_LM_FLAGS))
    if os.environ.get(UPDATE):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


# One value is possible: another is refused, or is what the device decides.
ONE_VALUE = {
    "ckpt_format",
    "distributed_backend",
    "rollout_data_transport",
    "train_backend",
    "use_distributed_optimizer",
}
# Settings that only decide another one: (words, attribute that they decide, its value).
DECIDES = {
    "make_vocab_size_divisible_by": ("100", "padded_vocab_size", 300),
    "num_layers_per_virtual_pipeline_stage": ("1", "virtual_pipeline_model_parallel_size", 2),
    "num_steps_per_rollout": ("2", "global_batch_size", 8),
    "num_virtual_stages_per_pipeline_rank": ("2", "virtual_pipeline_model_parallel_size", 2),
    "offload": ("", "offload_train", True),
    "recompute_activations": ("", "recompute_granularity", "selective"),
    "seq_length": ("77", "max_position_embeddings", 77),
    "use_flash_attn": ("", "attention_backend", "flash"),
    "use_rotary_position_embeddings": ("", "position_embedding_type", "rope"),
}


def attributes_read(path: Path) -> set[str]:
    """Names that a file reads from a namespace of arguments: `args.name`, or a name that stands alone as a text."""
    tree = syntax_tree(path)
    loads = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load))
    of_args = {node.attr for node in loads if re.search(r"(^|[._])args$", ast.unparse(node.value))}
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings)
    return of_args | {node.value for node in constants if isinstance(node.value, str)}


def test_every_accepted_flag_is_read_somewhere() -> None:
    """A flag that is accepted has an effect: its attribute is read outside the argument package."""
    files = [path for path in (REPOSITORY / "slime").rglob("*.py") if not {"arguments", "dry_run"} & set(path.parts)]
    files += [REPOSITORY / "train.py", REPOSITORY / "train_async.py"]
    read = set().union(*map(attributes_read, files))
    read |= {attribute_of(field.name) for group in source_fields().values() for field in group}
    accepted = {entry.dest for entry in (*SLIME_FLAGS, *MEGATRON_LM_FLAGS) if entry.pending is None}
    # what the argument package itself is told
    inside = {"config", "custom_config_path", "dry_run", "exit_on_missing_checkpoint"}
    assert accepted - read - ONE_VALUE - inside == set(DECIDES)


@pytest.mark.parametrize("dest", DECIDES)
def test_a_setting_that_only_decides_another_does(dest: str, tmp_path: Path) -> None:
    words, decided, value = DECIDES[dest]
    base = BaseConfig(tmp_path)
    base.write_model_config({key: fact for key, fact in HF_CONFIG.items() if key != "max_position_embeddings"})
    two_stages = ("--actor-num-gpus-per-node", 2, "--pipeline-model-parallel-size", 2)
    others = two_stages if "virtual" in dest else ("--debug-train-only",) if dest == "offload" else ()
    args = base.parse(*others, flag_table().by_dest[dest].name, *words.split())
    assert getattr(args, decided) == value
    if dest != "use_rotary_position_embeddings":  # short for the default
        assert getattr(base.parse(*others), decided) != value


def test_every_flag_has_help() -> None:
    assert [entry.name for entry in (*SLIME_FLAGS, *MEGATRON_LM_FLAGS) if not entry.help] == []


def test_megatron_fields_are_those_of_the_imported_classes() -> None:
    """What is read from megatron-core's source is what its dataclasses have."""
    from slime.utils.accelerator import current

    current().prepare_megatron()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    classes = (ModelParallelConfig, TransformerConfig, MLATransformerConfig, OptimizerConfig)
    for config_class in (*classes, DistributedDataParallelConfig):
        own = inspect.get_annotations(config_class)
        assert [field.name for field in source_fields()[config_class.__name__]] == list(own), config_class
        assert {field.name for field in dataclasses.fields(config_class)} >= set(own)
    assert set(CONFIG_CLASSES) == {config_class.__name__ for config_class in (*classes, DistributedDataParallelConfig)}
    _compare_defaults(TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)


def _compare_defaults(*config_classes: type) -> None:
    """A field that several classes have is one flag, with the default of the first."""
    by_dest = {entry.dest: entry for entry in megatron_config_flags()}
    for config_class in config_classes:
        for field in dataclasses.fields(config_class):
            attribute = attribute_of(field.name)
            if field.name in FIELDS_WITHOUT_FLAG or attribute in DEFAULT_OF_ATTRIBUTE or attribute not in by_dest:
                continue
            default = field.default_factory() if field.default is dataclasses.MISSING else field.default
            shown = {"torch.float32": "fp32", "AttnBackend.auto": "auto"}.get(str(default), default)
            assert by_dest.pop(attribute).default == shown, field.name


def test_tables_of_megatron_names_have_no_stale_entries() -> None:
    fields = {field.name for group in source_fields().values() for field in group}
    attributes = {attribute_of(name) for name in fields}
    assert set(ATTRIBUTE_OF_FIELD) <= fields
    assert fields >= FIELDS_WITHOUT_FLAG
    for table in (FLAGS_OF_ATTRIBUTE, DEFAULT_OF_ATTRIBUTE, TYPE_OF_ATTRIBUTE):
        assert set(table) <= attributes


def test_sglang_flags_are_those_of_its_own_parser() -> None:
    """What is read from SGLang's source is what its own command line has."""
    from slime.utils.arguments import sglang_flags

    folder = package_folder("sglang")
    assert folder is not None
    declared = {entry.dest: entry for entry in sglang_flags.declared_flags(folder / "srt" / "arg_groups")}
    imported = {entry.dest: entry for entry in sglang_flags.imported_flags()}
    assert set(declared) <= set(imported)
    assert set(imported) - set(declared) == {"config", "kv_canary_real_data"}
    for dest, entry in declared.items():
        own = imported[dest]
        assert entry.default == own.default, dest
        assert (entry.nargs, entry.bare) == (own.nargs, own.bare), dest
        assert entry.is_switch == own.is_switch, dest
        assert set(entry.spellings) <= set(own.spellings), dest
        assert entry.choices is None or entry.choices == own.choices, dest
    # a kind of value that SGLang reads itself, and one that is read here
    assert declared["max_total_tokens"].parse("16k") == imported["max_total_tokens"].parse("16k") == 16000
    assert declared["cuda_graph_backend_decode"].parse("disabled") == "disabled"


def test_no_spelling_belongs_to_two_families() -> None:
    table = flag_table()
    families = {"sglang_mem_fraction_static", "router_policy", "num_layers", "rollout_batch_size", "swiglu"}
    assert families <= set(table.by_dest)
    for dest in ("sglang_tp_size", "sglang_model_path", "sglang_host", "sglang_port", "router_worker_urls"):
        assert dest not in table.by_dest, "slime sets it"
    assert table.by_dest["router_policy"].default == "round_robin"


def test_parsing_needs_no_heavy_import() -> None:
    """Flags of all families are known, and --help answers, without torch, Megatron or SGLang being imported."""
    code = (
        "import sys; from slime.utils.arguments.table import flag_table; "
        "from slime.utils.arguments import parse_args; len(list(flag_table())); "
        "print([name for name in ('torch', 'megatron.core', 'sglang', 'ray', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert result.stdout.strip() == "[]"


def test_help_of_the_driver_is_quick() -> None:
    """Under 2 s for the whole command. Processor time too, as the machine may be busy with other tests."""
    used = []
    for _ in range(2):  # the first may have to compile
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "train.py", "--help"]
        result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(used) < 2
    headings = [line for line in result.stdout.splitlines() if re.fullmatch(r"\w.*:", line)]
    groups = list(dict.fromkeys(entry.group for entry in flag_table()))
    assert [heading.rstrip(":") for heading in headings] == groups


def test_help_names_every_flag() -> None:
    text = help_text(flag_table())
    for entry in flag_table():
        assert all(spelling in text for spelling in entry.spellings)


MODELS = sorted((REPOSITORY / "scripts" / "models").glob("*.sh"))


def script_args(script: Path) -> list[str]:
    command = f'source "{script}" && printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    result = subprocess.run(["bash", "-eu", "-c", command], capture_output=True, text=True, check=True)
    return result.stdout.splitlines()


# facts that scripts may leave to the config.json
LEFT_TO_CONFIG = {
    "max_position_embeddings",
    "norm_epsilon",
    "beta_fast",
    "apply_rope_fusion",
    "moe_shared_expert_gate",
}


@pytest.mark.parametrize("script", MODELS, ids=lambda path: path.stem)
def test_model_script_parses(script: Path) -> None:
    """Every flag is known, and flags and defaults together are the architecture of the published config.json."""
    from slime.utils.arguments.command_line import parse_command_line
    from slime.utils.arguments.hf_facts import TRAINING_CHOICES, config_from_hf
    from slime.utils.arguments.rules.architecture import agrees

    values = parse_command_line(script_args(script), flag_table()).values
    defaults = {entry.dest: entry.default for entry in flag_table()}
    if values.get("use_rotary_position_embeddings"):
        values["position_embedding_type"] = "rope"
    facts = config_from_hf(published_config(script.stem))
    for name, fact in facts.items():
        if name in TRAINING_CHOICES or (name in LEFT_TO_CONFIG and name not in values):
            continue
        if name == "num_query_groups" and facts["multi_latent_attention"]:
            continue  # every head has its own
        value = values.get(name, defaults[name])
        assert agrees(name, value, fact, facts), f"{name}: {value} in the script, {fact} in config.json"


# what run scripts of slime pass beside the model's architecture
SCRIPT_FLAGS = """
--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1
--expert-model-parallel-size 1 --expert-tensor-parallel-size 1
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1
--use-dynamic-batch-size --max-tokens-per-gpu 9216 --balance-data --rollout-shuffle --apply-chat-template
--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
--attention-backend flash --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer
--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00
--eps-clip 0.2 --eps-clip-high 0.28 --no-rope-fusion --ckpt-format torch_dist --no-load-optim --no-save-optim
--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7
--moe-layer-freq ([1]*4) --moe-grouped-gemm --moe-permute-fusion --moe-router-load-balancing-type none
--moe-token-dispatcher-type flex --moe-enable-deepep --moe-router-score-function sigmoid --moe-aux-loss-coeff 0
--num-experts 128 --moe-router-topk 8 --moe-router-dtype fp32 --lr-warmup-fraction 0.1 --min-lr 1e-7 --seq-length 4096
--make-vocab-size-divisible-by 64 --finetune --spec slime_plugins.models.glm4 get_glm_spec
--no-check-for-nan-in-loss-and-grad
"""


def test_flags_of_run_scripts_parse() -> None:
    """Megatron-LM's customary names and negations, so that scripts run unchanged."""
    from slime.utils.arguments.command_line import parse_command_line

    values = parse_command_line(SCRIPT_FLAGS.split(), flag_table()).values
    assert values["moe_layer_freq"] == [1, 1, 1, 1]
    assert values["apply_rope_fusion"] is False
    assert values["moe_router_load_balancing_type"] == ["none"]
    assert values["spec"] == ["slime_plugins.models.glm4", "get_glm_spec"]
    assert values["check_for_nan_in_loss_and_grad"] is False
