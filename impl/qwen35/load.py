"""Loading: a checkpoint's headers make a plan, the plan is applied to lazy arrays."""

from pathlib import Path

import mlx.core as mx

from qwen35.config import parse_config
from qwen35.errors import CheckpointError
from qwen35.headers import Checkpoint, open_checkpoint
from qwen35.model import Model
from qwen35.plan import KEEPS_DTYPE, Plan, check, make_plan
from qwen35.semantics import Semantics

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def plan_of(checkpoint: Checkpoint, semantics: Semantics) -> Plan:
    """Return the plan for a checkpoint, checked against its config.

    Raises CheckpointError for names missing or unexpected and for wrong shapes.
    """
    config = parse_config(checkpoint.config, checkpoint.path)
    shapes = {name: header.shape for name, header in checkpoint.tensors.items()}
    try:
        plan = make_plan(shapes, config.tie_word_embeddings, semantics.shift_rule)
    except ValueError as error:
        raise CheckpointError(checkpoint.path, str(error), "Remove one of the two") from None
    check(plan, checkpoint, config)
    return plan


def apply(
    plan: Plan, checkpoint: Checkpoint, dtype: str | None = None
) -> list[tuple[str, mx.array]]:
    """Return (canonical name, lazy array) for every tensor the plan keeps.

    With `dtype`, floating tensors but A_log are cast before the plan's arithmetic, so that a γ−1
    gain becomes γ in the precision asked for.
    """
    shards = {file: _load(file) for file in checkpoint.files}
    weights = []
    for entry in plan.entries:
        value = shards[checkpoint.tensors[entry.source].file][entry.source]
        if dtype and not entry.target.endswith(KEEPS_DTYPE):
            value = value.astype(DTYPES[dtype])
        if entry.move_conv:
            value = mx.contiguous(value.moveaxis(2, 1))
        if entry.add_one:
            value = value + 1.0
        weights.append((entry.target, value))
    return weights


def _load(file: Path) -> dict[str, mx.array]:
    try:
        arrays = mx.load(str(file))
        assert isinstance(arrays, dict)
        return arrays
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            file, f"MLX cannot load it ({error})", "Fetch the file again"
        ) from None


def load(
    path: str | Path | Checkpoint,
    dtype: str | None = None,
    semantics: Semantics = Semantics(),  # noqa: B008 - frozen
) -> Model:
    """Load a checkpoint folder into a model, evaluated (MLX loads lazily; files may change).

    `dtype` is one of float32, float16 and bfloat16, or None to compute in the stored dtypes.
    Raises CheckpointError.
    """
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    plan = plan_of(checkpoint, semantics)
    model = Model(parse_config(checkpoint.config, checkpoint.path), semantics)
    model.load_weights(apply(plan, checkpoint, dtype), strict=True)
    model.eval()
    mx.eval(model.parameters())
    return model


def stored_dtype(checkpoint: Checkpoint) -> str:
    """Return the dtype name of the embedding: what the checkpoint is computed in by default."""
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    for name, header in checkpoint.tensors.items():
        if name.endswith("embed_tokens.weight") and header.dtype in names:
            return names[header.dtype]
    raise CheckpointError(
        checkpoint.path, "no float embed_tokens.weight", "Give a checkpoint that is not quantized"
    )
