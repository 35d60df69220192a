"""A checkpoint's convention as JSON: every loader's rule, what the values say, and who disagrees.

Works from headers, and the first values of the norm gains; imports no framework.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

from parity import census, rules
from parity.evidence import NOT_READ, Evidence, read_evidence
from parity.rules import Decision, Facts, Rule
from parity.shown import shown
from qwen35.config import unknown_keys
from qwen35.errors import CheckpointError, InputError
from qwen35.headers import Checkpoint
from qwen35.plan import Plan, make_plan

DEFAULT_RULE = "mlx-lm-0.32"
_FAMILY = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
_OUTCOMES = {  # what the gains are once a rule has run, by what they say and whether it shifts
    ("γ−1", True): "γ",
    ("γ−1", False): "γ−1",
    ("γ", True): "γ+1",
    ("γ", False): "γ",
    ("γ+1", True): "γ+2",
    ("γ+1", False): "γ+1",
}


@dataclass(frozen=True)
class Inspection:
    """What was found. `decisions` is by rule name, in the order of `rules.RULES`."""

    checkpoint: Checkpoint
    facts: Facts
    plan: Plan
    evidence: Evidence
    decisions: dict[str, Decision]
    rule: str

    @property
    def agree(self) -> bool:
        """Whether all rules that can say do the same to every gain."""
        answers = {d.shift for d in self.decisions.values() if d.shift is not None}
        return len(answers) < 2 and not any(d.some for d in self.decisions.values())

    @property
    def outcomes(self) -> dict[str, str | None]:
        """Rule -> what the gains are once it has loaded them; `γ` is right, None is unknown."""
        return {
            name: None if d.shift is None else _OUTCOMES.get((self.evidence.says, d.shift))
            for name, d in self.decisions.items()
        }

    @property
    def contradicted(self) -> bool:
        """Whether the evidence contradicts the chosen rule."""
        return self.evidence.says == "mixed" or self.outcomes.get(self.rule) not in (None, "γ")

    @property
    def holds(self) -> bool:
        """Whether the chosen rule loads it, and the rules agree, and with the evidence."""
        return self.decisions[self.rule].loads and self.agree and not self.contradicted

    @cached_property
    def names(self) -> dict[str, Any]:
        """Names missing and unexpected by reader, and who refuses the checkpoint for what."""
        return census.names(self.checkpoint, self.plan, self.facts)

    @property
    def sentence(self) -> str:
        """What would happen in which loader, in one sentence."""
        refused = self.names["refused"].get("mlx-lm")
        missing = self.names["missing"]["transformers"]
        said = [self._sentence]
        if refused:
            said.append(f"mlx-lm refuses to load it: {refused}")
        if missing and self.decisions["transformers"].loads:
            said.append(f"transformers makes up {len(missing)} tensors, {shown(missing[0])} first")
        return "; ".join(said) + "."

    @property
    def _sentence(self) -> str:
        says, outcomes = self.evidence.says, self.outcomes
        chosen = self.decisions[self.rule]
        if says == "mixed":
            return (
                f"Every loader reads a part of the gains wrongly, and the model babbles in all of "
                f"them: {self.evidence.because}"
            )
        if wrong := {n: o for n, o in outcomes.items() if o not in (None, "γ")}:
            right = [name for name, outcome in outcomes.items() if outcome == "γ"]
            what = "; ".join(
                f"{_list([n for n, o in wrong.items() if o == outcome])} would compute with "
                f"{outcome} (layer norms near {self._near(outcome)} instead of 1)"
                for outcome in dict.fromkeys(wrong.values())
            )
            where = f"{_list(right)} would load it right" if right else "no loader loads it right"
            if right == ["value-mean"]:
                where = "no published loader loads it right"
            return f"The gains are stored as {says}: {what}, and the model babbles there; {where}"
        if not self.agree:
            shift, leave = self._sides()
            partly = [name for name, d in self.decisions.items() if d.some]
            groups = [
                f"{_list(names)} would {what}"
                for names, what in (
                    (shift, "add 1 to the gains"),
                    (leave, "leave them as they are"),
                    (partly, "add 1 to some of them"),
                )
                if names
            ]
            return f"Loaders disagree, and the model babbles in some: {'; '.join(groups)}"
        if not chosen.loads:
            return f"{self.rule} cannot load it: {chosen.because}"
        loaders = _list([n for n, d in self.decisions.items() if d.shift is not None])
        act = "adds 1 to the gains" if chosen.shift else "leaves the gains as they are"
        held = {"γ": "they are γ", "γ−1": "they are γ−1"}.get(says, f"their values are {says}")
        return f"Every rule that knows its names {act} ({loaders}), and {held}"

    def _near(self, outcome: str) -> str:
        order = ("γ−1", "γ", "γ+1", "γ+2")
        steps = order.index(outcome) - order.index(self.evidence.says)
        return f"{(self.evidence.mean_gain or 0) + steps:.2f}"

    def _sides(self) -> tuple[list[str], list[str]]:
        shift = [name for name, d in self.decisions.items() if d.shift is True]
        return shift, [name for name, d in self.decisions.items() if d.shift is False]


def inspect(checkpoint: Checkpoint, rule: str = DEFAULT_RULE, evidence: bool = True) -> Inspection:
    """Look at a checkpoint. Raises InputError for another family and CheckpointError for damage."""
    if rule not in rules.NAMES:
        raise InputError(f"--rule {rule}: no such rule. Known are {', '.join(rules.NAMES)}.")
    outer, inner = _sections(checkpoint)
    facts = Facts(
        shapes={name: header.shape for name, header in checkpoint.tensors.items()},
        tied=any(part.get("tie_word_embeddings") is True for part in (inner, outer)),
        flat=outer.get("model_type") in ("qwen3_5_text", "qwen3_5_moe_text"),
        quantized=any(name.endswith(".scales") for name in checkpoint.tensors),
    )
    try:
        plan = make_plan(facts.shapes, facts.tied)
    except ValueError as error:
        raise CheckpointError(
            checkpoint.path, shown(str(error), 400), "Remove one of the two"
        ) from None
    found = NOT_READ
    if evidence:
        found = read_evidence(checkpoint.tensors, {e.source: e.target for e in plan.entries})
        facts = replace(facts, says=found.says, mean=found.mean_gain)
    decisions = {r.name: r.decide(facts) for r in rules.RULES}
    return Inspection(checkpoint, facts, plan, found, decisions, rule)


def _sections(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    outer = checkpoint.config
    inner = outer.get("text_config", outer)
    file = checkpoint.path / "config.json"
    if not isinstance(inner, dict):
        raise CheckpointError(
            file, "text_config is no JSON object", "Copy the original config.json"
        )
    if outer.get("model_type") not in _FAMILY:
        raise CheckpointError(
            file,
            f"model_type is {shown(repr(outer.get('model_type')))}",
            f"Known are {', '.join(_FAMILY)}",
        )
    return outer, inner


def to_json(found: Inspection, repeat: str) -> dict[str, Any]:
    """Return everything as plain JSON values."""
    checkpoint, facts = found.checkpoint, found.facts
    drafts = {n: s for n, s in facts.shapes.items() if "mtp." in n}
    return {
        "schema": 1,
        "verdict": "holds" if found.holds else "differs",
        "exit": 0 if found.holds else 1,
        "sentence": found.sentence,
        "model": str(checkpoint.path),
        "repeat": repeat,
        "rule": found.rule,
        "generation": found.plan.generation,
        "rules": {
            rule.name: _rule(rule, found.decisions[rule.name], found, drafts)
            for rule in rules.RULES
        },
        "agree": found.agree,
        "contradicted": found.contradicted,
        "disagreements": _matrix(found.decisions),
        "evidence": found.evidence.to_json(),
        "conv_layout": census.conv_layout(facts.shapes),
        "quantization": census.quantization(checkpoint),
        "draft_head": census.part(checkpoint, "draft head"),
        "vision": census.part(checkpoint, "vision"),
        "tied": facts.tied,
        **found.names,
        **census.sizes(checkpoint),
        "unknown_config_keys": list(unknown_keys(checkpoint.config)),
        "plan": str(found.plan),
    }


def _rule(
    rule: Rule, decision: Decision, found: Inspection, drafts: dict[str, tuple[int, ...]]
) -> dict[str, Any]:
    idempotent: dict[str, bool | None] = {"loaded_again": None, "kept_draft_head": None}
    if decision.loads and decision.shift is not None:
        # A conversion holds γ, so no shift is due any more; transformers saves γ−1 as it loaded it.
        due = rule.name == "transformers"
        idempotent["loaded_again"] = rules.again(rule, found.facts).shift is due
        if drafts and not due:
            idempotent["kept_draft_head"] = rules.again(rule, found.facts, drafts).shift is due
    return {
        "shift": decision.shift,
        "because": decision.because,
        "loads": decision.loads,
        "gains_become": found.outcomes.get(rule.name),
        "idempotent": idempotent,
        "source": rule.source,
    }


def _matrix(decisions: dict[str, Decision]) -> dict[str, dict[str, bool | None]]:
    """Return rule x rule: True where they disagree, None where one of them has no say."""
    matrix: dict[str, dict[str, bool | None]] = {name: {name: False} for name in decisions}
    for (a, one), (b, two) in combinations(decisions.items(), 2):
        differ: bool | None = None
        if one.some or two.some:
            differ = True if one.loads and two.loads else None
        elif one.shift is not None and two.shift is not None:
            differ = one.shift != two.shift
        matrix[a][b] = matrix[b][a] = differ
    return matrix


def _list(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1])] * (len(names) > 1) + names[-1:])
