"""The generated pages are current, and the metric catalogue is what a run logs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from slime.observability.metric_catalog import SECTIONS, find_metric
from tests.support.syntax_tree import syntax_tree

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = [path for path in (REPOSITORY / "slime").rglob("*.py") if path.name != "metric_catalog.py"]


def test_pages_are_current() -> None:
    """`python tools/make_docs.py` writes them anew."""
    command = [sys.executable, "tools/make_docs.py", "--check"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def unknown(names: set[str]) -> list[str]:
    return sorted(name for name in names if find_metric(name) is None)


def test_timers_are_in_the_catalogue() -> None:
    calls = [node for path in SOURCES for node in ast.walk(syntax_tree(path)) if isinstance(node, ast.Call)]
    timers = [call for call in calls if getattr(call.func, "id", "") in ("timer", "inverse_timer") and call.args]
    names = {call.args[0].value for call in timers if isinstance(call.args[0], ast.Constant)}
    assert {"train_wait", "actor_train", "update_weights"} <= names
    assert unknown({f"perf/{name}_time" for name in names}) == []


def test_names_in_the_code_are_in_the_catalogue() -> None:
    constants = (node for path in SOURCES for node in ast.walk(syntax_tree(path)))
    texts = {node.value for node in constants if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names = {
        text
        for text in texts
        if re.fullmatch(r"(train|rollout|perf|eval|passrate|multi_turn)/\w[\w/@-]*[a-z0-9]", text)
    }
    assert {"rollout/raw_reward", "train/step", "perf/step_time"} <= names
    folders = {name for name in names if "_data/" in name}
    assert unknown(names - folders) == []


def test_loss_terms_are_in_the_catalogue() -> None:
    """Names that the losses give to their figures: dict keys and subscripts of ...metrics and terms."""
    folder = REPOSITORY / "slime" / "backends" / "megatron_utils" / "loss"
    names: set[str] = set()
    for path in folder.glob("*.py"):
        if path.name == "mis.py":  # its names get the prefix mis_
            continue
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.Assign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(re.search(r"(metrics|terms)\b", ast.unparse(target)) for target in targets):
                    keys = [key for each in ast.walk(node.value) if isinstance(each, ast.Dict) for key in each.keys]
                    keys += [target.slice for target in targets if isinstance(target, ast.Subscript)]
                    names |= {key.value for key in keys if isinstance(key, ast.Constant)}
    assert {"pg_loss", "ppo_kl", "tis", "train_rollout_logprob_abs_diff"} <= names
    assert unknown({f"train/{name}" for name in names}) == []


def test_columns_and_requests_are_in_the_catalogue() -> None:
    from slime.observability import sglang_trace_attrs, train_metric_utils

    columns = train_metric_utils.TOKEN_COLUMNS + train_metric_utils.SAMPLE_COLUMNS
    assert unknown({f"rollout/{name}" for name in columns}) == []
    assert unknown({f"perf/{name}/mean" for name in sglang_trace_attrs._PERF_METRICS.values()}) == []
    steps = train_metric_utils.train_step_metrics(
        Namespace(), {"loss": 1.0}, rollout_id=0, step_id=0, steps_per_rollout=1, global_batch_size=4, grad_norm=1.0,
        learning_rates=[0.1], role="critic",
    )  # fmt: skip
    assert unknown(set(steps)) == []


def test_no_entry_is_stale() -> None:
    """The fixed parts of each name are still in the code."""
    code = "\n".join(path.read_text() for path in SOURCES)
    for metric in (metric for section in SECTIONS.values() for metric in section):
        parts = re.split(r"\{[^}]*\}|/", metric.name.split("/", 1)[1])
        for part in filter(None, (part.strip("-@_") for part in parts)):
            stem = re.sub(r"_(time|tflops)$", "", part)
            assert stem in code or re.sub("^(correct|effective)_", "", part) in code, metric.name


def test_braces() -> None:
    assert find_metric("perf/request/e2e_latency/median") is not None
    assert find_metric("train/critic-grad_norm") is not None
    assert find_metric("train/grad_norms") is None
    assert find_metric("perf/request/e2e_latency/sum") is None
    assert find_metric("rollout/nonsense") is None
