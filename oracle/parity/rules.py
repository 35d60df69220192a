"""How published loaders decide whether the norm gains get 1 added, each as a small named value.

Two short-lived rules are left out, because no converted checkpoint can satisfy them: mlx-vlm 0.6.4
and mlx-swift-lm's vision models before pull request 403 add 1 whatever the checkpoint holds.
mlx-vlm up to 0.6.3 does so where the files' metadata does not say `format: mlx`. mlx-swift-lm's
vision models leave files that do say so as they are; its text models, whose rule is given here, do
not look.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from parity.shown import shown
from qwen35.plan import SHIFTED, Generation, Plan, Shapes, make_plan

_CONV = "conv1d.weight"


@dataclass(frozen=True)
class Decision:
    """What a loader does to the gains: adds 1, leaves them, or None, with the grounds.

    `loads` is False where the loader cannot read the checkpoint. A loader that does (or cannot say)
    but shifts only `some` of the gains has no single answer either.
    """

    shift: bool | None
    because: str
    loads: bool = True
    some: bool = False


@dataclass(frozen=True)
class Facts:
    """What a rule may look at: names and shapes, the config's choices, and what the values say."""

    shapes: Shapes
    tied: bool = False
    flat: bool = False
    """Whether the config is a text model's own (`qwen3_5_text`), which has its own names."""
    quantized: bool = False
    says: str = "not read"
    """parity.evidence's word for the gains."""
    mean: float | None = None


@dataclass(frozen=True)
class Rule:
    """A loader's rule. `after` gives the names and shapes it would save as a conversion."""

    name: str
    source: str
    decide: Callable[[Facts], Decision]
    after: Callable[[Facts], Shapes]


def _planned(rule: str) -> Callable[[Facts], Decision]:
    def decide(facts: Facts) -> Decision:
        plan = make_plan(facts.shapes, facts.tied, rule)
        if flat := _unmovable(facts.shapes, plan):
            return Decision(None, f"{shown(flat)} has no kernel axis to move", loads=False)
        return Decision(plan.shift, shown(plan.because, 240))

    return decide


def _unmovable(shapes: Shapes, plan: Plan) -> str | None:
    return next((e.source for e in plan.entries if e.move_conv and len(shapes[e.source]) < 3), None)


def converted(facts: Facts) -> Shapes:
    """Return the names and shapes of mlx-lm's own conversion."""
    plan = make_plan(facts.shapes, facts.tied)
    return {e.target: _moved(facts.shapes[e.source], e.move_conv) for e in plan.entries}


def _moved(shape: tuple[int, ...], move: bool) -> tuple[int, ...]:
    return (shape[0], shape[2], shape[1], *shape[3:]) if move and len(shape) > 2 else shape


def _transformers(facts: Facts) -> Decision:
    def refuse(why: str) -> Decision:
        return Decision(None, why, loads=False)

    for name, shape in facts.shapes.items():
        if "mtp." in name or name.startswith("model.visual"):
            continue
        if not name.startswith(("model.", "lm_head.")):
            return refuse(f"it does not know the name {shown(name)}")
        if name.endswith(_CONV) and len(shape) == 3 and shape[1] != 1:
            return refuse(
                f"{shown(name)} is {list(shape)}, it asks for the kernel on the last axis"
            )
    if facts.quantized:
        return refuse("it does not read MLX's quantization")
    return Decision(True, "it computes 1 + w for every gain, in all its checkpoints")


def _mlx_vlm(draft_head_counts: bool) -> Callable[[Facts], Decision]:
    def decide(facts: Facts) -> Decision:
        kept = {n: s for n, s in facts.shapes.items() if "mtp." not in n}
        names = {name: _mlx_vlm_name(name, facts.flat) for name in kept}
        seen = facts.shapes if draft_head_counts else kept
        drafts = [n for n in seen if "mtp." in n]
        convs = [n for n, s in seen.items() if _CONV in n and s[-1:] != (1,)]
        known = ("language_model.", "vision_tower.")
        if foreign := [n for n, new in names.items() if not new.startswith(known)]:
            return Decision(None, f"it does not know the name {shown(foreign[0])}", loads=False)
        if flat := [n for n in convs if len(facts.shapes[n]) < 3]:
            return Decision(None, f"{shown(flat[0])} has no kernel axis to move", loads=False)
        if drafts:
            return Decision(True, f"{shown(drafts[0])} is a draft head's, which it takes for γ−1")
        if convs:
            return Decision(True, f"{shown(convs[0])} has its kernel on the last axis")
        gains = [n for n, s in kept.items() if names[n].endswith(SHIFTED) and len(s) == 1]
        own = [n for n in gains if not n.startswith("language_model.")]
        if own and len(own) < len(gains):
            why = f"it shifts {len(own)} of {len(gains)} gains, {shown(own[0])} first"
            return Decision(None, why, some=True)
        if own:
            return Decision(True, f"{shown(own[0])} does not begin with language_model.")
        return Decision(False, "no conv weight has its kernel on the last axis, and the names are "
                        "converted ones")  # fmt: skip

    return decide


def _mlx_vlm_name(name: str, flat: bool) -> str:
    changes = [
        ("model.language_model.visual", "vision_tower"),
        ("model.language_model", "language_model.model"),
        ("model.visual", "vision_tower"),
        ("lm_head", "language_model.lm_head"),
    ]
    if flat:
        changes = [("model.", "language_model.model."), ("lm_head", "language_model.lm_head")]
    for old, new in changes:
        if name.startswith(old):
            return name.replace(old, new, 1)
    return name


def _mlx_vlm_after(facts: Facts) -> Shapes:
    return {
        _mlx_vlm_name(name, facts.flat): _moved(shape, _CONV in name and shape[-1:] != (1,))
        for name, shape in facts.shapes.items()
        if "mtp." not in name
    }


def _value_mean(facts: Facts) -> Decision:
    if facts.says == "not read":
        return Decision(None, "the gains' values were not read")
    if facts.says in ("unclear", "mixed"):
        return Decision(None, f"the gains' values are {facts.says}")
    side = "near 0" if facts.says == "γ−1" else "not near 0"
    return Decision(facts.says == "γ−1", f"the gains' mean is {facts.mean:.3g}, {side}")


_OLD, _NEW = _planned("mlx-lm-0.31"), _planned("mlx-lm-0.32")
_VLM_FILE = "mlx_vlm/models/qwen3_5/qwen3_5.py, Model.sanitize"
_SWIFT_FILE = "Libraries/MLXLLM/Models/Qwen35.swift, Qwen35TextModel.sanitize"

RULES = (
    Rule(
        "mlx-lm-0.31",
        "mlx-lm 0.30.7 to 0.31.3, mlx_lm/models/qwen3_5.py, TextModel.sanitize",
        _OLD,
        converted,
    ),
    Rule(
        "mlx-lm-0.32",
        "mlx-lm 0.32.0 to 0.32.2, mlx_lm/models/qwen3_5.py, TextModel.sanitize",
        _NEW,
        converted,
    ),
    Rule(
        "transformers",
        "transformers 5.24.0, transformers/models/qwen3_5/modeling_qwen3_5.py, Qwen3_5RMSNorm",
        _transformers,
        lambda facts: facts.shapes,
    ),
    Rule("mlx-vlm-0.6.5", f"mlx-vlm 0.6.5 to 0.6.8, {_VLM_FILE}", _mlx_vlm(True), _mlx_vlm_after),
    Rule("mlx-vlm", f"mlx-vlm 0.6.9 to 0.7.10, {_VLM_FILE}", _mlx_vlm(False), _mlx_vlm_after),
    Rule(
        "mlx-swift-lm-403",
        f"mlx-swift-lm before pull request 598 (2026-08-31), {_SWIFT_FILE}",
        _OLD,
        converted,
    ),
    Rule(
        "mlx-swift-lm",
        f"mlx-swift-lm since pull request 598 (commit 0182a49), {_SWIFT_FILE}",
        _NEW,
        converted,
    ),
    Rule(
        "value-mean",
        "proposed in mlx-lm pull request 1198 and not merged: shift where the gains average near 0",
        _value_mean,
        converted,
    ),
)
"""Every rule, in the order of the report."""
NAMES = tuple(rule.name for rule in RULES)


def again(rule: Rule, facts: Facts, keep: Mapping[str, tuple[int, ...]] | None = None) -> Decision:
    """Decide about the rule's own conversion, with the tensors of `keep` left in it."""
    shapes = {**rule.after(facts), **(keep or {})}
    says, mean = facts.says, facts.mean
    if rule.name != "transformers" and rule.decide(facts).shift and mean is not None:
        says, mean = {"γ−1": "γ", "γ": "γ+1"}.get(says, says), mean + 1
    return rule.decide(Facts(shapes, facts.tied, facts.flat, facts.quantized, says, mean))


def generation(facts: Facts) -> Generation:
    """Return the generation that the names and conv weights are of."""
    return make_plan(facts.shapes, facts.tied).generation
