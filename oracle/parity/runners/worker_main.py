"""The far end of a worker: runs mlx-lm in a process, and mostly an environment, of its own.

Started as a script, `worker_main.py {"packages": {name: folder}, "mlx_lm": folder or null}`. Reads
one request a line from standard input and writes one answer a line to standard output, both JSON;
tensors travel in safetensors files. Imports nothing but the standard library until it is told where
its packages lie.
"""

import importlib.util
import json
import os
import platform
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

PROTOCOL = 1


def main(words: list[str]) -> None:
    """Answer requests until standard input ends."""
    requests, answers = _own_streams()
    setup = json.loads(words[0])
    # As a script this file's folder comes first on the path, and its mlx_lm.py is not the package.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != here]
    if setup["mlx_lm"]:
        sys.path.insert(0, setup["mlx_lm"])
    for name, folder in setup["packages"].items():
        _adopt(name, folder)
    session = _Session()
    operations = {
        "load": session.load,
        "run": session.run,
        "states": session.states,
        "sanitize": sanitize,
    }
    _answer(answers, hello, {})
    for line in requests:
        request = json.loads(line)
        _answer(answers, operations[request["op"]], request)


def _own_streams() -> tuple[IO[str], IO[str]]:
    """Keep the protocol's two streams, and let what libraries print go to standard error."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def _adopt(name: str, folder: str) -> None:
    """Make one package importable without its neighbours: those are of another environment."""
    file = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[folder])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _answer(
    stream: IO[str], operation: Callable[[dict[str, Any]], dict[str, Any]], request: dict[str, Any]
) -> None:
    try:
        answer = {"ok": True} | operation(request)
    except Exception as error:
        kinds = {"InputError": "input", "CannotRunError": "cannot run"}
        kind = next((kinds[k.__name__] for k in type(error).__mro__ if k.__name__ in kinds), None)
        text = str(error)
        if kind is None:
            at = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error} ({at.filename}, line {at.lineno})"
        answer = {"error": text, "kind": kind or "failed"}
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


def hello(request: dict[str, Any]) -> dict[str, Any]:
    """Import mlx-lm and say what it is."""
    import importlib.metadata

    import mlx_lm

    return {
        "protocol": PROTOCOL,
        "mlx_lm": mlx_lm.__version__,
        "file": os.path.abspath(mlx_lm.__file__),
        "mlx": importlib.metadata.version("mlx"),
        "python": platform.python_version(),
    }


class _Session:
    """The checkpoint loaded last."""

    def __init__(self) -> None:
        self._runner: Any = None

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Load a checkpoint: `checkpoint` (folder), `dtype` and `device`."""
        import mlx.core as mx

        from parity.runners.mlx_lm import MlxLmRunner
        from qwen35.headers import open_checkpoint

        mx.set_default_device(getattr(mx, request["device"]))
        self._runner = None  # one checkpoint's weights at a time
        self._runner = MlxLmRunner(open_checkpoint(request["checkpoint"]), request["dtype"])
        return {"layer_types": self._runner.layer_types}

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run `program` on it, fed from the file `feed` or null; `out` gets one file a forward."""
        from parity import safetensors_file
        from parity.program import parse
        from parity.trace import Feed

        feed: Feed | None = None
        if request["feed"]:
            fed = safetensors_file.read(Path(request["feed"]))
            feed = lambda forward, layer: fed[f"{forward}.{layer}"]
        trace = self._runner.run(parse(request["program"]), feed)
        forwards: dict[int, dict[str, Any]] = {}
        for (forward, tap), value in trace.tensors.items():
            forwards.setdefault(forward, {})[tap] = value
        for forward, taps in forwards.items():
            safetensors_file.write(Path(request["out"], f"{forward}.safetensors"), taps)
        return {"info": trace.info, "forwards": sorted(forwards)}

    def states(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run `program`; `out` gets one file a moment, in which row r's state n is `r.n`.

        The answer has the number of `rows` of each moment.
        """
        from parity import safetensors_file
        from parity.program import parse

        found = self._runner.states(parse(request["program"]))
        for moment, rows in enumerate(found.moments):
            states = {f"{r}.{n}": value for r, row in enumerate(rows) for n, value in row.items()}
            safetensors_file.write(Path(request["out"], f"{moment}.safetensors"), states)
        return {"info": found.info, "rows": [len(rows) for rows in found.moments]}


def sanitize(request: dict[str, Any]) -> dict[str, Any]:
    """Apply mlx-lm's own sanitize to each of `maps`, in one process.

    A map has `tied` and `names`; the value of name n of map m is tensor `m.n` of the file `values`.
    The answer has the names of each map in their order; the values are tensors `m.n` of `out`.
    """
    import mlx.core as mx
    from mlx_lm.models import qwen3_5

    from parity import safetensors_file
    from parity.runners.mlx_arrays import to_numpy

    def model(tied: bool) -> qwen3_5.Model:
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
        heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
        linear = {f"linear_num_{kind}_heads": 1 for kind in ("key", "value")}
        text = {**sizes, **heads, **linear, "tie_word_embeddings": tied}
        config = {"model_type": "qwen3_5", "text_config": text}
        return qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))

    models = {tied: model(tied) for tied in (False, True)}
    values = mx.load(request["values"], format="safetensors")
    assert isinstance(values, dict)
    results: dict[str, Any] = {}
    names = []
    for m, each in enumerate(request["maps"]):
        weights = {name: values[f"{m}.{name}"] for name in each["names"]}
        out = models[each["tied"]].sanitize(weights)
        mx.eval(list(out.values()))
        names.append(list(out))
        results |= {f"{m}.{name}": to_numpy(value) for name, value in out.items()}
    safetensors_file.write(Path(request["out"]), results)
    return {"names": names}


if __name__ == "__main__":
    main(sys.argv[1:])
