"""The text of what the terminal shows: one line per rollout, one per evaluation, and progress bars. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping

from slime.observability.trackers.console import ProgressEvent

BAR_WIDTH = 24
Metrics = Mapping[str, float]


def rollout_line(step: int, metrics: Metrics, num_rollout: int | None = None) -> str:
    """The step line of a rollout (of `num_rollout`), from all metrics known of it; what is not known is left out."""
    parts = [f"rollout {step}" if num_rollout is None else f"rollout {step}/{num_rollout - 1}"]
    parts += _numbers(
        metrics,
        [
            ("reward", ("rollout/raw_reward",)),
            ("loss", ("train/loss", "train/critic-loss")),
            ("kl", ("train/kl_loss", "train/ppo_kl")),
            ("grad norm", ("train/grad_norm", "train/critic-grad_norm")),
            ("length", ("rollout/response_len/mean", "rollout/response_lengths")),
        ],
    )
    if "rollout/truncated_ratio" in metrics:
        parts.append(f"truncated {metrics['rollout/truncated_ratio']:.0%}")
    speeds = [
        f"{label} {metrics[name]:,.0f}"
        for label, name in [("gen", "perf/tokens_per_gpu_per_sec"), ("train", "perf/actor_train_tok_per_s")]
        if name in metrics
    ]
    if speeds:
        parts.append("tokens/s " + " ".join(speeds))
    times = [
        f"{label} {metrics[name]:.1f}s"
        for label, name in [
            ("gen", "perf/rollout_time"),
            ("train", "perf/train_time"),
            ("sync", "perf/update_weights_time"),
            ("step", "perf/step_time"),
        ]
        if name in metrics
    ]
    if times:
        parts.append(" ".join(times))
    return " | ".join(parts)


def eval_line(step: int, metrics: Metrics) -> str:
    """The line of an evaluation: each dataset with its mean reward, truncated share and pass@k."""
    parts = [f"eval {step}"]
    names = [key.removeprefix("eval/") for key in metrics if key.count("/") == 1 and key != "eval/step"]
    datasets = [name for name in names if not _is_detail(name, names)]
    for dataset in datasets:
        text = f"{dataset} {_short(metrics[f'eval/{dataset}'])}"
        details = [
            f"{name.removeprefix(dataset + '-').replace('_ratio', '')} {_short(metrics[f'eval/{name}'])}"
            for name in names
            if name.startswith(dataset + "-") and _is_detail(name, names)
        ]
        length = metrics.get(f"eval/{dataset}/response_len/mean")
        if length is not None:
            details.insert(0, f"length {_short(length)}")
        parts.append(f"{text} ({', '.join(details)})" if details else text)
    return " | ".join(parts)


def _is_detail(name: str, names: list[str]) -> bool:
    """Whether `name` is "<dataset>-truncated_ratio" or "<dataset>-pass@k" of another dataset among `names`."""
    dataset, _, detail = name.rpartition("-")
    return dataset in names and (detail == "truncated_ratio" or detail.startswith("pass@"))


def progress_bar(event: ProgressEvent, now: float) -> str:
    """One line with a bar, for a terminal that can redraw it. `now` in seconds since the epoch."""
    share = min(event.done / event.total, 1.0) if event.total else 1.0
    filled = round(share * BAR_WIDTH)
    return f"{event.name} [{'█' * filled}{'·' * (BAR_WIDTH - filled)}] {_state(event, now)}"


def progress_line(event: ProgressEvent, now: float) -> str:
    """The same without the bar, for a log."""
    return f"{event.name}: {_state(event, now)}"


def _state(event: ProgressEvent, now: float) -> str:
    elapsed = max(now - event.started, 0.0)
    text = f"{event.done}/{event.total} in {elapsed:.0f}s"
    if 0 < event.done < event.total:
        text += f", about {elapsed / event.done * (event.total - event.done):.0f}s left"
    postfix = " ".join(f"{key} {_short(value)}" for key, value in event.postfix.items())
    return f"{text} {postfix}".rstrip()


def _numbers(metrics: Metrics, wanted: list[tuple[str, tuple[str, ...]]]) -> list[str]:
    """`label value` for each entry, with the first of its metrics that there is."""
    texts = []
    for label, names in wanted:
        value = next((metrics[name] for name in names if name in metrics), None)
        if value is not None:
            texts.append(f"{label} {_short(value)}")
    return texts


def _short(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.3f}" if 0.001 <= abs(value) < 1000 else f"{value:.3g}"
