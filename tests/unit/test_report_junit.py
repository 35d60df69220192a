import xml.etree.ElementTree as ET

import pytest
from report_samples import (
    FAILING_CASE,
    LEFT_OUT,
    differing,
    holding,
    hostile,
    not_run,
    nothing_compared,
)

from parity_reports import junit


def parsed(result):
    return ET.fromstring(junit.render(result).encode())


def test_each_case_and_oracle_is_one_test():
    result = holding()
    entries = [(t.get("classname"), t.get("name")) for t in parsed(result).iter("testcase")]
    assert sorted(entries) == sorted(
        (f"parity.{oracle}", case["name"]) for case in result["cases"] for oracle in case["pairs"]
    )


def test_a_failing_case_says_where_and_how_to_see_it_again():
    result = differing()
    (failure,) = parsed(result).iter("failure")
    assert failure.get("message") == "86 of 489 comparisons with transformers fail"
    assert "tap: layers.3.self_attn.q_rope" in failure.text
    assert result["first_divergence"]["repeat"] in failure.text


def test_the_failure_belongs_to_the_case_that_failed():
    (entry,) = [t for t in parsed(differing()).iter("testcase") if t.find("failure") is not None]
    assert (entry.get("classname"), entry.get("name")) == ("parity.transformers", FAILING_CASE)


def test_what_was_not_compared_is_skipped_with_its_reason():
    assert {s.get("message") for s in parsed(holding()).iter("skipped")} == {LEFT_OUT}


def test_counts_add_up():
    top = parsed(differing())
    assert [top.get(key) for key in ("tests", "failures", "errors", "skipped")] == [
        "40",
        "1",
        "0",
        "10",
    ]


@pytest.mark.parametrize("make", [not_run, nothing_compared])
def test_a_run_that_compared_nothing_is_an_error(make):
    assert parsed(make()).get("errors") == "1"


@pytest.mark.parametrize("char", ["\x00", "\x1b", "\ud800", "\ufffe", "]]>", "<&\"'"])
def test_any_name_gives_valid_xml(char):
    assert parsed(hostile(f"a{char}b")).get("failures") == "1"
