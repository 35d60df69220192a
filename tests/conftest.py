"""Profiles, shape checking, and the small checkpoints that tests share."""

import os
import secrets

# One thread a framework: on shared cores torch's threads wait for each other by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
from jaxtyping import install_import_hook

# Shapes in the signatures are checked while testing, and only then.
hook = install_import_hook(["qwen35"], "beartype.beartype")

hypothesis.settings.register_profile("default", deadline=None, max_examples=30)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=60, derandomize=True)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=500, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_configure(config: pytest.Config) -> None:
    """Draw a fresh seed for the nightly profile, so that a red night can be run again."""
    if config.getoption("--hypothesis-profile", None) == "nightly" and (
        config.getoption("--hypothesis-seed", None) is None
    ):
        config.option.hypothesis_seed = str(secrets.randbits(32))


def pytest_report_header(config: pytest.Config) -> str:
    """Say with which profile and seed properties are drawn."""
    profile = config.getoption("--hypothesis-profile", None) or (
        "ci" if os.environ.get("CI") else "default"
    )
    return f"properties: profile {profile}, seed {config.getoption('--hypothesis-seed', None)}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect (and so report) nightly and workers tests unless they are asked for with -m."""
    if config.getoption("-m"):
        return
    left_out = [
        item
        for item in items
        if item.get_closest_marker("nightly") or item.get_closest_marker("workers")
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """The suite's small checkpoints, each exported when first asked for."""
    from checkpoints import Checkpoints

    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))
