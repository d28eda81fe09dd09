"""Weights & Biases: one run, fed by the hub alone, so that every mode behaves the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime.observability.trackers.base import Metrics, Tracker
from slime.observability.tracking_config import WandbConfig

# Metric family → the axis it is drawn over.
STEP_OF_FAMILY = {
    "train/*": "train/step",
    "rollout/*": "rollout/step",
    "multi_turn/*": "rollout/step",
    "passrate/*": "rollout/step",
    "perf/*": "rollout/step",
    "eval/*": "eval/step",
}


class WandbTracker(Tracker):
    """Opens the run when made. The key is passed in memory only: no netrc file, not in the run's configuration."""

    name = "wandb"

    def __init__(self, config: WandbConfig, run_config: dict[str, Any]) -> None:
        import wandb

        if config.dir is not None:
            Path(config.dir).mkdir(parents=True, exist_ok=True)  # W&B would quietly write to the temporary folder
        where = {} if config.host is None else {"base_url": config.host}
        settings = wandb.Settings(
            mode=config.mode,
            api_key=config.api_key,
            **where,
            console="off",
            silent=True,
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,  # the metadata would hold the command line, and with it --wandb-key
        )
        self._config = config
        self._run = wandb.init(
            project=config.project,
            name=config.name,
            group=config.group,
            entity=config.entity,
            dir=config.dir,
            id=config.run_id,
            resume="allow" if config.run_id else None,
            config=run_config,
            settings=settings,
        )
        self.run_id = self._run.id
        for step_key in sorted(set(STEP_OF_FAMILY.values())):
            self._run.define_metric(step_key)
        for family, step_key in STEP_OF_FAMILY.items():
            self._run.define_metric(family, step_metric=step_key)

    def log(self, metrics: Metrics, step_key: str, step: int) -> None:
        self._run.log({**metrics, step_key: step})

    def close(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # ends wandb's own service process

    def location(self) -> str:
        if self._config.mode == "online":
            return str(self._run.url)
        return f"{self._run.dir} ({self._config.mode})"
