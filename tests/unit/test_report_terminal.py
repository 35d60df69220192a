import io

import pytest
from report_samples import FIRST_TAP, differing, holding, hostile, not_run, nothing_compared
from rich.console import Console

from parity_reports import terminal


def printed(result, width=80, **options):
    file = io.StringIO()
    terminal.render(result, Console(file=file, width=width, **options))
    return file.getvalue()


def test_the_report_opens_with_the_verdict():
    assert printed(differing()).startswith("DIFFERS  86 of 14,670 comparisons fail.")


def test_the_first_divergence_comes_before_the_totals():
    text = printed(differing())
    assert text.index(FIRST_TAP) < text.index("compared  identical")


def test_the_first_divergence_says_what_was_seen_and_what_was_due():
    words = " ".join(printed(differing()).split())
    assert "seen exceeds; max 17 ulp" in words
    assert "due error against float64 at most 0.004 (another summation order)" in words


def test_config_keys_that_nothing_reads_are_one_short_line_a_model():
    keys = {"a/mlx-lm": ["one"], "b/mlx-lm": [f"key{i}" for i in range(9)]}
    lines = printed(differing() | {"unknown_config_keys": keys}, width=100).splitlines()
    assert "config.json of a/mlx-lm: nothing here reads one" in lines
    assert (
        "config.json of b/mlx-lm: nothing here reads key0, key1, key2, key3, key4 and 4 more"
        in lines
    )


def test_the_repeat_command_is_one_line_that_can_be_copied():
    result = differing()
    assert any(
        line.endswith(result["first_divergence"]["repeat"])
        for line in printed(result, width=40).splitlines()
    )


@pytest.mark.parametrize("make", [differing, holding, not_run, nothing_compared])
def test_80_columns_are_enough(make):
    lines = printed(make()).splitlines()
    assert max(len(line.rstrip()) for line in lines if "again" not in line) <= 80


def test_a_log_file_gets_plain_ascii():
    text = printed(differing())
    assert text.isascii()
    assert "\x1b" not in text


def test_the_first_divergence_is_marked_in_the_table():
    (row,) = [line for line in printed(differing()).splitlines() if line.startswith(" 3 full")]
    assert ">X3" in row


def test_the_table_is_of_the_case_that_diverges():
    rows = printed(differing()).splitlines()
    (row,) = [line for line in rows if line.startswith(" 2 linear")]
    assert "X" not in row


def test_of_64_layers_only_those_with_a_failure_are_shown():
    text = printed(differing(64))
    assert "3 layers without a failure not shown" in text
    assert "\n63 full" in text


def test_a_run_that_compared_nothing_is_no_pass():
    text = printed(not_run())
    assert text.startswith("NOT RUN")
    assert "this is no pass" in text
    assert "MLX has no gpu device here" in text


def test_what_was_not_compared_is_said_with_its_reason():
    words = " ".join(printed(holding()).split())
    assert "10 cases: transformers cannot load a checkpoint in mlx-lm's layout" in words


def test_a_hostile_name_cannot_colour_the_terminal():
    assert "\x1b[31m" not in printed(hostile(), force_terminal=True)


def test_a_name_is_not_read_as_markup():
    assert "[bold]x[/bold]" in printed(hostile("[bold]x[/bold]"))


def test_an_ascii_terminal_shows_other_letters_spelled_out():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    terminal.render(hostile("naïve"), Console(file=file, width=80))
    file.flush()
    assert b"na\\xefve" in file.buffer.getvalue()
