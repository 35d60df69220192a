"""Public faults of mlx-lm's batches, found in the versions that have them and in no other."""

import pytest
from batch_programs import Steps, decodes, judged, prompt
from workers.edited import edited_copy

from parity.commands.worker_options import cache_folder
from parity.runners.base import RunnerOptions
from parity.runners.worker import Workers
from qwen35.errors import CannotRunError

pytestmark = pytest.mark.workers

TAIL, STATE = "layers.0.linear_attn.conv_tail", "layers.0.linear_attn.recurrent_state"
PADDED = [prompt(2, 9, lengths=[5, 9]), *decodes(2, 3), prompt(2, 3)]
GOES_ON = [prompt(2, 6), prompt(2, 5, lengths=[2, 5]), *decodes(2)]
ROWS: Steps = [
    *PADDED,
    {"op": "filter", "rows": [1, 0]},
    {"op": "extend", "program": [prompt(2, 4, lengths=[0, 4])]},
    prompt(4, 6, lengths=[6, 2, 0, 3], chunk=4),
    {"op": "extract", "row": 1},
    *decodes(1),
]


@pytest.fixture(scope="module")
def workers():
    """One process a version for all tests; the environments are kept for the next session."""
    with Workers(cache_folder(None), timeout=600, say=print) as workers:
        yield workers


@pytest.fixture
def judge(checkpoints, workers):
    def judged_with(version, steps, dtype="float32"):
        semantics = "mlx-lm-0.31" if version < "0.32" else "mlx-lm-0.32"
        options = RunnerOptions(semantics, workers)
        return judged(checkpoints, steps, dtype, f"mlx-lm=={version}", options=options)

    return judged_with


@pytest.mark.parametrize(
    ("version", "dtype"),
    [
        ("0.31.2", "float32"),  # mlx 0.31.1 compiles the float16 rule wrong
        ("0.31.2", "bfloat16"),
        ("0.32.0", "float32"),
        ("0.32.0", "float16"),
        ("0.32.2", "bfloat16"),
    ],
)
def test_versions_without_these_faults_agree_bit_for_bit(judge, version, dtype):
    value = judge(version, ROWS, dtype)
    (pair,) = value["pairs"].values()
    assert pair["identical"] == pair["compared"] > 0, value["first_divergence"]


@pytest.mark.parametrize("version", ["0.30.7", "0.31.1"])
def test_left_padding_that_is_never_used_up_is_found_at_the_first_decode(judge, version):
    first = judge(version, PADDED)["first_divergence"]
    assert (first["step"], first["tap"], first["row"]) == (1, TAIL, 0)
    assert first["max_abs"] > 1


@pytest.mark.parametrize("version", ["0.30.7", "0.31.1"])
def test_a_tail_from_the_padded_end_is_found_where_a_prompt_goes_on(judge, version):
    first = judge(version, GOES_ON)["first_divergence"]
    assert (first["step"], first["tap"], first["row"]) == (1, TAIL, 0)


@pytest.mark.parametrize(("steps", "at"), [(PADDED, 0), (GOES_ON, 1)])
def test_right_padding_that_moves_the_state_is_found_in_0_31_3(judge, steps, at):
    first = judge("0.31.3", steps)["first_divergence"]
    assert (first["step"], first["tap"], first["row"]) == (at, STATE, 0)


def test_old_versions_say_why_a_new_ragged_prompt_has_no_chunks(judge):
    with pytest.raises(CannotRunError, match=r"pads new prompts on the left.*Leave out chunk"):
        judge("0.31.1", [prompt(2, 9, lengths=[5, 9], chunk=4)])


def test_an_edited_copy_that_ignores_lengths_is_found(checkpoints, workers, tmp_path):
    old = "mask = in_length if mask is None else (mask & in_length)"
    copy = edited_copy(tmp_path, "models/cache.py", old, "pass")
    options = RunnerOptions(workers=workers)
    value = judged(checkpoints, PADDED, oracle=f"mlx-lm@{copy}", options=options)
    first = value["first_divergence"]
    assert (first["step"], first["tap"], first["row"]) == (0, STATE, 0)
