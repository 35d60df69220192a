"""The report as JUnit XML: one test case for each case and oracle."""

import xml.etree.ElementTree as ET
from collections.abc import Iterator

from parity_reports.text import (
    Result,
    clean,
    divergence_lines,
    due,
    headline,
    number,
    pairs,
)
from parity_reports.verdicts import fails, full_name

_CAP = 50


def render(result: Result) -> str:
    """Return the XML. A run that compared nothing is an error, never a row of skips alone."""
    result = clean(result)
    top = ET.Element("testsuites", name="qwen35-parity", time=str(result.get("seconds") or 0))
    oracles = dict.fromkeys(pairs(result)) | dict.fromkeys(
        oracle for case in result.get("cases") or () for oracle in case.get("pairs") or ()
    )
    for oracle in oracles:
        suite = ET.SubElement(top, "testsuite", name=oracle)
        _add_properties(suite, result)
        for case in result.get("cases") or ():
            if (pair := (case.get("pairs") or {}).get(oracle)) is not None:
                _add_case(suite, str(case.get("name")), oracle, pair, result)
        _count(suite)
    if result.get("verdict", "not-run") == "not-run":
        suite = ET.SubElement(top, "testsuite", name="run")
        entry = ET.SubElement(suite, "testcase", classname="parity", name="something was compared")
        error = ET.SubElement(entry, "error", message=headline(result)[1], type="not-run")
        error.text = str(result.get("error") or result.get("repeat") or "")
        _count(suite)
    _count(top)
    ET.indent(top)
    return ET.tostring(top, encoding="unicode", xml_declaration=True) + "\n"


def _add_properties(suite: ET.Element, result: Result) -> None:
    properties = ET.SubElement(suite, "properties")
    facts = {"candidate": result.get("candidate"), "seed": result.get("seed")}
    for name, value in (facts | (result.get("environment") or {})).items():
        ET.SubElement(properties, "property", name=name, value=str(value))


def _add_case(suite: ET.Element, name: str, oracle: str, pair: Result, result: Result) -> None:
    entry = ET.SubElement(suite, "testcase", classname=f"parity.{oracle}", name=name)
    if pair.get("failed"):
        lines = list(_failures(name, oracle, pair, result))
        ET.SubElement(entry, "failure", message=lines[0], type="differs").text = "\n".join(lines)
    elif pair.get("not_compared"):
        ET.SubElement(entry, "skipped", message=str(pair["not_compared"]))
    elif not pair.get("compared"):
        message = "nothing was compared, and no reason was given"
        ET.SubElement(entry, "error", message=message, type="not-run")


def _failures(name: str, oracle: str, pair: Result, result: Result) -> Iterator[str]:
    yield f"{pair['failed']:,} of {pair.get('compared', 0):,} comparisons with {oracle} fail"
    first = result.get("first_divergence")
    if first and (first.get("case"), first.get("oracle")) == (name, oracle):
        yield "first divergence of the run:"
        yield from (f"  {label}: {text}" for label, text in divergence_lines(first))
        yield f"  again: {first.get('repeat')}"
    failing = [cell for cell in pair.get("cells") or () if fails(str(cell.get("verdict")))]
    for cell in failing[:_CAP]:
        yield (
            f"{full_name(cell)}: {cell.get('verdict')} at step {cell.get('step')}; "
            f"max {number(cell.get('max_ulp'))} ulp, max abs {number(cell.get('max_abs'))}; "
            f"due {due(cell)}"
        )
    if len(failing) > _CAP:
        yield f"and {len(failing) - _CAP:,} more tensors"


def _count(suite: ET.Element) -> None:
    suite.set("tests", str(len(list(suite.iter("testcase")))))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(len(list(suite.iter(tag)))))
