"""The loading plan: what becomes of each tensor of a checkpoint, decided from names and shapes.

Two generations of checkpoints hold the same graph: mlx-lm's conversion (the canonical names here,
conv weights [C, K, 1], gains γ) and transformers' export (conv weights [C, 1, K], gains γ−1).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from qwen35.config import TextConfig, expected_shapes
from qwen35.errors import CheckpointError
from qwen35.headers import FLOATS, Checkpoint

Shapes = Mapping[str, tuple[int, ...]]
Generation = Literal["mlx-lm", "transformers", "mixed"]
RULES = ("mlx-lm-0.31", "mlx-lm-0.32")
SHIFTED = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)
"""Endings of the gains that are stored as γ−1; linear_attn.norm.weight is γ in both generations."""
KEEPS_DTYPE = ".A_log"
"""Ending of the one parameter that keeps its stored dtype when a checkpoint is cast."""
_VISION = ("vision_tower", "model.visual")
_ONE_MODEL = "Give the config.json and weights of one model"


@dataclass(frozen=True)
class Entry:
    """One tensor that is loaded: the conv axis moves [C, 1, K] → [C, K, 1]; gains get 1 added."""

    source: str
    target: str
    move_conv: bool
    add_one: bool


@dataclass(frozen=True)
class Plan:
    """What a rule makes of a checkpoint; a value to be printed, compared and stored."""

    rule: str
    generation: Generation
    shift: bool
    because: str
    entries: tuple[Entry, ...]
    dropped: tuple[tuple[str, str], ...]

    @property
    def identity(self) -> bool:
        """Whether every tensor is loaded as it is stored."""
        return not self.dropped and all(
            e.source == e.target and not e.move_conv and not e.add_one for e in self.entries
        )

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return asdict(self) | {
            "entries": [asdict(entry) for entry in self.entries],
            "dropped": [list(pair) for pair in self.dropped],
        }

    def __str__(self) -> str:
        renamed = sum(e.source != e.target for e in self.entries)
        moved = sum(e.move_conv for e in self.entries)
        shifted = sum(e.add_one for e in self.entries)
        return (
            f"{self.generation} layout; rule {self.rule}: {self.because}; {len(self.entries)} "
            f"tensors, {renamed} renamed, {moved} conv weights moved, {shifted} gains shifted, "
            f"{len(self.dropped)} dropped"
        )


def make_plan(shapes: Shapes, tied: bool, rule: str = "mlx-lm-0.32") -> Plan:
    """Return the plan a rule makes for these names and shapes.

    `mlx-lm-0.32` shifts the gains where a conv weight is unconverted, `mlx-lm-0.31` also where any
    name contains `mtp.`. A tied model's head is dropped here; mlx-lm 0.32.2 looks for it under
    the name it had before renaming, keeps it, and then refuses to load. Raises ValueError for an
    unknown rule and for two names that fold onto one.
    """
    if rule not in RULES:
        raise ValueError(f"unknown rule {rule!r}; known are {', '.join(RULES)}")
    targets, dropped = _rename(shapes)
    convs = [s for s, target in targets.items() if "conv1d.weight" in target]
    unconverted = [s for s in convs if shapes[s][-1:] != (1,)]
    drafts = [s for s, target in targets.items() if "mtp." in target]
    shift, because = _decide(rule, unconverted, drafts)
    entries = []
    for source, target in targets.items():
        if "mtp." in target:
            dropped.append((source, "draft head"))
        elif tied and target == "language_model.lm_head.weight":
            dropped.append((source, "the head is tied to the embedding"))
        else:
            gain = shift and len(shapes[source]) == 1 and target.endswith(SHIFTED)
            entries.append(Entry(source, target, source in unconverted, gain))
    generation = _generation(targets, convs, unconverted)
    return Plan(rule, generation, shift, because, tuple(entries), tuple(dropped))


def _rename(shapes: Shapes) -> tuple[dict[str, str], list[tuple[str, str]]]:
    targets: dict[str, str] = {}
    sources: dict[str, str] = {}
    dropped: list[tuple[str, str]] = []
    for source in shapes:
        if source.startswith(_VISION):
            dropped.append((source, "vision"))
            continue
        target = source
        if source.startswith("model.language_model"):
            # Every occurrence, as mlx-lm does; a name with two is no name of this model.
            target = source.replace("model.language_model", "language_model.model")
        elif not source.startswith("language_model."):
            target = "language_model." + source
        if target in sources:
            raise ValueError(f"{sources[target]!r} and {source!r} are both {target!r}")
        targets[source], sources[target] = target, source
    return targets, dropped


def _decide(rule: str, unconverted: list[str], drafts: list[str]) -> tuple[bool, str]:
    if unconverted:
        return True, f"{unconverted[0]} has its kernel on the last axis, so gains are γ−1"
    if rule == "mlx-lm-0.31" and drafts:
        return True, f"{drafts[0]} is a draft head's, which this rule takes for γ−1"
    return False, "no conv weight has its kernel on the last axis, so gains are γ"


def _generation(
    targets: Mapping[str, str], convs: Sequence[str], unconverted: Sequence[str]
) -> Generation:
    # The draft head is left out: converters keep its names as they were.
    trunk = [source for source, target in targets.items() if "mtp." not in target]
    exported = {targets[source] != source for source in trunk}
    exported |= {source in unconverted for source in convs if "mtp." not in targets[source]}
    if len(exported) > 1:
        return "mixed"
    return "transformers" if True in exported else "mlx-lm"


def check(plan: Plan, checkpoint: Checkpoint, config: TextConfig) -> None:
    """Hold a plan to the config: names, then shapes once the conv axes are moved, then dtypes.

    Raises CheckpointError for a quantized checkpoint, for every name missing or unexpected at once,
    or for the first tensor of a wrong shape or a dtype that is no float.
    """
    path = checkpoint.path
    if quantized := [e.source for e in plan.entries if e.target.endswith((".scales", ".biases"))]:
        raise CheckpointError(
            path,
            f"is quantized ({_some(quantized)}), and quantized checkpoints are not run yet",
            "Give the checkpoint it was made from",
        )
    due = expected_shapes(config)
    targets = {entry.target: entry for entry in plan.entries}
    missing, unexpected = due.keys() - targets.keys(), targets.keys() - due.keys()
    found = [f"lacks {len(missing)} tensors of its config.json: {_some(missing)}"] * bool(missing)
    if unexpected:
        found.append(f"has {len(unexpected)} that its config.json does not: {_some(unexpected)}")
    if found:
        raise CheckpointError(path, "; ".join(found), _ONE_MODEL)
    for target, entry in targets.items():
        header = checkpoint.tensors[entry.source]
        shape = header.shape
        if entry.move_conv and len(shape) == 3:
            shape = (shape[0], shape[2], shape[1])
        if shape != due[target]:
            moved = f" ({list(shape)} once its axis is moved)" if entry.move_conv else ""
            raise CheckpointError(
                header.file,
                f"tensor {entry.source!r} has shape {list(header.shape)}{moved}, config.json asks "
                f"for {list(due[target])}",
                _ONE_MODEL,
            )
        if header.dtype not in FLOATS:
            raise CheckpointError(
                header.file,
                f"tensor {entry.source!r} is {header.dtype}, one of {', '.join(FLOATS)} is due",
                "Give a checkpoint that is not quantized",
            )


def _some(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
