import re

import pytest
from report_samples import FIRST_TAP, HOSTILE, differing, holding, hostile, not_run

from parity_reports import markdown


def test_the_summary_opens_with_the_verdict():
    assert markdown.render(differing()).startswith("## Qwen3.5 parity: differs\n")


def test_the_first_divergence_is_named():
    assert f"| tap | <code>{markdown.escape(FIRST_TAP)}</code> |" in markdown.render(differing())


def test_the_repeat_command_stands_in_a_code_block():
    result = differing()
    assert f"```sh\n{result['first_divergence']['repeat']}\n```" in markdown.render(result)


def test_each_oracle_has_a_row_of_totals():
    text = markdown.render(differing())
    assert "| <code>transformers</code> | 4,890 | 3,260 | 1,544 | 86 | 10 |" in text


def test_failing_tensors_are_capped_and_counted():
    text = markdown.render(differing())
    assert "### Failing tensors (86)" in text
    assert "and 66 more." in text


def test_a_run_that_holds_lists_no_failing_tensors():
    assert "Failing" not in markdown.render(holding())


def test_a_run_that_compared_nothing_is_no_pass():
    text = markdown.render(not_run())
    assert "not run" in text
    assert "this is no pass" in text
    assert "MLX has no gpu device here" in text


@pytest.mark.parametrize("char", list("|`*_<>[]&#~!\\"))
def test_a_character_with_a_meaning_is_escaped(char):
    assert markdown.escape(f"a{char}b") == f"a&#{ord(char)};b"


def test_hostile_names_leave_every_table_row_whole():
    rows = [x for x in markdown.render(hostile()).splitlines() if x.startswith("| <code>")]
    assert [row.count("|") for row in rows] == [7, 7]


def test_a_command_with_backticks_stays_inside_its_fence():
    text = markdown.render(hostile("a```b\n```\n# c"))
    fences = re.findall("^`{4}", text, re.MULTILINE)
    assert len(fences) == 2


def test_no_html_of_a_name_survives_outside_the_code_block():
    text = re.sub(r"```sh\n.*\n```", "", markdown.render(hostile(HOSTILE)))
    assert "<script" not in text
    assert "<img" not in text
