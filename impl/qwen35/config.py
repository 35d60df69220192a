"""The text model's configuration, read from config.json; unknown keys are kept and reported."""

import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen35.errors import CheckpointError
from qwen35.rope_config import ENTRIES, read_rope
from qwen35.rope_config import UNDERSTOOD as ROPE_UNDERSTOOD

LINEAR, FULL = "linear_attention", "full_attention"
MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
_MOE = ("qwen3_5_moe", "qwen3_5_moe_text")
_COPY = "Copy the original config.json"
_MOST_LAYERS = 4096  # layer_types is made from this number before anything else bounds it
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
# Read for their meaning below, or without one for computing text logits.
_UNDERSTOOD = {
    *_SIZES,
    *("model_type", "text_config", "vision_config", "architectures", "transformers_version"),
    *("rms_norm_eps", "tie_word_embeddings", "attention_bias", "attention_dropout"),
    *("max_position_embeddings", "layer_types", "full_attention_interval", "hidden_act"),
    *("attn_output_gate", "rope_parameters", "rope_theta", "partial_rotary_factor", "rope_scaling"),
    *("quantization", "quantization_config", "dtype", "torch_dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "mamba_ssm_dtype"),
    *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "num_experts"),
}


@dataclass(frozen=True)
class TextConfig:
    """Sizes and choices of a dense Qwen3.5 text model.

    `rotary_dim` entries of each head are rotated. `max_position_embeddings` is 0 where config.json
    does not say. `unknown` are keys of config.json that nothing here reads, nested ones with their
    section.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    max_position_embeddings: int
    layer_types: tuple[str, ...]
    rope_theta: float
    rotary_dim: int
    quantization: dict[str, Any] | None
    unknown: tuple[str, ...]

    @property
    def key_dim(self) -> int:
        """Hk·Dk."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Hv·Dv."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """C = 2·Hk·Dk + Hv·Dv."""
        return 2 * self.key_dim + self.value_dim


def parse_config(config: dict[str, Any], source: str | Path) -> TextConfig:
    """Read a nested (`text_config`) or flat config.

    Raises CheckpointError naming the file, every missing key at once, or the one that is wrong.
    """
    reader = _Reader(config, Path(source) / "config.json")
    return reader.read()


class _Reader:
    def __init__(self, outer: dict[str, Any], file: Path) -> None:
        self.file, self.outer = file, outer
        inner = outer.get("text_config", outer)
        if not isinstance(inner, dict):
            raise self.fail("text_config is no JSON object", _COPY)
        self.inner: dict[str, Any] = inner
        self.section = "" if inner is outer else "text_config."

    def fail(self, problem: str, remedy: str) -> CheckpointError:
        return CheckpointError(self.file, problem, remedy)

    def read(self) -> TextConfig:
        model_type = self.model_type()
        rope = self.rope()
        missing = [k for k in (*_SIZES, "rms_norm_eps") if k not in self.inner]
        if "rope_theta" not in rope:  # mlx-lm would take 100000, transformers 10000
            missing.append("rope_parameters.rope_theta")
        if missing:
            raise self.fail(f"lacks {', '.join(self.section + k for k in missing)}", _COPY)
        sizes = {name: self.size(name, self.inner[name]) for name in _SIZES}
        if sizes["num_hidden_layers"] > _MOST_LAYERS:
            raise self.fail(
                f"{self.section}num_hidden_layers is {sizes['num_hidden_layers']}",
                f"At most {_MOST_LAYERS} are due",
            )
        if sizes["linear_conv_kernel_dim"] < 2:
            raise self.fail(
                f"{self.section}linear_conv_kernel_dim is 1", "2 or more are due: a tail is kept"
            )
        self.divides(sizes, "linear_num_value_heads", "linear_num_key_heads")
        self.divides(sizes, "num_attention_heads", "num_key_value_heads")
        for name, due in (("hidden_act", "silu"), ("attn_output_gate", True)):
            if (value := self.inner.get(name, due)) != due:
                raise self.wrong(name, value, f"Only {due!r} is implemented")
        rotary_dim = int(sizes["head_dim"] * rope["partial_rotary_factor"])
        if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > sizes["head_dim"]:
            raise self.fail(
                f"rotates {rotary_dim} of {sizes['head_dim']} entries a head",
                "partial_rotary_factor·head_dim must be an even number of at least 2",
            )
        return TextConfig(
            model_type=model_type,
            **sizes,
            rms_norm_eps=self.positive("rms_norm_eps", self.inner["rms_norm_eps"]),
            tie_word_embeddings=self.tied(),
            attention_bias=self.flag("attention_bias", self.inner.get("attention_bias", False)),
            max_position_embeddings=self.max_position_embeddings(),
            layer_types=self.layer_types(sizes["num_hidden_layers"]),
            rope_theta=self.positive("rope_theta", rope["rope_theta"]),
            rotary_dim=rotary_dim,
            quantization=self.quantization(),
            unknown=unknown_keys(self.outer),
        )

    def model_type(self) -> str:
        outer = self.outer.get("model_type")
        # mlx-lm goes by the outer name and num_experts, transformers by both names.
        for place, value in (("", outer), (self.section, self.inner.get("model_type", outer))):
            if value in _MOE:
                raise self.fail(
                    f"{place}model_type {value!r} is a mixture of experts, which is not "
                    "implemented yet",
                    "Give a dense model",
                )
            if value not in MODEL_TYPES:
                raise self.fail(
                    f"{place}model_type is {reprlib.repr(value)}",
                    f"Known are {' and '.join(MODEL_TYPES)}",
                )
        if self.inner.get("num_experts"):
            raise self.fail(
                f"{self.section}num_experts is {reprlib.repr(self.inner['num_experts'])}: a "
                "mixture of experts, which is not implemented yet",
                "Give a dense model",
            )
        return str(outer)

    def size(self, name: str, value: Any) -> int:
        if type(value) is not int or not 0 < value < 2**31:
            raise self.wrong(name, value, "A whole number above 0 is due")
        return value

    def positive(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
            raise self.wrong(name, value, "A number above 0 is due")
        return float(value)

    def flag(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false is due")
        return value

    def wrong(self, name: str, value: Any, due: str) -> CheckpointError:
        return self.fail(f"{self.section}{name} is {reprlib.repr(value)}", due)

    def max_position_embeddings(self) -> int:
        # No default: it changes nothing that is computed, and mlx-lm's and transformers' differ.
        value = self.inner.get("max_position_embeddings")
        return 0 if value is None else self.size("max_position_embeddings", value)

    def quantization(self) -> dict[str, Any] | None:
        for part in (self.outer, self.inner):
            for name in ("quantization", "quantization_config"):
                value = part.get(name)
                if value is not None and not isinstance(value, dict):
                    raise self.fail(f"{name} is {reprlib.repr(value)}", "A JSON object is due")
                if value:
                    return value
        return None

    def divides(self, sizes: dict[str, int], many: str, few: str) -> None:
        if sizes[many] % sizes[few]:
            raise self.fail(
                f"{self.section}{many} {sizes[many]} is no multiple of {few} {sizes[few]}", _COPY
            )

    def tied(self) -> bool:
        # mlx-lm reads the text section alone, transformers' full model the outer one.
        values = {
            self.flag("tie_word_embeddings", part["tie_word_embeddings"])
            for part in (self.inner, self.outer)
            if "tie_word_embeddings" in part
        }
        if len(values) > 1:
            raise self.fail(
                "tie_word_embeddings differs between text_config and the top level",
                "mlx-lm and transformers would load different heads: make them equal",
            )
        return values.pop() if values else False

    def rope(self) -> dict[str, Any]:
        values = read_rope(self.inner, self.outer, self.section, self.fail)
        self.positive("partial_rotary_factor", values["partial_rotary_factor"])
        return values

    def layer_types(self, layers: int) -> tuple[str, ...]:
        interval = self.inner.get("full_attention_interval", 4)
        self.size("full_attention_interval", interval)
        from_interval = tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers))
        given = self.inner.get("layer_types")
        if given is None:
            return from_interval
        if (
            not isinstance(given, list)
            or len(given) != layers
            or any(kind not in (LINEAR, FULL) for kind in given)
        ):
            raise self.fail(
                f"{self.section}layer_types is no list of {layers} times {LINEAR} or {FULL}", _COPY
            )
        if tuple(given) != from_interval:
            raise self.fail(
                f"{self.section}layer_types says otherwise than full_attention_interval "
                f"{interval}: transformers reads the first, mlx-lm only the second (4 if absent)",
                "Write a full_attention_interval that agrees",
            )
        return from_interval


def unknown_keys(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the keys of a nested or flat config that nothing here reads, with their section."""
    inner = config.get("text_config", config)
    sections = {"": config} if inner is config else {"": config, "text_config.": inner}
    found = []
    for place, section in sections.items():
        found += [place + key for key in section if key not in _UNDERSTOOD]
        for name in ENTRIES:
            if isinstance(entry := section.get(name), dict):
                found += [f"{place}{name}.{key}" for key in entry if key not in ROPE_UNDERSTOOD]
    return tuple(sorted(found))


def expected_shapes(config: TextConfig) -> dict[str, tuple[int, ...]]:
    """Return canonical name -> shape of every parameter (linear weights are [out, in])."""
    hidden, inner = config.hidden_size, config.intermediate_size
    keys = config.num_key_value_heads * config.head_dim
    queries = config.num_attention_heads * config.head_dim
    block: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    linear: dict[str, tuple[int, ...]] = {
        "in_proj_qkv.weight": (config.conv_dim, hidden),
        "in_proj_z.weight": (config.value_dim, hidden),
        "in_proj_b.weight": (config.linear_num_value_heads, hidden),
        "in_proj_a.weight": (config.linear_num_value_heads, hidden),
        "conv1d.weight": (config.conv_dim, config.linear_conv_kernel_dim, 1),
        "A_log": (config.linear_num_value_heads,),
        "dt_bias": (config.linear_num_value_heads,),
        "norm.weight": (config.linear_value_head_dim,),
        "out_proj.weight": (hidden, config.value_dim),
    }
    full: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (2 * queries, hidden),
        "k_proj.weight": (keys, hidden),
        "v_proj.weight": (keys, hidden),
        "o_proj.weight": (hidden, queries),
        "q_norm.weight": (config.head_dim,),
        "k_norm.weight": (config.head_dim,),
    }
    if config.attention_bias:
        full |= {
            "q_proj.bias": (2 * queries,),
            "k_proj.bias": (keys,),
            "v_proj.bias": (keys,),
            "o_proj.bias": (hidden,),
        }
    trunk = "language_model.model."
    shapes: dict[str, tuple[int, ...]] = {
        trunk + "embed_tokens.weight": (config.vocab_size, hidden),
        trunk + "norm.weight": (hidden,),
    }
    for i, kind in enumerate(config.layer_types):
        mixer, names = ("linear_attn.", linear) if kind == LINEAR else ("self_attn.", full)
        prefix = f"{trunk}layers.{i}."
        shapes |= {prefix + name: shape for name, shape in block.items()}
        shapes |= {prefix + mixer + name: shape for name, shape in names.items()}
    if not config.tie_word_embeddings:
        shapes["language_model.lm_head.weight"] = (config.vocab_size, hidden)
    return shapes
