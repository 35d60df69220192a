"""transformers' Qwen3.5 code with its float32 casts rewritten to float64: a second truth.

`.double()` on the model is not enough: the code casts to float32 at eight places (5e-6 of error).
"""

import ast
import importlib.machinery
import importlib.util
import io
import sys
import tokenize
from types import CodeType, ModuleType

from qwen35.errors import CannotRunError

_CASTS = {
    "Qwen3_5TextRotaryEmbedding": 3,
    "Qwen3_5RMSNormGated": 2,
    "torch_chunk_gated_delta_rule": 1,
    "torch_recurrent_gated_delta_rule": 1,
    "Qwen3_5GatedDeltaNet": 2,
    "eager_attention_forward": 1,
    "Qwen3_5RMSNorm": 2,
}
"""Top-level name -> casts to float32 in transformers 5.24. Any other number stops the rewrite."""

_NARROW = {"half", "float16", "bfloat16", "type", "autocast"}


def float64_module(name: str) -> ModuleType:
    """Import the module of this name a second time, rewritten. Raises CannotRunError."""
    alias = name + "_float64"
    if alias in sys.modules:
        return sys.modules[alias]
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise CannotRunError(f"{name} has no source file. Install transformers from a wheel.")
    loader = _Float64Loader(alias, found.origin)
    spec = importlib.util.spec_from_file_location(alias, found.origin, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module  # transformers' decorators look their module up by name
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[alias]
        raise
    return module


class _Float64Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        source = importlib.util.decode_source(self.get_data(self.path))
        return compile(rewrite(source, self.path), self.path, "exec", dont_inherit=True)


def rewrite(source: str, path: str) -> str:
    """Return the source with `.float()` as `.double()` and float32 as float64.

    Raises CannotRunError unless every function in _CASTS has exactly the casts known of it.
    """
    spans = {
        node.name: range(node.lineno, (node.end_lineno or 0) + 1)
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    counts = dict.fromkeys(_CASTS, 0)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    lines = source.splitlines(keepends=True)
    for at in range(len(tokens) - 2, 0, -1):  # backwards, so that columns stay valid
        token, last, following = tokens[at], tokens[at - 1].string, tokens[at + 1].string
        if token.type != tokenize.NAME or last != ".":
            continue
        owner = next((n for n, span in spans.items() if token.start[0] in span), "")
        if token.string in _NARROW and owner in _CASTS:
            raise _changed(path, f"{owner} uses .{token.string}")
        if token.string not in ("float", "float32"):
            continue
        row, column = token.start
        new = "double" if token.string == "float" and following == "(" else "float64"
        line = lines[row - 1]
        lines[row - 1] = line[:column] + new + line[column + len(token.string) :]
        if owner in counts:
            counts[owner] += 1
    for owner, count in counts.items():
        if count != _CASTS[owner]:
            raise _changed(path, f"{owner} has {count} casts to float32, not {_CASTS[owner]}")
    return "".join(lines)


def _changed(path: str, what: str) -> CannotRunError:
    return CannotRunError(
        f"{path}: {what}: this transformers is not the 5.24 that transformers-f64 was written "
        "for. Install transformers==5.24.0, or leave transformers-f64 out."
    )
