"""What the metrics hub needs to know, resolved once in the driver: paths, modes, the arguments without secrets."""

from __future__ import annotations

import netrc
import re
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

WANDB_MODES = ("online", "offline", "disabled")
DEFAULT_WANDB_HOST = "https://api.wandb.ai"

REDACTED = "<redacted>"
_SECRET_NAME = re.compile(
    r"(^|[_-])(wandb[_-]key|api[_-]?keys?|apikeys?|passw(or)?d|secret|secret[_-]\w+|credentials?|private[_-]key|access[_-]key\w*"
    r"|(auth|access|admin|hf|bearer|session|refresh)[_-]token|authorization)$",
    re.IGNORECASE,
)
_URL_USER_INFO = re.compile(r"(?<=://)[^/@\s]+:[^/@\s]+(?=@)")


@dataclass(frozen=True)
class WandbConfig:
    """How to open the one W&B run."""

    mode: str
    project: str | None
    name: str | None
    group: str | None
    entity: str | None
    host: str | None
    dir: str | None
    run_id: str | None
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class TrackingConfig:
    """Which trackers a run has. A tracker whose entry is None is off."""

    run_id: str
    jsonl_path: str | None = None
    tensorboard_dir: str | None = None
    wandb: WandbConfig | None = None
    run_config: dict[str, Any] = field(default_factory=dict)


def tracking_config(args: Namespace, env: Mapping[str, str]) -> TrackingConfig:
    """Resolve the trackers of a run. `args` may lack anything: what is missing is off."""
    jsonl_path = None
    log_dir = getattr(args, "log_dir", None)
    if log_dir is not None and getattr(args, "metrics_jsonl", True):
        jsonl_path = str(Path(log_dir) / "metrics.jsonl")
    return TrackingConfig(
        run_id=run_id_of(args),
        jsonl_path=jsonl_path,
        tensorboard_dir=_tensorboard_dir(args, env) if getattr(args, "use_tensorboard", False) else None,
        wandb=_wandb_config(args, env) if getattr(args, "use_wandb", False) else None,
        run_config=public_config(args, env),
    )


def run_id_of(args: Namespace) -> str:
    """The run's id; a namespace made by hand, without one, belongs to the run called "local"."""
    return getattr(args, "run_id", None) or "local"


def _tensorboard_dir(args: Namespace, env: Mapping[str, str]) -> str:
    """`TENSORBOARD_DIR` names the folder itself; else it is built from project and experiment."""
    if env.get("TENSORBOARD_DIR"):
        return env["TENSORBOARD_DIR"]
    project = getattr(args, "tb_project_name", None)
    if project is None:
        raise ValueError("--use-tensorboard needs --tb-project-name, or TENSORBOARD_DIR in the environment")
    experiment = getattr(args, "tb_experiment_name", None) or time.strftime("%Y%m%d-%H%M%S")
    return str(Path("tensorboard_log", project, experiment).absolute())


def _wandb_config(args: Namespace, env: Mapping[str, str]) -> WandbConfig:
    mode = resolve_wandb_mode(args, env)
    group = getattr(args, "wandb_group", None)
    name = group
    if group is not None and getattr(args, "wandb_random_suffix", True):
        name = f"{group}-{run_id_of(args)}"
    wandb_dir = getattr(args, "wandb_dir", None) or getattr(args, "log_dir", None)
    return WandbConfig(
        mode=mode,
        project=getattr(args, "wandb_project", None),
        name=name,
        group=group,
        entity=getattr(args, "wandb_team", None),
        host=getattr(args, "wandb_host", None) or env.get("WANDB_BASE_URL"),
        dir=None if wandb_dir is None else str(Path(wandb_dir).absolute()),
        run_id=getattr(args, "wandb_run_id", None),
        api_key=(getattr(args, "wandb_key", None) or env.get("WANDB_API_KEY")) if mode == "online" else None,
    )


def resolve_wandb_mode(args: Namespace, env: Mapping[str, str]) -> str:
    """`--wandb-mode`, else `WANDB_MODE`, else online where a login is configured, else offline.

    Raises:
        ValueError: WANDB_MODE is none of the modes that a run can have.
    """
    mode = getattr(args, "wandb_mode", None) or env.get("WANDB_MODE")
    if mode is None:
        return "online" if _has_wandb_login(args, env) else "offline"
    if mode not in WANDB_MODES:
        raise ValueError(f"W&B mode {mode!r} (--wandb-mode or WANDB_MODE) is none of {', '.join(WANDB_MODES)}")
    return mode


def _has_wandb_login(args: Namespace, env: Mapping[str, str]) -> bool:
    if getattr(args, "wandb_key", None) or env.get("WANDB_API_KEY"):
        return True
    host = urlsplit(getattr(args, "wandb_host", None) or env.get("WANDB_BASE_URL") or DEFAULT_WANDB_HOST).hostname
    path = Path(env.get("NETRC") or Path(env.get("HOME", "/"), ".netrc"))
    if host is None or not path.is_file():
        return False
    return netrc.netrc(str(path)).authenticators(host) is not None


def public_config(args: Namespace, env: Mapping[str, str]) -> dict[str, Any]:
    """The run's arguments as plain values for a tracker, every secret replaced by a marker."""
    config = _redacted(dict(sorted(vars(args).items())))
    if "SLURM_JOB_ID" in env:
        config["SLURM_JOB_ID"] = env["SLURM_JOB_ID"]
    return config


def _redacted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            str(key): REDACTED if item is not None and _SECRET_NAME.search(str(key)) else _redacted(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redacted(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return _URL_USER_INFO.sub(REDACTED, str(value))
