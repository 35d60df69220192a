"""Synthetic checkpoints of both generations, written by transformers and mlx-lm themselves.

The layout, the names and the config of a checkpoint are the ones the frameworks write; only the
values are ours. Each parameter is drawn from a generator seeded by its name, so a value depends
on neither the order in which modules are made nor the dtype asked for.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity import distributions
from parity.new_folder import new_folder
from parity.runners.imports import importing
from parity.runners.transformers import quiet
from parity.synthetic import VISION
from parity.taps import FULL, LINEAR
from qwen35.errors import InputError


@dataclass(frozen=True)
class Recipe:
    """What a synthetic checkpoint is made from.

    `text_config` is transformers' own text config (`full_attention_interval` or `layer_types`).
    A `qk_scale` far below 1 brings the linear layers' |q| and |k| near their norm's eps.
    """

    name: str
    text_config: dict[str, Any]
    seed: int = 0
    qk_scale: float = 1.0


def export(recipe: Recipe, folder: Path, dtype: str) -> Path:
    """Write the recipe as transformers exports it, in `dtype` (A_log stays float32).

    Raises InputError where `folder` exists or the recipe is inconsistent, CannotRunError without
    transformers. Nothing is left behind on failure.
    """
    with importing("transformers", "torch"):
        import torch
        from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration
    if dtype not in ("float32", "float16", "bfloat16"):
        raise InputError(f"{dtype}: no dtype of checkpoints. Use float32, float16 or bfloat16.")
    interval, layer_types = _pattern(recipe)
    text = recipe.text_config | {"layer_types": layer_types, "dtype": dtype}
    text.pop("full_attention_interval", None)
    tied = bool(text.setdefault("tie_word_embeddings", False))
    with new_folder(folder) as new, quiet():
        config = Qwen3_5Config(
            text_config=text,
            vision_config=VISION | {"out_hidden_size": text["hidden_size"], "dtype": dtype},
            tie_word_embeddings=tied,
            dtype=dtype,
        )
        with torch.device("meta"):
            model = Qwen3_5ForConditionalGeneration(config)
        weights = {
            name: _draw(recipe, name, tuple(parameter.shape)).to(
                torch.float32 if name.endswith(".A_log") else getattr(torch, dtype)
            )
            for name, parameter in model.named_parameters()
        }
        missing, _ = model.load_state_dict(weights, assign=True, strict=False)
        if missing and not (tied and missing == ["lm_head.weight"]):
            raise RuntimeError(f"{recipe.name}: parameters were not drawn: {missing}")
        model.tie_weights()
        model.save_pretrained(new)
        _save_tokenizer(text["vocab_size"], new)
        _patch_config(new / "config.json", layer_types, interval)
    return folder


def convert(
    source: Path, folder: Path, bits: int | None = None, group_size: int | None = None
) -> Path:
    """Convert an export with mlx_lm.convert, quantized where `bits` is given.

    Raises as `export` does, and InputError for what MLX cannot quantize.
    """
    with importing("mlx-lm", "transformers"):
        from mlx_lm import convert as mlx_lm_convert
    if not (source / "config.json").is_file():
        raise InputError(f"{source}: no config.json. Give the folder of an exported checkpoint.")
    with new_folder(folder) as new, quiet():
        try:
            mlx_lm_convert(
                str(source),
                mlx_path=str(new),
                quantize=bits is not None,
                q_bits=bits,
                q_group_size=group_size,
            )
        except ValueError as error:
            raise InputError(
                f"{source}: mlx_lm.convert refuses it ({error}). Choose other bits or group size."
            ) from None
    return folder


def _pattern(recipe: Recipe) -> tuple[int, list[str]]:
    """Return (interval, layer types): mlx-lm reads the one, transformers the other."""
    count = recipe.text_config["num_hidden_layers"]
    given = recipe.text_config.get("layer_types")
    default = 4
    if given is not None:
        default = given.index(FULL) + 1 if FULL in given else count + 1
    interval = recipe.text_config.get("full_attention_interval", default)
    layer_types = [LINEAR if (i + 1) % interval else FULL for i in range(count)]
    if given is not None and list(given) != layer_types:
        raise InputError(
            f"{recipe.name}: layer_types {list(given)} is not every {interval}th layer full, which "
            "is all that mlx-lm can express. Drop layer_types and give full_attention_interval."
        )
    return interval, layer_types


def _draw(recipe: Recipe, name: str, shape: tuple[int, ...]) -> Any:
    """Return the float32 values of one parameter, with the spread its kind has in real models."""
    import torch

    seed = hashlib.sha256(f"{recipe.seed}:{name}".encode()).digest()[:8]
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)

    def normal(std: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(shape, generator=generator) * (high - low) + low

    if name.endswith(".A_log"):
        return uniform(*distributions.A_LOG_RANGE).log()
    if name.endswith(".dt_bias"):
        step = uniform(*distributions.STEP_RANGE).exp()  # inverse softplus
        return step.expm1().log() + normal(distributions.STEP_NOISE)
    spread = distributions.normal(name, shape)
    assert spread is not None
    value = normal(spread.std) + spread.mean
    if name.endswith(".in_proj_qkv.weight"):
        text = recipe.text_config
        value[: 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"]] *= recipe.qk_scale
    return value


def _save_tokenizer(vocab_size: int, folder: Path) -> None:
    """Save a tokenizer of one word an id: mlx-lm converts nothing without a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{i}": i for i in range(vocab_size)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


def _patch_config(path: Path, layer_types: list[str], interval: int) -> None:
    """Write both forms of the layer pattern: transformers drops the interval, mlx-lm needs it."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["text_config"] |= {"layer_types": layer_types, "full_attention_interval": interval}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(new, path)
