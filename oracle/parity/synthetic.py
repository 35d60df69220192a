"""Synthetic checkpoints of any size in either generation, written a few megabytes at a time.

Imports no framework. A value depends on the seed and the tensor's canonical name alone, so that
both generations of one seed hold the same model, whatever the shards and the dtype.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from parity import distributions, safetensors_file
from parity.new_folder import new_folder
from qwen35.config import FULL, LINEAR, TextConfig, expected_shapes, parse_config
from qwen35.errors import CannotRunError, InputError
from qwen35.headers import INDEX

Generation = Literal["transformers", "mlx-lm"]
SIZES = Path(__file__).with_name("configs")
"""config.json of the public sizes, without the vision tower."""
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_heads": 1,
    "patch_size": 2,
    "spatial_merge_size": 1,
    "temporal_patch_size": 1,
    "num_position_embeddings": 4,
}
"""The smallest tower that transformers builds: it gives a checkpoint its `model.visual.*` names."""
_CHUNK = 1 << 20  # elements drawn at once
_TRUNK, _ROOT = "language_model.model.", "language_model."


@dataclass(frozen=True)
class Tensor:
    """One tensor: its name and shape as stored, and the canonical name that its values go by."""

    name: str
    canonical: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Its bytes."""
        return safetensors_file.size(self.dtype, self.shape)


def public_sizes() -> list[str]:
    """Return the names of the public sizes."""
    return sorted(file.stem for file in SIZES.glob("*.json"))


def scaled(config: dict[str, Any], layers: int | None, vocabulary: int | None) -> dict[str, Any]:
    """Return a config.json value, its text part nested, with another number of layers and ids."""
    if "text_config" not in config:  # mlx-lm refuses the flat form by its model_type
        text = config | {"model_type": "qwen3_5_text"}
        config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
        config |= {"tie_word_embeddings": text.get("tie_word_embeddings", False)}
    config = {key: value for key, value in config.items() if not key.startswith("quantization")}
    text = {k: v for k, v in config["text_config"].items() if not k.startswith("quantization")}
    if layers is not None:
        interval = text.get("full_attention_interval", 4)
        kinds = [LINEAR if (i + 1) % interval else FULL for i in range(layers)]
        text |= {"num_hidden_layers": layers, "layer_types": kinds}
    if vocabulary is not None:
        text["vocab_size"] = vocabulary
    return config | {"model_type": "qwen3_5", "text_config": text}


def tensors(
    config: TextConfig, generation: Generation, dtype: str, mtp: bool, vision: bool
) -> list[Tensor]:
    """Return every tensor of a checkpoint, in the order they are written."""
    shapes = expected_shapes(config)
    if mtp:
        shapes |= _draft_head(config)
    if vision:
        shapes |= {f"model.visual.{n}": s for n, s in _vision_tower(config.hidden_size).items()}
    made = []
    for canonical, shape in shapes.items():
        name = canonical
        if generation == "transformers":
            if name.startswith(_TRUNK):
                name = "model.language_model." + name.removeprefix(_TRUNK)
            name = name.removeprefix(_ROOT)
            if name.endswith(".conv1d.weight"):
                shape = (shape[0], shape[2], shape[1])  # one channel a group: the bytes stay
        elif vision:
            name = name.replace("model.visual.", "vision_tower.")
        stored = "F32" if name.endswith(".A_log") else DTYPES[dtype]
        made.append(Tensor(name, canonical, stored, shape))
    return made


def _draft_head(config: TextConfig) -> dict[str, tuple[int, ...]]:
    """Return the draft head: a full-attention layer, and norms and a projection before it."""
    hidden = (config.hidden_size,)
    one = expected_shapes(_with_layers(config, (FULL,)))
    layer = _TRUNK + "layers.0."
    shapes = {
        "mtp.layers.0." + name.removeprefix(layer): shape
        for name, shape in one.items()
        if name.startswith(layer)
    }
    fc = {"mtp.fc.weight": (config.hidden_size, 2 * config.hidden_size)}
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return fc | shapes | {f"mtp.{name}.weight": hidden for name in norms}


def _with_layers(config: TextConfig, layer_types: tuple[str, ...]) -> TextConfig:
    return TextConfig(**config.__dict__ | {"layer_types": layer_types})


def _vision_tower(out: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = VISION["hidden_size"], VISION["intermediate_size"]
    linear = {
        "blocks.0.attn.qkv": (3 * hidden, hidden),
        "blocks.0.attn.proj": (hidden, hidden),
        "blocks.0.mlp.linear_fc1": (inner, hidden),
        "blocks.0.mlp.linear_fc2": (hidden, inner),
        "merger.linear_fc1": (hidden, hidden),
        "merger.linear_fc2": (out, hidden),
        "patch_embed.proj": (hidden, 3, 1, VISION["patch_size"], VISION["patch_size"]),
    }
    norms = dict.fromkeys(("blocks.0.norm1", "blocks.0.norm2", "merger.norm"), (hidden,))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in (linear | norms).items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes | {"pos_embed.weight": (VISION["num_position_embeddings"], hidden)}


def values(tensor: Tensor, generation: Generation, seed: int) -> Iterator[np.ndarray]:
    """Yield a tensor's values, flat, in chunks of its dtype."""
    digest = hashlib.sha256(f"{seed}:{tensor.canonical}".encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest, "little"))
    dtype = safetensors_file.DTYPES[tensor.dtype]
    shape = tensor.shape
    count = int(np.prod(shape, dtype=np.int64))
    # The gain γ is 1 + w, rounded as mlx-lm's own conversion of the export would round it.
    shifted = generation == "mlx-lm" and _is_zero_centred(tensor.canonical)
    for start in range(0, count, _CHUNK):
        drawn = _draw(tensor.canonical, shape, min(_CHUNK, count - start), rng).astype(dtype)
        yield drawn + np.ones((), dtype) if shifted else drawn


def _is_zero_centred(canonical: str) -> bool:
    return "visual." not in canonical and canonical.endswith(distributions.ZERO_CENTRED)


def _draw(name: str, shape: tuple[int, ...], count: int, rng: np.random.Generator) -> np.ndarray:
    def uniform(low: float, high: float) -> np.ndarray:
        return rng.random(count, np.float32) * np.float32(high - low) + np.float32(low)

    if name.endswith(".A_log"):
        return np.log(uniform(*distributions.A_LOG_RANGE))
    noise = rng.standard_normal(count, np.float32)
    if name.endswith(".dt_bias"):
        step = np.exp(uniform(*distributions.STEP_RANGE))  # inverse softplus
        return np.log(np.expm1(step)) + noise * np.float32(distributions.STEP_NOISE)
    spread = distributions.normal(name, shape)
    assert spread is not None
    noise *= np.float32(spread.std)
    noise += np.float32(spread.mean)
    return noise


def in_shards(made: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """Split tensors into `count` shards of about equal size, in order."""
    if not 1 <= count <= len(made):
        raise InputError(f"--shards {count}: the checkpoint has {len(made)} tensors. Give fewer.")
    total, done = sum(tensor.size for tensor in made), 0
    shards: list[list[Tensor]] = [[]]
    for at, tensor in enumerate(made):
        due = done * count >= total * len(shards) or len(made) - at == count - len(shards)
        if shards[-1] and len(shards) < count and due:
            shards.append([])
        shards[-1].append(tensor)
        done += tensor.size
    return shards


def in_shards_of(made: Sequence[Tensor], size: int) -> list[list[Tensor]]:
    """Split tensors into shards of at most `size` bytes, or of one tensor that is larger."""
    shards: list[list[Tensor]] = [[]]
    for tensor in made:
        if shards[-1] and sum(t.size for t in shards[-1]) + tensor.size > size:
            shards.append([])
        shards[-1].append(tensor)
    return shards


def write(
    folder: Path,
    config: dict[str, Any],
    shards: Sequence[Sequence[Tensor]],
    generation: Generation,
    seed: int,
    headers_only: bool = False,
) -> None:
    """Write a checkpoint, complete or not at all; peak memory is one chunk of one tensor.

    With `headers_only` the files have their full size and no bytes but the headers': they are
    sparse where the file system can. Raises InputError where `folder` exists and CannotRunError
    where the disk has no room.
    """
    vocabulary = parse_config(config, folder).vocab_size
    try:
        _write(folder, config, vocabulary, shards, generation, seed, headers_only)
    except OSError as error:
        raise CannotRunError(
            f"{folder}: cannot be written ({error.strerror or error}). Nothing was left there."
        ) from None


def _write(
    folder: Path,
    config: dict[str, Any],
    vocabulary: int,
    shards: Sequence[Sequence[Tensor]],
    generation: Generation,
    seed: int,
    headers_only: bool,
) -> None:
    with new_folder(folder) as new:
        new.mkdir()
        due = sum(tensor.size for shard in shards for tensor in shard)
        if not headers_only and due > (free := shutil.disk_usage(new).free):
            raise CannotRunError(
                f"{folder}: {due:,} bytes are to be written, the disk has {free:,} free. Give "
                "fewer --layers, another folder, or --headers-only."
            )
        names = ["model.safetensors"]
        if len(shards) > 1:
            names = [
                f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))
            ]
            placed = {
                t.name: name for name, shard in zip(names, shards, strict=True) for t in shard
            }
            index = {"metadata": {"total_size": due}, "weight_map": dict(sorted(placed.items()))}
            _write_json(new / INDEX, index)
        for name, shard in zip(names, shards, strict=True):
            _write_shard(new / name, shard, generation, seed, headers_only)
        _write_json(new / "config.json", config)
        _write_tokenizer(new, vocabulary)


def _write_shard(
    file: Path, shard: Sequence[Tensor], generation: Generation, seed: int, headers_only: bool
) -> None:
    notes = {"format": "pt" if generation == "transformers" else "mlx"}
    with open(file, "wb") as stream:
        stream.write(safetensors_file.header(((t.name, t.dtype, t.shape) for t in shard), notes))
        if headers_only:
            stream.truncate(stream.tell() + sum(tensor.size for tensor in shard))
            return
        for tensor in shard:
            for chunk in values(tensor, generation, seed):
                stream.write(chunk.view(np.uint8).data)


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer, without which mlx-lm loads and converts nothing: one word an id."""
    special = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    value = {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "w0", **special, "special": True}],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {}, "unk_token": "w0"},
    }
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    # Written word by word: as one object the vocabulary would be most of the memory in use.
    before, after = json.dumps(value | nothing).split('"vocab": {}')
    with open(folder / "tokenizer.json", "w", encoding="utf-8") as stream:
        stream.write(before + '"vocab": {"w0": 0')
        stream.writelines(f', "w{i}": {i}' for i in range(1, vocabulary))
        stream.write("}" + after + "\n")
    _write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"},
    )


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
