"""The command line: nothing abbreviated, nothing ignored."""

from __future__ import annotations

import pytest

from slime.utils.arguments.command_line import parse_command_line
from slime.utils.arguments.errors import ConfigError
from slime.utils.arguments.flag import flag, json_value, off_switch, switch
from slime.utils.arguments.megatron_names import layer_pattern, window_size
from slime.utils.arguments.table import FlagTable, flag_table

TABLE = FlagTable(
    [
        flag("--load"),
        flag("--load-debug-rollout-data"),
        flag("--lr", float),
        flag("--rollout-top-k", int, -1),
        flag("--rollout-stop", nargs="+"),
        flag("--names", nargs="*"),
        flag("--spec", nargs=2),
        flag("--hook", nargs="append", default=[]),
        flag("--kwargs", json_value, {}),
        flag("--kind", choices=("a", "b")),
        switch("--colocate"),
        switch("--offload-train", default=None),
        off_switch("--disable-bias-linear", "add_bias_linear"),
    ]
)


def values(*words: str) -> dict:
    return parse_command_line(words, TABLE).values


def problems(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse_command_line(words, TABLE)
    return error.value.problems


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--load", "X"], {"load": "X"}),
        (["--load=X=Y"], {"load": "X=Y"}),
        (["--lr", "1e-6"], {"lr": 1e-6}),
        (["--rollout-top-k", "-1"], {"rollout_top_k": -1}),
        (["--rollout-stop", "a", "b", "--lr", "1"], {"rollout_stop": ["a", "b"], "lr": 1.0}),
        (["--rollout-stop=--"], {"rollout_stop": ["--"]}),
        (["--names"], {"names": []}),
        (["--spec", "m", "f"], {"spec": ["m", "f"]}),
        (["--hook", "a", "--hook", "b"], {"hook": ["a", "b"]}),
        (["--kwargs", '{"a": 1}'], {"kwargs": {"a": 1}}),
        (["--colocate", "--no-offload-train"], {"colocate": True, "offload_train": False}),
        (["--disable-bias-linear"], {"add_bias_linear": False}),
        (["--lr", "1", "--lr", "2"], {"lr": 2.0}),
    ],
)
def test_values(words: list[str], expected: dict) -> None:
    assert values(*words) == expected


def test_load_is_not_taken_for_a_longer_flag() -> None:
    """P2: `--load X` sets only load; `--loa X` is an error."""
    assert values("--load", "X") == {"load": "X"}
    assert problems("--loa", "X") == ["unknown flag --loa (did you mean --load, --load-debug-rollout-data?)"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--lr"], "--lr needs a value"),
        (["--lr", "fast"], "--lr: 'fast' is not a number"),
        (["--lr", "1", "2"], "--lr takes one value"),
        (["stray"], "unexpected argument 'stray'"),
        (["--colocate", "true"], "--colocate takes no value"),
        (["--spec", "m"], "--spec takes 2 values"),
        (["--kind", "c"], "--kind: 'c' is not one of a, b"),
        (["--kwargs", "{"], "--kwargs: '{' is not JSON"),
        (["--rollout-stop"], "--rollout-stop needs a value"),
    ],
)
def test_one_problem(words: list[str], part: str) -> None:
    found = problems(*words)
    assert len(found) == 1
    assert part in found[0]


def test_a_number_is_asked_for_in_plain_words() -> None:
    assert problems("--lr", "fast") == ["--lr: 'fast' is not a number"]


def test_all_problems_at_once() -> None:
    assert len(problems("--lrr", "1", "--kind", "c", "--lr", "fast", "--colocated")) == 4


def test_removed_flag_says_why() -> None:
    assert "never had an effect" in problems("--http-proxy", "x")[0]


@pytest.mark.parametrize("text", ["([1]*4)", "'([1]*4)'", '"([1]*4)"', "[1,1,1,1]", "[1]+[1]*3"])
def test_layer_pattern(text: str) -> None:
    """C12: a list argument is accepted with and without inner quotes."""
    assert layer_pattern(text) == [1, 1, 1, 1]


def test_layer_pattern_is_never_run() -> None:
    assert layer_pattern("2") == 2
    with pytest.raises(ValueError, match="expected an integer or a list"):
        layer_pattern("__import__('os').getpid()")
    with pytest.raises(ValueError, match="expected an integer or a list"):
        layer_pattern("['a']")


def test_window_size() -> None:
    assert window_size("(128,0)") == (128, 0)


def test_two_flags_with_one_spelling_are_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        FlagTable([flag("--a"), flag("--a", dest="b")])


def test_custom_arguments() -> None:
    """A user's function adds options, or changes a default with reset_arg; choices and type stay."""
    from slime.utils.arguments import reset_arg

    def add(parser):
        parser.add_argument("--max-turns", type=int, default=3)
        reset_arg(parser, "--micro-batch-size", type=int, default=2)
        return parser

    table = flag_table().with_custom(add)
    assert table.by_dest["max_turns"].default == 3
    assert table.by_dest["micro_batch_size"].default == 2
    assert parse_command_line(["--max-turns", "5"], table).values == {"max_turns": 5}
    assert "max_turns" not in flag_table().by_dest
