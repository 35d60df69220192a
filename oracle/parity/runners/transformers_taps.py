"""Every tap of one forward of transformers' Qwen3.5, seen by hooks and wrapped functions.

Hooks and wrappers live for one forward; they change nothing but, with a feed, a layer's input.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from parity.taps import LINEAR

Take = Callable[[str, Any], None]
LayerFeed = Callable[[int], Any]


@contextlib.contextmanager
def observed(
    model: Any,
    module: ModuleType,
    cache: Any,
    take: Take,
    feed: LayerFeed | None = None,
) -> Iterator[None]:
    """Give `take` every tap of one forward, in the layouts of parity.taps; undo it all at the end.

    `take` gets the name and the tensor itself, to be copied at once: caches are updated in place.
    `feed(layer)` is the tensor that enters the layer (past the last one, the final norm) instead of
    the residual stream.
    """
    with contextlib.ExitStack() as stack:
        observer = _Observer(model, cache, take, feed, stack)
        observer.hook_modules()
        stack.enter_context(replaced(module, observer.wrappers(module)))
        yield


class _Observer:
    """The hooks of one forward; `prefix` and `tokens` are those of the layer being computed."""

    def __init__(
        self,
        model: Any,
        cache: Any,
        take: Take,
        feed: LayerFeed | None,
        stack: contextlib.ExitStack,
    ) -> None:
        self.model, self.cache, self.take, self.feed, self.stack = model, cache, take, feed, stack
        self.config = model.config
        self.prefix, self.tokens = "", 0
        self.normalized: list[Any] = []

    def put(self, name: str, value: Any) -> None:
        self.take(self.prefix + name, value)

    def before(self, target: Any, see: Callable[[Any], Any]) -> None:
        """Show a module's first argument to `see`, which may return another in its place."""

        def hook(_: Any, args: tuple) -> tuple | None:
            new = see(args[0])
            return None if new is None else (new, *args[1:])

        self.stack.callback(target.register_forward_pre_hook(hook).remove)

    def after(self, target: Any, see: Callable[[Any], None]) -> None:
        def hook(module: Any, args: Any, output: Any) -> None:
            see(output)

        self.stack.callback(target.register_forward_hook(hook).remove)

    def watch(self, target: Any, name: str, *heads: int) -> None:
        """Record a module's output, its last axis split into `heads`."""
        self.after(target, lambda x: self.put(name, x.unflatten(-1, heads) if heads else x))

    def hook_modules(self) -> None:
        trunk = self.model.model
        self.after(trunk.embed_tokens, lambda x: self.take("embed_tokens", x))
        for i, block in enumerate(trunk.layers):
            is_linear = self.config.layer_types[i] == LINEAR
            self.before(block, partial(self.enter, f"layers.{i}.", i))
            self.watch(block.input_layernorm, "input_layernorm")
            if is_linear:
                self.hook_linear(block.linear_attn)
            else:
                self.hook_full(block.self_attn)
            self.before(block.post_attention_layernorm, lambda x: self.put("residual", x))
            self.watch(block.post_attention_layernorm, "post_attention_layernorm")
            self.watch(block.mlp.gate_proj, "mlp.gate")
            self.watch(block.mlp.up_proj, "mlp.up")
            self.before(block.mlp.down_proj, lambda x: self.put("mlp.act", x))
            self.watch(block.mlp.down_proj, "mlp.out")
            states = self.linear_states if is_linear else self.full_states
            self.after(block, partial(states, self.cache.layers[i]))
            self.watch(block, "output")
        self.before(trunk.norm, partial(self.enter, "", len(trunk.layers)))
        self.watch(trunk.norm, "norm")
        self.watch(self.model.lm_head, "logits")

    def enter(self, prefix: str, layer: int, stream: Any) -> Any:
        self.prefix, self.tokens = prefix, stream.shape[1]
        return None if self.feed is None else self.feed(layer)

    def linear_states(self, held: Any, output: Any) -> None:
        # The cache keeps K columns, of which the next token's convolution sees K-1.
        kept = self.config.linear_conv_kernel_dim - 1
        self.put("linear_attn.conv_tail", held.conv_states[0][..., -kept:].mT)
        self.put("linear_attn.recurrent_state", held.recurrent_states[0].mT)

    def full_states(self, held: Any, output: Any) -> None:
        self.put("self_attn.offset", np.full(len(output), held.get_seq_length(), np.int32))
        self.put("self_attn.keys", held.keys)
        self.put("self_attn.values", held.values)

    def hook_linear(self, mixer: Any) -> None:
        heads = (mixer.num_v_heads, mixer.head_v_dim)
        for name in ("qkv", "b", "a"):
            self.watch(getattr(mixer, f"in_proj_{name}"), f"linear_attn.{name}")
        self.watch(mixer.in_proj_z, "linear_attn.z", *heads)
        # The gated norm runs on [B·S·Hv, Dv].
        self.after(
            mixer.norm,
            lambda x: self.put("linear_attn.norm", x.reshape(-1, self.tokens, *heads)),
        )
        self.watch(mixer.out_proj, "linear_attn.out")

    def hook_full(self, mixer: Any) -> None:
        def queries_and_gate(x: Any) -> None:
            queries, gate = x.unflatten(-1, (-1, 2 * mixer.head_dim)).chunk(2, dim=-1)
            self.put("self_attn.q_proj", queries)
            self.put("self_attn.gate", gate.flatten(-2))

        self.after(mixer.q_proj, queries_and_gate)
        self.watch(mixer.k_proj, "self_attn.k_proj", -1, mixer.head_dim)
        self.watch(mixer.v_proj, "self_attn.v", -1, mixer.head_dim)
        self.watch(mixer.q_norm, "self_attn.q_norm")
        self.watch(mixer.k_norm, "self_attn.k_norm")
        self.before(mixer.o_proj, lambda x: self.put("self_attn.gated", x))
        self.watch(mixer.o_proj, "self_attn.out")

    def wrappers(self, module: ModuleType) -> dict[str, Callable]:
        """Return the functions that the modules call, by name, each wrapped to be seen."""
        # The two rules scale the queries each in its own way, an ulp apart.
        wrap: dict[str, Callable[[Callable], Callable]] = {
            "causal_conv1d_fn": self.conv,
            "causal_conv1d_update": self.conv,
            "l2norm": self.l2norm,
            "torch_chunk_gated_delta_rule": lambda f: self.rule(f, lambda q, d: q * d**-0.5),
            "torch_recurrent_gated_delta_rule": lambda f: self.rule(f, lambda q, d: q / d**0.5),
            "apply_rotary_pos_emb": self.rotary,
            "eager_attention_forward": self.attention,
        }
        return {name: wrap[name](getattr(module, name)) for name in wrap}

    def conv(self, function: Callable) -> Callable:
        def wrapper(*args: Any, **options: Any) -> Any:
            out = function(*args, **options)
            # [B, C, columns of the old state + S]
            self.put("linear_attn.conv_out", out[..., -self.tokens :].mT)
            return out

        return wrapper

    def l2norm(self, function: Callable) -> Callable:
        def wrapper(*args: Any, **options: Any) -> Any:
            out = function(*args, **options)
            self.normalized.append(out)
            return out

        return wrapper

    def rule(self, function: Callable, scaled: Callable[[Any, int], Any]) -> Callable:
        repeats = self.config.linear_num_value_heads // self.config.linear_num_key_heads

        def wrapper(query: Any, key: Any, value: Any, **options: Any) -> Any:
            self.normalized.clear()
            y, state = function(query, key, value, **options)
            # Normalized inside the rule: queries, then keys, both as [B, Hv, S, Dk].
            q, k = (x[:, ::repeats].transpose(1, 2) for x in self.normalized)
            self.put("linear_attn.q", scaled(q, q.shape[-1]))
            self.put("linear_attn.k", k)
            self.put("linear_attn.v", value)
            self.put("linear_attn.beta", options["beta"])
            self.put("linear_attn.g", options["g"].exp())
            self.put("linear_attn.y", y)
            return y, state

        return wrapper

    def rotary(self, function: Callable) -> Callable:
        def wrapper(*args: Any, **options: Any) -> Any:
            queries, keys = function(*args, **options)
            self.put("self_attn.q_rope", queries)
            self.put("self_attn.k_rope", keys)
            return queries, keys

        return wrapper

    def attention(self, function: Callable) -> Callable:
        def wrapper(*args: Any, **options: Any) -> Any:
            out, weights = function(*args, **options)  # out [B, S, Hq, D]
            self.put("self_attn.attention", out.transpose(1, 2))
            return out, weights

        return wrapper


@contextlib.contextmanager
def replaced(owner: Any, values: dict[str, Any]) -> Iterator[None]:
    """Set these attributes of `owner` and restore them, whatever happens in between."""
    old = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in old.items():
            setattr(owner, name, value)
