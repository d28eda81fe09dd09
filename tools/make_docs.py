"""Writes docs/flags.md, docs/metrics.md and docs/hooks.md from the tables that the code itself uses.

python tools/make_docs.py            write the pages
python tools/make_docs.py --check    fail where a page is not what would be written
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from slime.observability.metric_catalog import SECTIONS  # noqa: E402
from slime.utils.arguments.flag import Flag  # noqa: E402
from slime.utils.arguments.hooks import HOOKS, Hook  # noqa: E402
from slime.utils.arguments.table import flag_table  # noqa: E402
from slime.utils.misc import load_function  # noqa: E402

NOTE = "<!-- Written by tools/make_docs.py; change the tables in the code instead. -->"


def flags_page() -> Iterator[str]:
    yield "# Flags\n"
    yield (
        "Names are never abbreviated. The command line wins over YAML files (`--config`), those over the model's "
        "config.json, that over the defaults below. In YAML a flag is a key, with or without dashes: "
        "`rollout_batch_size: 32`. `python train.py --help` prints the same list; `--dry-run` prints what a command "
        "line comes to.\n"
    )
    entries = sorted(flag_table(), key=lambda entry: _group_order(entry.group))
    groups = [(group, list(members)) for group, members in groupby(entries, key=lambda entry: entry.group)]
    yield "\n".join(f"- [{group}](#{_anchor(group)})" for group, _ in groups) + "\n"
    for group, members in groups:
        yield f"## {group}\n"
        yield "| flag | default | meaning |\n|---|---|---|"
        yield from (_flag_row(entry) for entry in members)
        yield ""


def metrics_page() -> Iterator[str]:
    yield "# Metrics\n"
    yield (
        "Every metric of a run, under its name in `metrics.jsonl`, TensorBoard and Weights & Biases. `{stat}` stands "
        "for mean, median, max and min, `{role-}` for nothing or `critic-`; other words in braces belong to the run. "
        "A metric that a run has nothing to measure for is left out, not logged as 0.\n"
    )
    for section, metrics in SECTIONS.items():
        yield f"## {section}\n"
        yield "| name | meaning |\n|---|---|"
        yield from (f"| `{metric.name}` | {_cell(metric.meaning)} |" for metric in metrics)
        yield ""


def hooks_page() -> Iterator[str]:
    from examples.hooks import EXAMPLES

    yield "# Hooks\n"
    yield (
        "A flag whose name ends in `-path` (and `--spec`) names a function of yours as `package.module.function`. All "
        "that are given are imported and their signatures checked before anything is started. Each has a worked "
        "example below, from `examples/hooks/`, that a test runs.\n\n"
        "For tests of your own hooks copy `tests/contract/test_template_own_hooks.py`.\n"
    )
    for hook in HOOKS:
        yield from _hook_section(hook, EXAMPLES[hook.dest])


def _hook_section(hook: Hook, path: str) -> Iterator[str]:
    flag = f"--{hook.dest.replace('_', '-')}"
    entry = flag_table().by_dest[hook.dest]
    yield f"## `{flag}`\n"
    yield f"`{hook.signature}`\n"
    yield f"When: {hook.called}.\n"
    if entry.pending is not None:
        yield f"Not supported yet: {entry.pending}.\n"
    if entry.default:
        yield f"Default: `{entry.default}`\n"
    words = " ".join(path.rsplit(".", 1)) if hook.dest == "spec" else path
    yield f"Example: `{flag} {words}`\n"
    yield f"```python\n{inspect.getsource(load_function(path)).rstrip()}\n```\n"


def _group_order(group: str) -> int:
    """slime's own groups first, as they come; then Megatron's, SGLang's with the router's."""
    return sum(group.startswith(prefix) * rank for rank, prefix in enumerate(("", "Megatron", "SGLang")))


def _flag_row(entry: Flag) -> str:
    names = ", ".join(f"`{spelling}`" for spelling in entry.spellings)
    meaning = entry.help
    if entry.choices:
        meaning += f" ({', '.join(str(choice) for choice in entry.choices)})"
    if entry.pending is not None:
        meaning += f" — not supported yet: {entry.pending}"
    default = "required" if entry.required else "" if entry.default in (None, [], {}, "") else f"`{entry.default}`"
    return f"| {names} | {_cell(default)} | {_cell(meaning)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _anchor(title: str) -> str:
    kept = "".join(char for char in title.lower() if char.isalnum() or char in " -")
    return kept.replace(" ", "-")


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "flags.md": flags_page,
    "metrics.md": metrics_page,
    "hooks.md": hooks_page,
}


def page_text(name: str) -> str:
    """What docs/`name` must be."""
    return NOTE + "\n\n" + "\n".join(PAGES[name]()).rstrip() + "\n"


def main(words: list[str]) -> int:
    if words not in ([], ["--check"]):
        print(__doc__)
        return 2
    folder = REPOSITORY / "docs"
    folder.mkdir(exist_ok=True)
    stale = []
    for name in PAGES:
        text, path = page_text(name), folder / name
        if path.is_file() and path.read_text() == text:
            continue
        stale.append(f"docs/{name}")
        if not words:
            path.write_text(text)
    if stale:
        print(f"{'not current' if words else 'written'}: {', '.join(stale)}")
    return int(bool(words and stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
