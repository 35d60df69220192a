"""The runner for mlx-lm, unmodified: its modules are observed and the functions they call wrapped.

Written against 0.30.7 to 0.32.2: what moved between them (`normalize_qk`, the home of the layer
classes) is found from the loaded model, not from names of one version.
"""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from parity.program import Program
from parity.runners.imports import importing
from parity.runners.mlx_arrays import record, recorder, run_info
from parity.runners.mlx_lm_batches import Batch, empty
from parity.states import States
from parity.taps import FULL, LINEAR
from parity.trace import Feed, Trace
from qwen35.errors import CannotRunError, CheckpointError
from qwen35.headers import Checkpoint

Take = Callable[[str, mx.array], mx.array]
# The one parameter that mlx-lm's cast_predicate (models/qwen3_5.py) leaves as it is stored. Written
# here again: a name shared with the implementation would be wrong in both.
_UNCAST = "A_log"


class MlxLmRunner:
    """Runs mlx-lm's own model and caches on the checkpoint."""

    name = "mlx-lm"

    def __init__(self, checkpoint: Checkpoint, dtype: str) -> None:
        self.dtype = dtype
        self.model = _load(checkpoint, getattr(mx, dtype))
        self.text = self.model.language_model
        self.blocks = list(self.text.model.layers)
        self.layer_types = tuple(LINEAR if b.is_linear else FULL for b in self.blocks)
        self._prefix = ""
        self._tap: Take = lambda name, value: value
        # Found before any module is observed, since observing changes a module's type.
        self._functions = self._wrapped_functions()
        self._observe_modules()

    def run(self, program: Program, feed: Feed | None = None) -> Trace:
        """See Runner; of even programs alone, with its batch caches where rows are chosen."""
        program.check_vocabulary(self.text.args.vocab_size)
        trace = Trace(self.name, self.layer_types, self._info())
        chosen = program.chosen_rows()
        cache = self.model.make_cache() if program.is_plain else empty(self.model, program.rows)
        with replaced(self._functions):
            for forward, (_, _, ids) in enumerate(program.forwards()):
                if (rows := chosen[forward]) is not None:
                    for entry in cache:
                        entry.filter(mx.array(rows))
                taken: dict[str, mx.array] = {}
                self._tap = recorder(taken, forward, feed, getattr(mx, self.dtype))
                try:
                    logits = self.model(mx.array(ids.astype(np.int32)), cache=cache)
                finally:
                    self._tap = lambda name, value: value
                taken["logits"] = logits
                record(trace, forward, taken)
        return trace

    def states(self, program: Program) -> States:
        """See StatefulRunner; with its batch caches from the first token on."""
        vocabulary = self.text.args.vocab_size
        program.check_vocabulary(vocabulary)
        moments = list(Batch(self.model, vocabulary).run(program.steps))
        return States(self.name, self.layer_types, self._info(), moments)

    def _info(self) -> dict[str, Any]:
        # Not the installed distribution's: an edited copy may have been imported before it.
        return run_info(self.dtype) | {"mlx-lm": sys.modules["mlx_lm"].__version__}

    def _take(self, name: str, value: mx.array) -> mx.array:
        return self._tap(self._prefix + name, value)

    def _observe_modules(self) -> None:
        trunk = self.text.model
        observe(trunk.embed_tokens, after=lambda args, x: self._tap("embed_tokens", x))
        observe(trunk.norm, after=lambda args, x: self._tap("norm", x))
        for i, block in enumerate(self.blocks):
            if block.is_linear:
                self._observe_linear(block.linear_attn)
            else:
                self._observe_full(block.self_attn)
            self._watch(block.input_layernorm, "input_layernorm")
            observe(
                block.post_attention_layernorm,
                before=lambda args: (self._take("residual", args[0]), *args[1:]),
                after=lambda args, x: self._take("post_attention_layernorm", x),
            )
            self._watch(block.mlp.gate_proj, "mlp.gate")
            self._watch(block.mlp.up_proj, "mlp.up")
            observe(
                block.mlp.down_proj,
                before=lambda args: (self._take("mlp.act", args[0]), *args[1:]),
                after=lambda args, x: self._take("mlp.out", x),
            )
            observe(block, before=self._enter(i), after=self._leave(block.is_linear))

    def _enter(self, layer: int) -> Callable[[tuple], tuple]:
        def before(args: tuple) -> tuple:
            self._prefix = f"layers.{layer}."
            return args

        return before

    def _leave(self, is_linear: bool) -> Callable[[dict, mx.array], mx.array]:
        def after(args: dict, output: mx.array) -> mx.array:
            cache = args["cache"]
            if is_linear:
                self._take("linear_attn.conv_tail", cache[0])
                self._take("linear_attn.recurrent_state", cache[1])
            else:
                self._take("self_attn.offset", mx.full((output.shape[0],), cache.offset, mx.int32))
            return self._take("output", output)

        return after

    def _watch(self, module: nn.Module, name: str) -> None:
        observe(module, after=lambda args, x: self._take(name, x))

    def _observe_linear(self, layer: nn.Module) -> None:
        heads = (layer.num_v_heads, layer.head_v_dim)
        for name in ("qkv", "b", "a"):
            self._watch(layer[f"in_proj_{name}"], f"linear_attn.{name}")

        def z_in_heads(args: dict, z: mx.array) -> mx.array:
            return self._take("linear_attn.z", z.reshape(*z.shape[:2], *heads)).reshape(z.shape)

        observe(layer.in_proj_z, after=z_in_heads)
        self._watch(layer.norm, "linear_attn.norm")
        self._watch(layer.out_proj, "linear_attn.out")

    def _observe_full(self, layer: nn.Module) -> None:
        heads, kv_heads = layer.num_attention_heads, layer.num_key_value_heads

        def queries_and_gate(args: dict, x: mx.array) -> mx.array:
            rows, tokens, _ = x.shape
            queries, gate = mx.split(x.reshape(rows, tokens, heads, -1), 2, axis=-1)
            queries = self._take("self_attn.q_proj", queries)
            gate = self._take("self_attn.gate", gate.reshape(rows, tokens, -1))
            joined = [queries, gate.reshape(queries.shape)]
            return mx.concatenate(joined, axis=-1).reshape(x.shape)

        def in_heads(name: str) -> Callable[[dict, mx.array], mx.array]:
            def after(args: dict, x: mx.array) -> mx.array:
                split = x.reshape(*x.shape[:2], kv_heads, -1)
                return self._take(name, split).reshape(x.shape)

            return after

        def rotated(args: dict, x: mx.array) -> mx.array:
            # One module rotates both; it is called for the queries, then for the keys.
            self._rotations += 1
            return self._take(f"self_attn.{'q' if self._rotations % 2 else 'k'}_rope", x)

        self._rotations = 0
        observe(layer.q_proj, after=queries_and_gate)
        observe(layer.k_proj, after=in_heads("self_attn.k_proj"))
        observe(layer.v_proj, after=in_heads("self_attn.v"))
        self._watch(layer.q_norm, "self_attn.q_norm")
        self._watch(layer.k_norm, "self_attn.k_norm")
        observe(layer.rope, after=rotated)
        observe(
            layer.o_proj,
            before=lambda args: (self._take("self_attn.gated", args[0]), *args[1:]),
            after=lambda args, x: self._take("self_attn.out", x),
        )

    def _wrapped_functions(self) -> list[tuple[Any, str, Any]]:
        wrapped: list[tuple[Any, str, Any]] = []
        linear = next((b.linear_attn for b in self.blocks if b.is_linear), None)
        full = next((b.self_attn for b in self.blocks if not b.is_linear), None)
        if linear is not None:
            home = sys.modules[type(linear).__module__]
            rule = sys.modules[home.gated_delta_update.__module__]
            wrapped.append((home, "nn", _Namespace(home.nn, silu=self._conv_out(home.nn.silu))))
            wrapped.append((home, "gated_delta_update", self._update(home.gated_delta_update)))
            for name in ("gated_delta_ops", "gated_delta_kernel"):
                wrapped.append((rule, name, self._rule(getattr(rule, name))))
        if full is not None:
            home = sys.modules[type(full).__module__]
            name = "scaled_dot_product_attention"
            wrapped.append((home, name, self._attention(getattr(home, name))))
        return wrapped

    def _conv_out(self, silu: Callable) -> Callable:
        return lambda x: self._take("linear_attn.conv_out", silu(x))

    def _update(self, update: Callable) -> Callable:
        def wrapper(q: mx.array, k: mx.array, v: mx.array, *args: Any, **options: Any) -> Any:
            q, k, v = (
                self._take(f"linear_attn.{n}", x) for n, x in zip("qkv", (q, k, v), strict=True)
            )
            y, state = update(q, k, v, *args, **options)
            return self._take("linear_attn.y", y), state

        return wrapper

    def _rule(self, rule: Callable) -> Callable:
        def wrapper(
            q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, *rest: Any
        ) -> Any:
            g, beta = self._take("linear_attn.g", g), self._take("linear_attn.beta", beta)
            return rule(q, k, v, g, beta, *rest)

        return wrapper

    def _attention(self, attend: Callable) -> Callable:
        def wrapper(queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> Any:
            keys = self._take("self_attn.keys", keys)
            values = self._take("self_attn.values", values)
            return self._take("self_attn.attention", attend(queries, keys, values, **options))

        return wrapper


class _Namespace:
    """A module with some of its functions replaced."""

    def __init__(self, module: ModuleType, **replacements: Any) -> None:
        self._module = module
        self.__dict__.update(replacements)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def observe(
    module: nn.Module,
    before: Callable[[tuple], tuple] | None = None,
    after: Callable[[dict, mx.array], mx.array] | None = None,
) -> None:
    """Let `before` see and change the positional arguments, `after` the result, of this module.

    Only this instance is changed: it becomes an instance of a subclass that calls both.
    """
    kind = type(module)

    def call(self: nn.Module, *args: Any, **options: Any) -> Any:
        if before is not None:
            args = before(args)
        result = kind.__call__(self, *args, **options)
        return after(options, result) if after is not None else result

    module.__class__ = type(
        kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__}
    )


@contextlib.contextmanager
def replaced(functions: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes (owner, name, value) and restore them, whatever happens in between."""
    old = [(owner, name, getattr(owner, name)) for owner, name, _ in functions]
    try:
        for owner, name, value in functions:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in old:
            setattr(owner, name, value)


def _load(checkpoint: Checkpoint, dtype: mx.Dtype) -> nn.Module:
    with importing("mlx-lm"):
        import mlx_lm

        if importlib.util.find_spec("mlx_lm.models.qwen3_5") is None:
            raise CannotRunError(
                f"mlx-lm {mlx_lm.__version__} has no Qwen3.5 model. Name one from 0.30.7 on."
            )
        from mlx_lm.models import qwen3_5
        from mlx_lm.utils import load_model
    model_type = checkpoint.config.get("model_type")
    if model_type != "qwen3_5":
        raise CannotRunError(f"mlx-lm knows no model_type {model_type!r}; it reads 'qwen3_5'")

    class Cast(qwen3_5.Model):
        """Casts the stored tensors before sanitize, so that a γ−1 gain becomes γ in that dtype."""

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            floating = {
                name: w.astype(dtype)
                for name, w in weights.items()
                if mx.issubdtype(w.dtype, mx.floating) and not name.endswith(_UNCAST)
            }
            return super().sanitize(weights | floating)

    try:
        model, _ = load_model(
            checkpoint.path, lazy=True, get_model_classes=lambda config: (Cast, qwen3_5.ModelArgs)
        )
        mx.eval(model.parameters())
    except (ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            checkpoint.path, f"mlx-lm cannot load it ({error})", "Convert it again with mlx_lm"
        ) from None
    return model
