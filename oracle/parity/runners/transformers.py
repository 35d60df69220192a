"""The runner for transformers, unmodified; `transformers_taps` sees what it computes."""

import contextlib
import importlib
import importlib.metadata
import inspect
import io
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Literal

import ml_dtypes
import numpy as np

from parity.program import Program
from parity.runners.imports import importing
from parity.runners.transformers_taps import observed
from parity.trace import Feed, Trace
from qwen35.errors import CannotRunError, CheckpointError
from qwen35.headers import Checkpoint

Precision = Literal["native", "float64"]
_HOME = "transformers.models.qwen3_5.modeling_qwen3_5"


class TransformersRunner:
    """Runs transformers' text model with eager attention and its own DynamicCache, on the CPU.

    Weights are cast to `dtype`, except A_log, which keeps its stored dtype. With `precision`
    "float64" those weights are widened and the same code, its float32 casts rewritten, computes in
    float64 throughout: the name is then `transformers-f64`.
    Raises CheckpointError for names missing, unexpected or of a wrong shape, CannotRunError without
    torch and transformers.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: str, precision: Precision = "native") -> None:
        self.dtype, self.precision = dtype, precision
        self.name = "transformers-f64" if precision == "float64" else "transformers"
        self.module = _home(precision)
        with quiet():
            self.model = _load(checkpoint, dtype, precision, self.module)
        self.config = self.model.config
        self.layer_types = tuple(self.config.layer_types)

    def run(self, program: Program, feed: Feed | None = None) -> Trace:
        """See Runner."""
        import torch
        from transformers import DynamicCache

        program.check_vocabulary(self.config.vocab_size)
        trace = Trace(self.name, self.layer_types, self._info())
        cache = DynamicCache(config=self.config)
        # transformers 5.24 renamed the argument.
        parameters = inspect.signature(type(self.model).forward).parameters
        keyword = "cache" if "cache" in parameters else "past_key_values"
        chosen = program.chosen_rows()
        with quiet(), torch.no_grad():
            for forward, (_, _, ids) in enumerate(program.forwards()):
                if (rows := chosen[forward]) is not None:
                    # batch_select_indices does not reach linear layers; this takes fewer rows too.
                    cache.reorder_cache(torch.tensor(rows))

                def take(name: str, value: Any, forward: int = forward) -> None:
                    trace.add(forward, name, to_numpy(value))

                def fed(layer: int, forward: int = forward) -> Any:
                    assert feed is not None
                    return to_torch(feed(forward, layer), self.model.dtype)

                with observed(self.model, self.module, cache, take, fed if feed else None):
                    self.model(
                        input_ids=torch.from_numpy(ids.copy()), use_cache=True, **{keyword: cache}
                    )
        return trace

    def _info(self) -> dict[str, Any]:
        return {
            "torch": importlib.metadata.version("torch"),
            "transformers": importlib.metadata.version("transformers"),
            "dtype": self.dtype,
            "precision": self.precision,
            "device": "cpu",
            "attn_implementation": self.config._attn_implementation,
        }


def to_numpy(value: Any) -> np.ndarray:
    """Return a copy of a tensor in its own dtype, C-contiguous; arrays pass through."""
    import torch

    if isinstance(value, np.ndarray):
        return value
    value = value.detach().contiguous()
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().copy().view(ml_dtypes.bfloat16)
    return value.numpy().copy()


def to_torch(value: np.ndarray, dtype: Any) -> Any:
    """Return a copy of an array as a tensor of `dtype`."""
    import torch

    if value.dtype == ml_dtypes.bfloat16:
        copy = torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16)
    else:
        copy = torch.from_numpy(value.copy())
    return copy.to(dtype)


def _home(precision: Precision) -> ModuleType:
    with importing("transformers", "torch"):
        import torch  # noqa: F401
        import transformers  # noqa: F401

        if precision == "float64":
            from parity.runners.transformers_f64 import float64_module

            return float64_module(_HOME)
        return importlib.import_module(_HOME)


def _load(checkpoint: Checkpoint, dtype: str, precision: Precision, module: ModuleType) -> Any:
    import torch
    from safetensors import safe_open
    from transformers import Qwen3_5TextConfig

    stored = checkpoint.config
    text = dict(stored.get("text_config", stored))
    text.setdefault("tie_word_embeddings", stored.get("tie_word_embeddings", False))
    text["model_type"] = "qwen3_5_text"
    config = Qwen3_5TextConfig.from_dict(text)
    wide = precision == "float64"
    if wide and config.rope_parameters["rope_type"] != "default":
        raise CannotRunError(
            f"transformers-f64 computes only default RoPE in float64, not "
            f"{config.rope_parameters['rope_type']!r}"
        )
    try:
        model, found = module.Qwen3_5ForCausalLM.from_pretrained(
            checkpoint.path,
            config=config,
            dtype=torch.float64 if wide else getattr(torch, dtype),
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            checkpoint.path, f"transformers cannot load it ({error})", "Export it again"
        ) from None
    ignored = ("mtp.", "model.visual.", "visual.")
    found["unexpected_keys"] = [k for k in found["unexpected_keys"] if not k.startswith(ignored)]
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        if names := sorted(map(str, found.get(problem) or ())):
            raise CheckpointError(
                checkpoint.path,
                f"transformers reports {problem.replace('_', ' ')}: {', '.join(names[:5])}"
                + (f" and {len(names) - 5} more" if len(names) > 5 else ""),
                "Export it again with save_pretrained",
            )
    if wide:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype)).double()
    # A_log is cast with the model, which costs 7.6e-3 of the logits in bfloat16.
    for name, header in checkpoint.tensors.items():
        if name.endswith(".linear_attn.A_log") and not name.startswith("mtp."):
            with safe_open(header.file, framework="pt") as file:
                value = file.get_tensor(name)
            owner = model.get_submodule(
                name.removesuffix(".A_log").replace("language_model.", "", 1)
            )
            owner.A_log.data = value.double() if wide else value
    return model.eval()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' and mlx-lm's bars, logs, prints and warnings off the terminal."""
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
