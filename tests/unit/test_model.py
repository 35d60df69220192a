"""The implementation on its own: the graph without taps, long prefills, presets."""

import io

import mlx.core as mx
import pytest

from parity import suite
from parity.runners.mlx_arrays import to_numpy
from qwen35.headers import open_checkpoint
from qwen35.load import load
from qwen35.model import prefill


@pytest.fixture(scope="module")
def model(checkpoints):
    return load(open_checkpoint(checkpoints.path("tiny", "float32")))


IDS = mx.array([[5, 9, 77, 3, 130, 0, 41]])


def graph(model, **options):
    cache = model.make_cache()
    logits = model(IDS, cache, **options)
    text = io.StringIO()
    mx.export_to_dot(text, logits, *[array for entry in cache for array in entry.arrays()])
    return text.getvalue()


def test_taps_that_only_look_leave_the_graph_as_it_is(model):
    seen = []

    def look(name, value):
        seen.append(name)
        return value

    # Node names are addresses; the operations and their number are the graph.
    plain, tapped = (
        sorted(line.split("label")[1] for line in text.splitlines() if "label" in line)
        for text in (graph(model), graph(model, tap=look))
    )
    assert plain == tapped
    assert len(plain) > 100
    assert len(seen) > 100


def test_what_a_tap_returns_is_what_the_forward_goes_on_with(model):
    def zero(name, value):
        return value * 0 if name == "norm" else value

    assert not mx.any(model(IDS, model.make_cache(), tap=zero))


@pytest.mark.parametrize("chunk", [1, 3, 2048])
def test_a_chunked_prefill_ends_in_the_logits_of_one_forward(model, chunk):
    whole = model(IDS, model.make_cache())[:, -1:]
    last = prefill(model, IDS, model.make_cache(), chunk)
    assert to_numpy(last).tobytes() == to_numpy(whole).tobytes()


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(ValueError, match="an empty prompt"):
        prefill(model, IDS[:, :0], model.make_cache())


def peak(model, ids, eval_layers):
    cache = model.make_cache()
    mx.clear_cache()
    mx.reset_peak_memory()
    mx.eval(model(ids, cache, eval_layers=eval_layers)[:, -1:], [e.arrays() for e in cache])
    return mx.get_peak_memory() - mx.get_active_memory()


def test_evaluating_layer_by_layer_bounds_what_a_long_prefill_needs(model):
    ids = mx.zeros((1, 512), mx.int32)
    assert peak(model, ids, eval_layers=True) < peak(model, ids, eval_layers=False)


# The public sizes of heads-0.8b have Dk = Dv and Hk = Hv.
@pytest.mark.parametrize("label", sorted(set(suite.CHECKPOINTS) - {"heads-0.8b"}))
def test_no_two_dimensions_of_a_small_recipe_agree(label):
    config = suite.CHECKPOINTS[label].text_config
    sizes = [value for key, value in config.items() if key.endswith(("size", "dim", "heads"))]
    assert len(set(sizes)) == len(sizes)
