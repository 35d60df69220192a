"""Claims that hold trivially where products do not depend on the number of rows.

Run in a process of its own with OpenBLAS preloaded: there f32 products do depend on it.
"""

import mlx.core as mx
from tiny_models import assert_same, bits, drawn_ids, held, run, tiny_model

import qwen35.attention
import qwen35.forward
from qwen35.round import accept, arm

SEEN = 5
NO_DIFFERENCE = "attention does not depend on the number of rows here"


def claim_an_append_is_token_by_token(
    dtype: str, rows: int, tokens: int, independent_rows: bool
) -> None:
    """Append at once and one by one after the same prefix; compare states and logits."""
    model, ids = tiny_model(dtype), drawn_ids(rows, SEEN + tokens)
    options = {"independent_rows": independent_rows}
    at_once = model.make_cache()
    run(model, ids[:, :SEEN], at_once)
    one_by_one = model.make_cache()
    one_by_one.restore(at_once.snapshot())
    logits = run(model, ids[:, SEEN:], at_once, **options)
    for t in range(SEEN, SEEN + tokens):
        # One row's decode needs no mode: it is the arithmetic that the mode copies.
        mode = {} if rows == 1 else options
        token = run(model, ids[:, t : t + 1], one_by_one, **mode)
        assert bits(logits[:, t - SEEN]) == bits(token[:, 0]), t
    assert_same(held(at_once), held(one_by_one))


def claim_a_round_is_token_by_token(independent_rows: bool) -> None:
    """Verify four tokens and keep some: the states of decoding those."""
    model, ids = tiny_model(), drawn_ids(1, SEEN + 4)
    for keep in range(5):
        cut = model.make_cache()
        run(model, ids[:, :SEEN], cut)
        decoded = model.make_cache()
        decoded.restore(cut.snapshot())
        arm(cut)
        run(model, ids[:, SEEN:], cut, independent_rows=independent_rows)
        accept(model, cut, keep)
        for t in range(SEEN, SEEN + keep):
            run(model, ids[:, t : t + 1], decoded)
        assert_same(held(cut), held(decoded))


def claim_replayed_states_are_those_of_the_recorded_inputs() -> None:
    """Keep part of a plain forward; feed a fresh forward the recorded qkv, a, b of that part."""
    model, ids, keep = tiny_model(), drawn_ids(2, SEEN + 4), 3
    cut = model.make_cache()
    run(model, ids[:, :SEEN], cut)
    fed = model.make_cache()
    fed.restore(cut.snapshot())
    taken: dict[str, mx.array] = {}
    arm(cut)
    run(model, ids[:, SEEN:], cut, tap=lambda name, x: taken.setdefault(name, x))
    accept(model, cut, keep)

    def feed(name: str, x: mx.array) -> mx.array:
        return taken[name][:, :keep] if name.endswith((".qkv", ".a", ".b")) else x

    run(model, ids[:, SEEN : SEEN + keep], fed, tap=feed)
    for i in (0, 2):
        assert bits(cut[i].conv_tail) == bits(fed[i].conv_tail), i
        assert bits(cut[i].recurrent_state) == bits(fed[i].recurrent_state), i


def with_flattened_products() -> None:
    """Project a batch of one-row products, which MLX flattens: no independent rows."""

    def batched(layer, x):
        return layer(x[:, :, None])[:, :, 0]

    qwen35.forward.one_by_one = batched
    claim_an_append_is_token_by_token("float32", 1, 4, True)


def with_attention_in_one() -> None:
    """Attend with all queries at once; on some processors OpenBLAS gives the same bits."""
    layer = qwen35.attention.GatedAttention
    in_one, apart = layer._attend, layer._attend_one_by_one
    model, ids, seen = tiny_model(), drawn_ids(1, SEEN + 4), []

    def both(self, *args):
        seen.append(bits(in_one(self, *args)) == bits(apart(self, *args)))
        return in_one(self, *args)

    layer._attend_one_by_one = both
    cache = model.make_cache()
    run(model, ids[:, :SEEN], cache)
    run(model, ids[:, SEEN:], cache, independent_rows=True)
    if seen and all(seen):
        print(NO_DIFFERENCE)
        return
    layer._attend_one_by_one = in_one
    claim_an_append_is_token_by_token("float32", 1, 4, True)
