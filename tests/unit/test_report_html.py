import base64
import hashlib
import json
import re

import pytest
from report_samples import HOSTILE, cell, differing, holding, hostile, not_run

from parity_reports import html
from parity_reports.verdicts import column_groups


def embedded(page):
    return json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.DOTALL)[1])


def policy(page):
    return re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1].replace("&#39;", "'")


def sha(text):
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_nothing_is_allowed_that_is_not_named():
    assert policy(html.render(holding())).startswith("default-src 'none';")


@pytest.mark.parametrize("element", ["style", "script"])
def test_the_policy_holds_the_hash_of_each_inlined_file(element):
    page = html.render(holding())
    text = re.search(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)[1]
    assert f"{element}-src '{sha(text)}'" in policy(page)


def test_no_inline_style_or_handler_that_the_policy_would_block():
    tags = " ".join(re.findall(r"<[a-z][^>]*>", html.render(differing())))
    assert not re.search(r"\s(style|on[a-z]+)=", tags)


def test_the_page_names_no_address():
    assert not re.search(r"https?://|//[a-z]+\.", html.render(differing()))


def test_hostile_names_open_no_element():
    page = html.render(hostile())
    assert page.count("<script") == 2
    assert "<img" not in page


def test_hostile_names_arrive_whole_but_for_control_characters():
    (case,) = embedded(html.render(hostile()))["cases"]
    assert case["name"] == HOSTILE.replace("\x1b", r"\x1b").replace("\x00", r"\x00").replace(
        "\u202e", r"\u202e"
    )


def test_every_cell_is_embedded():
    result = differing()
    cells = [c for case in embedded(html.render(result))["cases"] for c in case["pairs"].values()]
    assert sum(len(pair["cells"]) for pair in cells) == sum(
        len(pair["cells"]) for case in result["cases"] for pair in case["pairs"].values()
    )


def test_failing_cases_come_first():
    states = [
        "fails" in [pair["state"] for pair in case["pairs"].values()]
        for case in embedded(html.render(differing()))["cases"]
    ]
    assert states == sorted(states, reverse=True)


def test_a_number_that_json_lacks_is_still_shown():
    result = holding()
    result["cases"][0]["pairs"]["mlx-lm"]["cells"][0]["max_abs"] = float("inf")
    assert "Infinity" in json.dumps(embedded(html.render(result)))


def test_columns_follow_the_order_of_computation():
    groups = column_groups([])
    assert [(group.title, group.taps[0], group.taps[-1]) for group in groups] == [
        ("in", "input_layernorm", "input_layernorm"),
        ("linear attention", "linear_attn.qkv", "linear_attn.out"),
        ("full attention", "self_attn.q_proj", "self_attn.out"),
        ("block", "residual", "output"),
    ]


def test_a_tap_in_no_list_has_a_column_too():
    assert column_groups([cell("layers.0.surprise")])[-1].taps == ("surprise",)


def test_a_run_that_compared_nothing_is_no_pass():
    page = html.render(not_run())
    assert "this is no pass" in page
    assert "MLX has no gpu device here" in page


def test_unknown_fields_are_let_be():
    assert html.render(holding() | {"new": {"field": 1}}) == html.render(holding())
