"""Running cases: a candidate and its oracles on the same programs, judged under a policy."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from parity.arbitrate import Arbiter
from parity.compare import Comparison, compare
from parity.policy import Pair, Policy
from parity.program import Program
from parity.reference import ReferenceRunner
from parity.roundings import Roundings, roundings
from parity.runners.append_only import APPEND_ONLY, AppendOnly
from parity.runners.base import Runner, RunnerOptions, StatefulRunner
from parity.runners.registry import abilities, open_runner, why_not
from parity.states import States, compare_states
from parity.trace import Feed, Trace, feed_from, unfed
from qwen35.config import parse_config
from qwen35.errors import InputError
from qwen35.headers import Checkpoint


@dataclass(frozen=True)
class Target:
    """One checkpoint in one dtype, and the programs to run on it."""

    label: str
    checkpoint: Checkpoint
    generation: str
    dtype: str
    programs: dict[str, Program]
    repeat: str
    """The command that runs this checkpoint again, with `{program}` where its name goes."""


@dataclass
class PairResult:
    """What one oracle said of one case; `not_compared` gives the reason where nothing was."""

    feed: str | None = None
    comparisons: list[Comparison] = field(default_factory=list)
    not_compared: str | None = None


@dataclass
class CaseResult:
    """One program on one target."""

    name: str
    target: Target
    program_name: str
    program: Program
    layer_types: tuple[str, ...]
    pairs: dict[str, PairResult] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether any comparison failed."""
        return any(c.failed for pair in self.pairs.values() for c in pair.comparisons)


@dataclass
class RunResult:
    """All cases of a run and the environments the runners reported."""

    candidate: str
    oracles: tuple[str, ...]
    cases: list[CaseResult] = field(default_factory=list)
    info: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0


OnCase = Callable[[str], None]
"""Called with a case's name after each oracle's judgement of it, for progress."""


def run(
    targets: Iterable[Target],
    candidate: str,
    oracles: Sequence[str],
    policy: Policy,
    fail_fast: bool = False,
    on_case: OnCase = lambda name: None,
    options: RunnerOptions = RunnerOptions(),  # noqa: B008 - frozen
) -> RunResult:
    """Run every program of every target.

    Raises InputError for a candidate or oracle that is unknown or asked for twice, and whatever a
    runner raises that cannot load its checkpoint.
    """
    if candidate in oracles or len(set(oracles)) != len(oracles):
        raise InputError(
            f"--oracle {', '.join(oracles)} with --candidate {candidate}: each runner may appear "
            "once. Name oracles other than the candidate."
        )
    if candidate == APPEND_ONLY:
        raise InputError(f"--candidate {candidate}: is an oracle alone. Name what it is to run.")
    started = time.perf_counter()
    result = RunResult(candidate, tuple(oracles))
    for target in targets:
        result.cases += _run_target(target, result, policy, on_case, options)
        if fail_fast and any(case.failed for case in result.cases):
            break
    result.seconds = time.perf_counter() - started
    return result


def _run_target(
    target: Target, result: RunResult, policy: Policy, on_case: OnCase, options: RunnerOptions
) -> list[CaseResult]:
    config = parse_config(target.checkpoint.config, target.checkpoint.path)
    cases = [
        CaseResult(
            f"{target.label}/{target.generation}/{target.dtype}/{name}",
            target,
            name,
            program,
            config.layer_types,
        )
        for name, program in target.programs.items()
    ]
    for case in cases:
        case.program.check_vocabulary(config.vocab_size)
    judged = _Judged(target, result, options)
    for oracle in result.oracles:
        pair = policy.pair(result.candidate, oracle, target.dtype)
        comparable = []
        for case in cases:
            reason = _reason(case, result.candidate, oracle, pair, policy, config.model_type)
            case.pairs[oracle] = PairResult(pair.feed if pair else None, not_compared=reason)
            if reason is None:
                comparable.append(case)
            else:
                on_case(case.name)
        if comparable and pair is not None:
            runner = judged.open_oracle(oracle)
            for case in comparable:
                case.pairs[oracle].comparisons = judged.judge(case, runner, pair)
                on_case(case.name)
            del runner  # one oracle's weights at a time
    return cases


def _reason(
    case: CaseResult,
    candidate: str,
    oracle: str,
    pair: Pair | None,
    policy: Policy,
    model_type: str,
) -> str | None:
    target = case.target
    for name in (candidate, oracle):
        reason = why_not(name, case.program, target.dtype, target.generation, model_type)
        if reason is not None:
            return reason
    if is_of_states(case.program, oracle, pair):
        for name in (candidate, oracle):
            if name != APPEND_ONLY and not abilities(name).shows_states:
                return f"{name} does not show its states, by which {case.program_name} is compared"
        if pair is not None and pair.arbitrated:
            return f"{policy.source} arbitrates {candidate} against {oracle}: states cannot be"
    if pair is None:
        return f"{policy.source} has no rule for {candidate} against {oracle} in {target.dtype}"
    return None


def is_of_states(program: Program, oracle: str, pair: Pair | None) -> bool:
    """Return whether states are compared, row by row, and not the taps of forwards.

    Taps are what can be arbitrated; there they are compared wherever no token is padding.
    """
    arbitrated = pair is not None and pair.arbitrated
    by_taps = program.is_even if arbitrated else program.is_plain
    return oracle == APPEND_ONLY or not by_taps


class _Judged:
    """The candidate and the arbiter of one target, loaded once and run once a program and feed."""

    def __init__(self, target: Target, result: RunResult, options: RunnerOptions) -> None:
        self._target, self._result, self._options = target, result, options
        self._candidate: Runner | None = None
        self._reference: ReferenceRunner | None = None
        self._free: dict[str, Trace] = {}
        self._states: dict[str, States] = {}
        self._truths: dict[str, tuple[Trace, Roundings]] = {}

    def open(self, name: str) -> Runner:
        return open_runner(name, self._target.checkpoint, self._target.dtype, self._options)

    def open_oracle(self, name: str) -> Any:
        return AppendOnly(self._opened()) if name == APPEND_ONLY else self.open(name)

    def _opened(self) -> Any:
        if self._candidate is None:
            self._candidate = self.open(self._result.candidate)
        return self._candidate

    def judge(self, case: CaseResult, oracle: Any, pair: Pair) -> list[Comparison]:
        if is_of_states(case.program, oracle.name, pair):
            return self._judge_states(case, oracle, pair)
        theirs = self._run(oracle, case.program)
        forwards = len(case.program.forwards())
        feed = None
        if pair.feed == "layer":
            if lacking := unfed(theirs, forwards):
                detail = f"not recorded by {oracle.name}, so no layer could be fed from it"
                return [Comparison(f, name, "missing", "", "", detail) for f, name in lacking]
            feed = feed_from(theirs)
        ours = self._once(self._opened(), case, feed)
        arbiter = None
        if pair.arbitrated:
            truth, rounded = self._truth(case, feed)
            arbiter = Arbiter(ours, theirs, truth, rounded)
        dtype = self._target.dtype
        found = compare(ours, theirs, pair, case.layer_types, forwards, dtype, arbiter)
        moments = [at for at, m in enumerate(case.program.moments()) if m.is_forward]
        return [
            replace(c, forward=moments[c.forward]) if 0 <= c.forward < forwards else c
            for c in found
        ]

    def _judge_states(
        self, case: CaseResult, oracle: StatefulRunner, pair: Pair
    ) -> list[Comparison]:
        key = case.program_name
        if key not in self._states:
            self._states[key] = self._opened().states(case.program)
        ours, theirs = self._states[key], oracle.states(case.program)
        for states in (ours, theirs):
            self._result.info.setdefault(states.runner, states.info)
        return compare_states(ours, theirs, pair, case.layer_types)

    def _truth(self, case: CaseResult, feed: Feed | None) -> tuple[Trace, Roundings]:
        key = case.program_name
        if feed is not None or key not in self._truths:
            reference = self._arbiter()
            truth = self._run(reference, case.program, feed)
            found = truth, roundings(reference, case.program, truth, feed)
            if feed is not None:
                return found
            self._truths[key] = found
        return self._truths[key]

    def _arbiter(self) -> ReferenceRunner:
        if self._reference is None:
            path = self._target.checkpoint.path
            try:
                self._reference = ReferenceRunner(path, self._target.dtype)
            except (KeyError, ValueError) as error:
                raise InputError(f"{path}: the reference cannot read it ({error}).") from None
        return self._reference

    def _once(self, runner: Runner, case: CaseResult, feed: Feed | None) -> Trace:
        if feed is not None:
            return self._run(runner, case.program, feed)
        key = case.program_name
        if key not in self._free:
            self._free[key] = self._run(runner, case.program)
        return self._free[key]

    def _run(self, runner: Runner, program: Program, feed: Feed | None = None) -> Trace:
        trace = runner.run(program, feed)
        self._result.info.setdefault(trace.runner, trace.info)
        return trace
