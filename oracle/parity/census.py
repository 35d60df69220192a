"""What a checkpoint holds, from its headers: parts and their sizes, names due, quantization."""

import math
from collections.abc import Mapping
from typing import Any

from parity import experts
from parity.rules import Facts
from parity.shown import shown
from qwen35.config import expected_shapes, parse_config
from qwen35.errors import CheckpointError
from qwen35.headers import Checkpoint, TensorHeader
from qwen35.plan import Plan, Shapes

_CONV = "conv1d.weight"
_TRUNK, _ROOT = "language_model.model.", "language_model."
_PARTS = (
    ("draft head", ("mtp.",)),
    ("vision", ("visual.", "vision_tower.")),
    ("embedding", ("embed_tokens.",)),
    ("head", ("lm_head.",)),
    ("linear attention", (".linear_attn.",)),
    ("full attention", (".self_attn.",)),
    ("mlp", (".mlp.",)),
    ("norms", ("norm.weight", "layernorm.")),
)


def part_of(name: str) -> str:
    """Return the part of the model that a tensor belongs to."""
    return next((part for part, marks in _PARTS if any(m in name for m in marks)), "other")


def conv_layout(shapes: Shapes) -> dict[str, Any]:
    """Count the conv weights by the axis that their kernel is on; K = 1 shows neither."""
    convs = {n: s for n, s in shapes.items() if _CONV in n and "mtp." not in n}
    counts = {"mlx-lm": 0, "transformers": 0, "either": 0}
    odd = []
    for name, shape in convs.items():
        if len(shape) != 3 or 1 not in shape[1:]:
            odd.append(name)
        elif shape[1:] == (1, 1):
            counts["either"] += 1
        else:
            counts["mlx-lm" if shape[2] == 1 else "transformers"] += 1
    seen = [layout for layout, count in counts.items() if count]
    layout = "mixed" if odd or len(seen) > 1 else seen[0] if seen else "none"
    return {
        "layout": layout,
        "mlx-lm [C, K, 1]": counts["mlx-lm"],
        "transformers [C, 1, K]": counts["transformers"],
        "either [C, 1, 1]": counts["either"],
        "odd": odd,
    }


def quantization(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what the config says of quantization, and what the names say."""
    said = _quantization_entry(checkpoint)
    modules = {k: v for k, v in said.items() if isinstance(v, dict | bool)}
    whole = {k: v for k, v in said.items() if k not in modules}
    names = [n.removesuffix(".scales") for n in checkpoint.tensors if n.endswith(".scales")]
    modes = [v.get("mode") for v in (whole, *modules.values()) if isinstance(v, dict)]
    problem = None
    if names and not said:
        problem = f"{len(names)} modules have scales, config.json has no quantization"
    elif said and not names and "trellis" not in modes:
        problem = "config.json has a quantization, no module has scales"
    return {
        "global": whole or None,
        "modules": modules,
        "quantized_modules": len(names),
        "trellis": "trellis" in modes,
        "problem": problem,
    }


def _quantization_entry(checkpoint: Checkpoint) -> dict[str, Any]:
    outer = checkpoint.config
    for part in (outer, outer.get("text_config")):
        for key in ("quantization", "quantization_config"):
            if isinstance(part, dict) and isinstance(part.get(key), dict) and part[key]:
                return part[key]
    return {}


def part(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """Return the tensors of one part by name, with their sizes."""
    tensors = [t for t in checkpoint.tensors.values() if part_of(t.name) == name]
    return {
        "tensors": len(tensors),
        "bytes": sum(t.end - t.start for t in tensors),
        "names": [t.name for t in tensors],
    }


def sizes(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return parameters and bytes by part. Packed weights count as what they decode to."""
    said = _quantization_entry(checkpoint)
    parameters: dict[str, int] = {}
    taken: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        where = part_of(tensor.name)
        count = _parameters(tensor, checkpoint.tensors, said)
        parameters[where] = parameters.get(where, 0) + count
        taken[where] = taken.get(where, 0) + tensor.end - tensor.start
    for counts in (parameters, taken):
        counts["total"] = sum(counts.values())
    return {"parameters": parameters, "bytes": taken, "files": len(checkpoint.files)}


def _parameters(
    tensor: TensorHeader, tensors: Mapping[str, TensorHeader], said: dict[str, Any]
) -> int:
    stem, _, leaf = tensor.name.rpartition(".")
    if leaf in ("scales", "biases") and f"{stem}.weight" in tensors:
        return 0
    count = math.prod(tensor.shape)
    if tensor.dtype != "U32":
        return count
    own = said.get(stem)
    bits = own.get("bits") if isinstance(own, dict) else None
    bits = said.get("bits") if bits is None else bits
    return count * 32 // bits if isinstance(bits, int) and 0 < bits <= 32 else count


def names(checkpoint: Checkpoint, plan: Plan, facts: Facts) -> dict[str, Any]:
    """Return the names missing and unexpected for each reader, or why they cannot be told.

    `refused` says, of each reader that would not load the checkpoint as it is, why.
    """
    missing: dict[str, list[str] | None] = dict.fromkeys(("impl", "mlx-lm", "transformers"))
    unexpected = dict(missing)
    untold: dict[str, str] = {}
    wrong: list[dict[str, Any]] = []
    mixture = experts.is_mixture(checkpoint.config)
    if mixture:
        untold["impl"] = "a mixture of experts is not run yet"
    try:
        given = experts.dense(checkpoint.config) if mixture else checkpoint.config
        canonical = expected_shapes(parse_config(given, checkpoint.path))
    except CheckpointError as error:
        untold = dict.fromkeys(missing, str(error)) | untold
    else:
        loaded = {e.target for e in plan.entries}
        if mixture:
            canonical, loaded = experts.sparse(canonical), experts.split(loaded)
        due = _with_head(canonical, checkpoint)
        stored = _for_transformers(checkpoint)
        found = {
            "impl": (set(canonical), loaded),
            "mlx-lm": (
                due | _packing(canonical, loaded, checkpoint),
                loaded | _kept_heads(plan),
            ),
            "transformers": (
                experts.stacked(exported(due, _bare_trunk(facts))),
                experts.stacked(stored) if mixture else stored,
            ),
        }
        for reader in found.keys() - untold.keys():
            asked, has = found[reader]
            missing[reader], unexpected[reader] = sorted(asked - has), sorted(has - asked)
        if not mixture:
            wrong = _wrong_shapes(canonical, checkpoint, plan, facts)
    found_names: dict[str, Any] = {
        "missing": missing,
        "unexpected": unexpected,
        "untold": untold,
        "wrong_shapes": wrong,
    }
    return found_names | {"refused": _refused(found_names, checkpoint, facts)}


def _refused(found: dict[str, Any], checkpoint: Checkpoint, facts: Facts) -> dict[str, str]:
    refused: dict[str, str] = {}
    for reader in ("impl", "mlx-lm"):
        said = [
            f"{len(listed)} {what} ({shown(listed[0])} first)"
            for what in ("missing", "unexpected")
            if (listed := found[what][reader])
        ]
        if found["wrong_shapes"]:
            said.append(f"{shown(found['wrong_shapes'][0]['name'])} has another shape than due")
        if said:
            refused[reader] = ", ".join(said)
    kind = checkpoint.config.get("model_type")
    if facts.flat:
        refused["mlx-lm"] = f"it does not know the model_type {kind}"
    elif quantization(checkpoint)["trellis"]:
        refused["mlx-lm"] = "it does not know the quantization mode trellis"
    if facts.quantized:
        refused["impl"] = "it does not run quantized checkpoints yet"
    if "impl" in found["untold"]:
        refused["impl"] = found["untold"]["impl"]
    return refused


def _with_head(canonical: Shapes, checkpoint: Checkpoint) -> set[str]:
    """Return the canonical names for a reader that ties the head by the text section alone."""
    inner = checkpoint.config.get("text_config", checkpoint.config)
    head = {f"{_ROOT}lm_head.weight"}
    return set(canonical) - head if inner.get("tie_word_embeddings") else set(canonical) | head


def _kept_heads(plan: Plan) -> set[str]:
    # mlx-lm drops a tied head only under the name lm_head.weight, and never sees that.
    heads = {name for name, why in plan.dropped if why.startswith("the head")}
    return {name if name.startswith(_ROOT) else _ROOT + name for name in heads}


def _packing(canonical: Shapes, loaded: set[str], checkpoint: Checkpoint) -> set[str]:
    """Return the scales and biases that mlx-lm asks for: of modules named or stored so."""
    said = _quantization_entry(checkpoint)
    stored = {e for e in loaded if e.endswith(".scales")}
    due = set()
    for name, shape in canonical.items() if said else ():
        stem = name.removesuffix(".weight")
        own = said.get(stem, f"{stem}.scales" in stored)
        if len(shape) != 2 or not own:
            continue
        due.add(f"{stem}.scales")
        mode = own.get("mode", "affine") if isinstance(own, dict) else said.get("mode", "affine")
        if mode == "affine":
            due.add(f"{stem}.biases")
    return due


def exported(canonical: set[str], bare: bool) -> set[str]:
    """Return transformers' names, with the trunk under `model.` where it is `bare`."""
    trunk = "model." if bare else "model.language_model."
    return {
        trunk + name.removeprefix(_TRUNK) if name.startswith(_TRUNK) else name.removeprefix(_ROOT)
        for name in canonical
    }


def _bare_trunk(facts: Facts) -> bool:
    # transformers' text model takes both, whatever the config.
    if any(name.startswith("model.language_model.") for name in facts.shapes):
        return False
    return facts.flat or any(name.startswith("model.layers.") for name in facts.shapes)


def _for_transformers(checkpoint: Checkpoint) -> set[str]:
    ignored = ("mtp", "model.visual")  # the one by transformers itself, the other is not the text
    inner = checkpoint.config.get("text_config", checkpoint.config)
    tied = {"lm_head.weight"} if inner.get("tie_word_embeddings") else set()
    return {n for n in checkpoint.tensors if not n.startswith(ignored)} - tied


def _wrong_shapes(
    due: Shapes, checkpoint: Checkpoint, plan: Plan, facts: Facts
) -> list[dict[str, Any]]:
    wrong = []
    for entry in plan.entries:
        shape = facts.shapes[entry.source]
        moved = (shape[0], *shape[:0:-1]) if entry.move_conv and len(shape) == 3 else shape
        packed = checkpoint.tensors[entry.source].dtype == "U32"
        if entry.target in due and moved != due[entry.target] and not packed:
            wrong.append(
                {"name": entry.source, "shape": list(shape), "due": list(due[entry.target])}
            )
    return wrong
