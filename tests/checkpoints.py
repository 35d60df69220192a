"""Small checkpoints for tests, exported once a session, and runs on them."""

from pathlib import Path

from parity import policy, suite
from parity.export import Recipe, convert, export
from parity.result import to_json
from parity.run import RunResult, Target, run
from qwen35.headers import open_checkpoint


class Checkpoints:
    """Exports the suite's recipes below `folder`, each at most once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, label: str, dtype: str, generation: str = "transformers", seed: int = 0) -> Path:
        """Return the folder of a checkpoint, made when first asked for."""
        plan = suite.CHECKPOINTS[label]
        folder = self.folder / f"{label}-{dtype}-{generation}-{seed}"
        if folder.exists():
            return folder
        if generation == "mlx-lm":
            return convert(self.path(label, dtype, seed=seed), folder)
        return export(Recipe(label, plan.text_config, seed, plan.qk_scale), folder, dtype)

    def target(
        self,
        label: str,
        dtype: str,
        program: str,
        generation: str = "transformers",
        seed: int = 0,
    ) -> Target:
        """Return one case of the suite."""
        path = self.path(label, dtype, generation, seed=seed)
        programs = {program: suite.program(suite.CHECKPOINTS[label], program, seed)}
        repeat = "parity run --case x/{program}"
        return Target(label, open_checkpoint(path), generation, dtype, programs, repeat)

    def judge(self, *case: str, oracles: tuple[str, ...] = ("mlx-lm",), **options: str) -> dict:
        """Run one case and return the result as JSON values."""
        return to_json(self.run(*case, oracles=oracles, **options), "parity run", 0)

    def run(self, *case: str, oracles: tuple[str, ...] = ("mlx-lm",), **options: str) -> RunResult:
        """Run one case."""
        return run([self.target(*case, **options)], "impl", oracles, policy.load())
