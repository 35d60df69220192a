import json
import os

import pytest
from report_samples import differing, holding

import parity_reports
from qwen35.errors import InputError


def test_each_report_lands_in_its_file(tmp_path):
    paths = {kind: tmp_path / kind for kind in ("html", "markdown", "junit", "json")}
    parity_reports.write(differing(), **paths)
    starts = {kind: path.read_text()[:5] for kind, path in paths.items()}
    assert starts == {"html": "<!doc", "markdown": "## Qw", "junit": "<?xml", "json": '{\n "s'}


def test_json_says_what_the_result_says(tmp_path):
    parity_reports.write(differing(), json=tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text()) == differing()


def test_markdown_can_be_appended(tmp_path):
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    parity_reports.write(holding(), markdown=summary, append=True)
    assert summary.read_text().startswith("before\n## Qwen3.5 parity: holds")


def test_an_older_report_is_replaced(tmp_path):
    (tmp_path / "r.json").write_text("old" * 10_000_000)
    parity_reports.write(holding(), json=tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["verdict"] == "holds"


def test_no_temporary_file_is_left_behind(tmp_path):
    parity_reports.write(holding(), html=tmp_path / "r.html")
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def test_a_failed_write_leaves_the_older_report_whole(tmp_path, monkeypatch):
    (tmp_path / "r.json").write_text("old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(InputError, match="No space left on device"):
        parity_reports.write(holding(), json=tmp_path / "r.json")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"r.json": "old"}


def test_a_report_is_as_readable_as_other_new_files(tmp_path):
    (tmp_path / "other").touch()
    parity_reports.write(holding(), json=tmp_path / "r.json")
    assert (tmp_path / "r.json").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_missing_folder_is_named_with_its_remedy(tmp_path):
    with pytest.raises(InputError, match=r"no/r\.html.*no folder.*Make the folder"):
        parity_reports.write(holding(), html=tmp_path / "no" / "r.html")


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="Is a directory"):
        parity_reports.write(holding(), junit=tmp_path)
