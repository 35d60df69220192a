"""`parity make-checkpoint`: a seeded synthetic checkpoint of any size, in either generation."""

import argparse
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from parity.commands import EXIT_CODES
from qwen35.errors import InputError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_DTYPES = ("float32", "float16", "bfloat16")


def add(commands: Any) -> None:
    """Add the command's parser."""
    make = commands.add_parser(
        "make-checkpoint",
        help="write a synthetic checkpoint: seeded, of any size, in either generation",
        description="Values have the spread they have in real models. Memory stays at a few MB.",
    )
    make.add_argument("out", metavar="OUT", help="folder to make; it must not exist")
    source = make.add_mutually_exclusive_group(required=True)
    source.add_argument("--size", help="a public size, such as qwen3.5-0.8b")
    source.add_argument("--config", metavar="FILE", help="the config.json of another size")
    make.add_argument("--layers", type=int, metavar="N", help="make this many layers")
    make.add_argument("--vocab", type=int, metavar="N", help="make a vocabulary of this size")
    make.add_argument(
        "--generation",
        choices=("transformers", "mlx-lm"),
        help="names and conventions (default: transformers; quantized: mlx-lm)",
    )
    make.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="default: bfloat16")
    shards = make.add_mutually_exclusive_group()
    shards.add_argument(
        "--shards", type=int, metavar="N", help="write this many files (default: 1)"
    )
    shards.add_argument("--shard-size", metavar="SIZE", help="largest file, such as 5GB or 300MiB")
    make.add_argument("--mtp", action="store_true", help="add the draft head, mtp.*")
    make.add_argument(
        "--vision", action="store_true", help="add the tensors of a tiny vision tower"
    )
    make.add_argument(
        "--quantize", type=int, metavar="BITS", help="quantize, by mlx_lm.convert of the export"
    )
    make.add_argument("--group-size", type=int, metavar="N", help="of --quantize (default: 64)")
    make.add_argument(
        "--headers-only", action="store_true", help="sparse files: true headers, zeros for values"
    )
    make.add_argument("--seed", type=int, default=0, help="draws the values (default: 0)")
    make.set_defaults(function=_make, failed=lambda options, command, message: None)


def _make(options: argparse.Namespace, command: str) -> int:
    from parity import synthetic
    from qwen35.config import parse_config

    _check(options)
    out = Path(options.out)
    source, given = _config(options)
    try:
        config = synthetic.scaled(given, options.layers, options.vocab)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"{source}: {error}. Give the config.json of a Qwen3.5 model.") from None
    text = parse_config(config, source.parent)
    generation: synthetic.Generation = options.generation or "transformers"
    made = synthetic.tensors(text, generation, options.dtype, options.mtp, options.vision)
    if options.shard_size is not None:
        shards = synthetic.in_shards_of(made, _bytes(options.shard_size))
    else:
        shards = synthetic.in_shards(made, options.shards or 1)
    inner = config["text_config"] | {
        "dtype": options.dtype,
        "mtp_num_hidden_layers": int(options.mtp),
        "full_attention_interval": config["text_config"].get("full_attention_interval", 4),
        "layer_types": list(text.layer_types),
        "tie_word_embeddings": text.tie_word_embeddings,
    }
    config |= {"dtype": options.dtype, "text_config": inner}
    config["tie_word_embeddings"] = text.tie_word_embeddings
    config.pop("vision_config", None)
    if options.vision:
        config["vision_config"] = synthetic.VISION | {"out_hidden_size": text.hidden_size}
    if options.quantize is None:
        synthetic.write(out, config, shards, generation, options.seed, options.headers_only)
    else:
        _quantized(out, config, shards, options)
    _say(out, options.headers_only)
    return EXIT_CODES["holds"]


def _quantized(out: Path, config: dict[str, Any], shards: Any, options: argparse.Namespace) -> None:
    from parity import synthetic
    from parity.export import convert

    if out.exists() or out.is_symlink():
        raise InputError(f"{out}: already exists. Choose another folder, or remove this one.")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as place:
        export = Path(place) / "export"
        synthetic.write(export, config, shards, "transformers", options.seed)
        convert(export, out, options.quantize, options.group_size or 64)


def _check(options: argparse.Namespace) -> None:
    for name in ("layers", "vocab", "shards", "quantize", "group_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} {value}: give 1 or more.")
    if options.seed < 0:
        raise InputError(f"--seed {options.seed}: is negative. Give 0 or more.")
    if options.quantize is None:
        if options.group_size is not None:
            raise InputError("--group-size is that of --quantize. Add --quantize BITS, or drop it.")
        return
    for name, why in (
        ("mtp", "mlx_lm.convert leaves the draft head out"),
        ("vision", "mlx_lm.convert leaves the vision tower out"),
        ("headers_only", "mlx_lm.convert needs values"),
    ):
        if getattr(options, name):
            raise InputError(f"--quantize with --{name.replace('_', '-')}: {why}. Drop one.")
    if options.generation == "transformers":
        raise InputError("--quantize writes mlx-lm's generation. Drop --generation transformers.")


def _config(options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    from parity.synthetic import SIZES, public_sizes

    if options.size is not None and options.size not in public_sizes():
        raise InputError(f"--size {options.size}: known are {', '.join(public_sizes())}.")
    file = Path(options.config) if options.config else SIZES / f"{options.size}.json"
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file}: cannot be read ({error}). Give a config.json.") from None
    if not isinstance(value, dict):
        raise InputError(f"{file}: is no JSON object. Give a config.json.")
    return file, value


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMG]I?B)?", text.strip().upper())
    if match is None or int(match[1]) < 1:
        raise InputError(f"--shard-size {text}: is no size. Give one such as 5GB or 300MiB.")
    return int(match[1]) * _UNITS[match[2] or ""]


def _say(out: Path, headers_only: bool) -> None:
    from qwen35.headers import open_checkpoint

    checkpoint = open_checkpoint(out)
    size = sum(header.end - header.start for header in checkpoint.tensors.values())
    files = len(checkpoint.files)
    print(
        f"{out}: {len(checkpoint.tensors):,} tensors, {size:,} bytes in {files} "
        f"file{'s' * (files != 1)}{' (headers only)' * headers_only}"
    )
