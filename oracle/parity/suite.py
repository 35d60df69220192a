"""The default suite: small checkpoints made on the spot by transformers and mlx-lm themselves.

No two dimensions of the small recipes are equal, so that a transposed or mis-split tensor has the
wrong shape or the wrong values and never passes by accident.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from parity.program import Program, build
from parity.run import Target

DTYPES = ("float32", "float16", "bfloat16")
GENERATIONS = ("transformers", "mlx-lm")


def _rope(sections: list[int], theta: float = 10_000_000, fraction: float = 0.25) -> dict[str, Any]:
    return {
        "rope_type": "default",
        "rope_theta": theta,
        "partial_rotary_factor": fraction,
        "mrope_section": sections,
        "mrope_interleaved": True,
    }


_SMALL: dict[str, Any] = {
    "hidden_size": 44,
    "intermediate_size": 68,
    "num_hidden_layers": 7,
    "full_attention_interval": 4,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 32,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 131,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": _rope([2, 1, 1]),
}
# Numbers that the other recipes share with the public models are others here.
_K3 = _SMALL | {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 3,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "num_attention_heads": 14,
    "num_key_value_heads": 7,
    "attention_bias": True,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-4,
    "rope_parameters": _rope([3, 3, 2], theta=12_345, fraction=0.5),
}
# The sizes of a public 0.8b model, with the layers and the vocabulary cut.
_HEADS_08B = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 517,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": _rope([11, 11, 10]),
}


@dataclass(frozen=True)
class Plan:
    """One checkpoint of the suite: `programs` is name -> (rows, tokens, decodes, chunk)."""

    text_config: dict[str, Any]
    programs: dict[str, tuple[int, int, int, int | None]]
    qk_scale: float = 1.0


CHECKPOINTS = {
    "tiny": Plan(
        _SMALL,
        {
            "one-shot": (2, 23, 3, None),
            "chunk-1": (2, 9, 2, 1),
            "chunk-2": (2, 11, 2, 2),
            "chunk-3": (2, 13, 2, 3),
            "chunk-67": (1, 71, 2, 67),  # longer than a chunk of transformers' rule (64)
        },
    ),
    "tiny-k3": Plan(
        _K3,
        {
            "one-shot": (2, 15, 3, None),
            "chunk-2": (2, 9, 2, 2),
            # A cache of keys grows by 256 tokens: at the third decode, and within the third chunk.
            "grow-at-decode": (1, 254, 4, 127),
            "grow-in-chunk": (1, 299, 1, 100),
        },
    ),
    # |q| and |k| near 1e-3 before they are normalized: where their eps decides.
    "small-qk": Plan(_SMALL, {"one-shot": (2, 17, 2, None)}, qk_scale=4e-4),
    "heads-0.8b": Plan(_HEADS_08B, {"one-shot": (1, 15, 2, None), "chunk-3": (1, 14, 2, 3)}),
}


def case_names() -> list[str]:
    """Return the names of all cases, `checkpoint/generation/dtype/program`."""
    return [
        f"{name}/{generation}/{dtype}/{program}"
        for name, plan in CHECKPOINTS.items()
        for dtype in DTYPES
        for generation in GENERATIONS
        for program in plan.programs
        if generation == "transformers" or not program.startswith("grow-")  # long, and of no layout
    ]


def selected(patterns: Sequence[str], dtypes: Sequence[str]) -> list[str]:
    """Return the case names that match any pattern (shell style; none means all) and a dtype."""
    return [
        name
        for name in case_names()
        if name.split("/")[2] in dtypes
        and (not patterns or any(fnmatch(name, pattern) for pattern in patterns))
    ]


def targets(folder: Path, names: Sequence[str], seed: int, repeat: str) -> Iterator[Target]:
    """Export and convert the checkpoints the named cases need, one at a time, below `folder`.

    Each is removed when the next is asked for. `repeat` is the command that runs the suite again,
    without its choice of cases. Raises CannotRunError where transformers or mlx-lm are missing.
    """
    from parity.export import Recipe, convert, export
    from qwen35.headers import open_checkpoint

    wanted = {tuple(name.split("/")) for name in names}
    for label, plan in CHECKPOINTS.items():
        recipe = Recipe(label, plan.text_config, seed, plan.qk_scale)
        for dtype in DTYPES:
            generations = {g for at, g, d, _ in wanted if (at, d) == (label, dtype)}
            if not generations:
                continue
            place = folder / f"{label}-{dtype}"
            place.mkdir(parents=True)
            exported = export(recipe, place / "transformers", dtype)
            for generation in (g for g in GENERATIONS if g in generations):
                path = (
                    exported
                    if generation == "transformers"
                    else convert(exported, place / "mlx-lm")
                )
                yield Target(
                    label,
                    open_checkpoint(path),
                    generation,
                    dtype,
                    {
                        name: program(plan, name, seed)
                        for name in plan.programs
                        if (label, generation, dtype, name) in wanted
                    },
                    f"{repeat} --case {label}/{generation}/{dtype}/{{program}}",
                )
            shutil.rmtree(place)


def program(plan: Plan, name: str, seed: int) -> Program:
    """Return the named program with its ids drawn from the seed."""
    rows, tokens, decodes, chunk = plan.programs[name]
    rng = np.random.default_rng([seed, tokens, rows])
    ids = rng.integers(0, plan.text_config["vocab_size"], (rows, tokens + decodes))
    return build(ids.tolist(), decodes, chunk)


def short_programs(vocabulary: int, seed: int, count: int = 1) -> dict[str, Program]:
    """Draw `count` programs of one row, 1 to 3 tokens and 0 to 2 decodes, the shortest that run.

    With so few vectors a typical error is hardly more than one error: the hardest case to judge.
    """
    programs = {}
    for at in range(count):
        rng = np.random.default_rng([seed, vocabulary, at])
        tokens, decodes = int(rng.integers(1, 4)), int(rng.integers(3))
        ids = rng.integers(0, vocabulary, (1, tokens + decodes)).tolist()
        programs[f"short-{at}-{tokens}+{decodes}"] = build(ids, decodes)
    return programs


def default_programs(vocabulary: int, seed: int) -> dict[str, Program]:
    """Return the programs that a user's own checkpoint is run on when none is given."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocabulary, (2, 20)).tolist()
    return {"one-shot": build(ids, decode=3), "chunk-3": build(ids[:1], decode=2, chunk=3)}
