"""The HTML report as a browser shows it, from its file and with no network."""

import shutil

import pytest
from playwright.sync_api import sync_playwright
from report_samples import FIRST_TAP, differing, hostile, names, nothing_compared

import parity_reports

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.fail(f"none of {', '.join(BROWSERS)} is installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def show(browser, tmp_path):
    """Open a result's report; what the page asked for and complained of is on the page object."""
    contexts = []

    def open_report(result, fragment="", **options):
        path = tmp_path / "report.html"
        parity_reports.write(result, html=path)
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.requests, page.complaints, page.dialogs = [], [], []
        page.on("request", lambda request: page.requests.append(request.url))
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))

        def dismiss(dialog):
            page.dialogs.append(dialog.message)
            dialog.dismiss()

        page.on("dialog", dismiss)
        page.goto(path.as_uri() + fragment)
        return page

    yield open_report
    for context in contexts:
        context.close()


def cell(page, name):
    return page.locator(f'[data-cell="{name}"]')


def test_nothing_but_the_file_is_requested(show):
    page = show(differing())
    page.wait_for_load_state("networkidle")
    assert [url.split(":")[0] for url in page.requests if not url.startswith("data:")] == ["file"]


def test_the_browser_has_no_complaint(show):
    page = show(differing())
    cell(page, FIRST_TAP).click()
    assert page.complaints == []


def test_the_policy_is_in_force(show):
    page = show(differing())
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), "
        "{textContent: 'window.injected = true'}))"
    )
    assert page.evaluate("window.injected") is None


def test_the_map_has_a_cell_for_every_tap(show):
    page = show(differing())
    drawn = page.locator("td.cell").evaluate_all("cells => cells.map(c => c.dataset.cell)")
    assert sorted(drawn) == sorted(names())


def test_the_first_divergence_alone_is_outlined(show):
    page = show(differing())
    outlined = page.locator("td.cell").evaluate_all(
        "cells => cells.filter(c => getComputedStyle(c).outlineStyle !== 'none')"
        ".map(c => c.dataset.cell)"
    )
    assert outlined == [FIRST_TAP]


def test_symbols_tell_verdicts_apart_without_colour(show):
    page = show(differing())
    found = set(page.locator("td.cell").all_inner_texts())
    assert found == {"≈", "≠", "?", "#", "T", "∞"}


def test_a_click_opens_the_numbers(show):
    page = show(differing())
    cell(page, "layers.0.linear_attn.q").click()
    text = page.locator("#panel").inner_text()
    assert "layers.0.linear_attn.q" in text
    assert "1: prefill tokens 6:9" in text
    assert "another summation order" in text
    assert "0.004" in text


def test_enter_opens_the_numbers(show):
    page = show(differing())
    cell(page, FIRST_TAP).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector("#panel:not([hidden])")
    assert page.locator("#panel h3").inner_text() == "layers.3.self_attn.k_rope"
    assert cell(page, "layers.3.self_attn.k_rope").get_attribute("aria-selected") == "true"


def test_arrows_cross_between_layers_of_either_type(show):
    page = show(differing())
    cell(page, "layers.3.input_layernorm").focus()
    seen = []
    for _ in range(3):
        page.keyboard.press("ArrowUp")
        seen.append(page.evaluate("document.activeElement.dataset.cell"))
    assert seen == [f"layers.{i}.input_layernorm" for i in (2, 1, 0)]


def test_tab_reaches_the_map_once(show):
    page = show(differing())
    assert page.locator('td.cell[tabindex="0"]').count() == 1


def test_escape_closes_the_numbers(show):
    page = show(differing())
    cell(page, FIRST_TAP).click()
    cell(page, FIRST_TAP).focus()
    page.keyboard.press("Escape")
    assert page.locator("#panel").is_hidden()


def test_an_address_leads_to_a_cell(show):
    page = show(
        differing(),
        "#case=tiny%2Ftransformers%2Ffloat32%2Fragged&oracle=mlx-lm&cell=layers.2.mlp.act",
    )
    assert page.locator("#map-title").inner_text() == "tiny/transformers/float32/ragged"
    assert page.locator("#panel h3").inner_text() == "layers.2.mlp.act"


def test_choosing_a_case_draws_it_and_keeps_the_place(show):
    page = show(differing())
    link = page.locator("#cases a", has_text="rollback").first
    link.scroll_into_view_if_needed()
    before = page.evaluate("scrollY")
    link.click()
    page.wait_for_function("document.getElementById('map-title').textContent.includes('rollback')")
    assert page.evaluate("scrollY") == before


def test_a_case_that_was_not_compared_says_why(show):
    page = show(nothing_compared())
    assert "cannot load a checkpoint" in page.locator("#note").inner_text()
    assert page.locator("td.cell").count() == 0


def test_hostile_names_are_inert(show):
    page = show(hostile())
    page.locator("td.cell").first.click()
    page.wait_for_selector("#panel:not([hidden])")
    assert page.dialogs == []
    assert page.complaints == []
    assert page.locator("img").count() == 0


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_the_page_follows_the_colour_scheme(show, scheme, dark):
    page = show(differing(), color_scheme=scheme)
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    channels = [int(x) for x in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    assert (sum(channels) < 3 * 128) is dark


def test_64_layers_scroll_inside_the_map_with_their_names_in_view(show):
    page = show(differing(64))
    last = cell(page, "layers.63.output")
    last.scroll_into_view_if_needed()
    assert page.locator("td.cell").count() == len(names(64))
    assert page.locator("th.tap", has_text="residual").is_visible()
    assert page.locator("#scroll").evaluate("map => map.clientHeight < innerHeight")
    last.click()
    assert page.locator("#panel h3").inner_text() == "layers.63.output"


def test_a_narrow_window_scrolls_the_map_and_not_the_page(show):
    page = show(differing(), viewport={"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    assert page.locator("#scroll").evaluate("map => map.scrollWidth > map.clientWidth")


def test_print_shows_the_whole_map(show):
    page = show(differing(64))
    page.emulate_media(media="print")
    assert page.locator("#scroll").evaluate("map => getComputedStyle(map).maxHeight") == "none"
    assert page.locator("#cases").is_hidden()


def test_print_is_light_where_the_screen_is_dark(show):
    page = show(differing(), color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert (
        page.locator(".card").first.evaluate("card => getComputedStyle(card).backgroundColor")
        == "rgb(255, 255, 255)"
    )
