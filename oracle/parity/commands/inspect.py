"""`parity inspect`: whose convention a checkpoint is in, by loaders' rules and by its values."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from parity.commands import EXIT_CODES
from parity.commands.models import is_hub_id, model_folder
from parity.commands.outputs import check_outputs
from parity.rules import NAMES
from parity.shown import shown
from parity.whole_file import replace
from qwen35.errors import InputError


def add(commands: Any) -> None:
    """Add the command's parser."""
    inspect = commands.add_parser(
        "inspect",
        help="say whose convention a checkpoint is in, and which loaders would misread it",
        description="Reads headers, and the first values of the norm gains. Exits with 1 when "
        "loaders disagree or the values contradict the chosen rule.",
    )
    inspect.add_argument("model", metavar="MODEL", help="checkpoint folder or hub id")
    inspect.add_argument(
        "--rule", choices=NAMES, default="mlx-lm-0.32", help="the rule to hold the values to"
    )
    inspect.add_argument(
        "--evidence",
        action=argparse.BooleanOptionalAction,
        help="read the norm gains' values, a few hundred bytes each (default: for local folders)",
    )
    inspect.add_argument(
        "--repair", metavar="OUT", help="write a corrected copy into the new folder OUT"
    )
    inspect.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const="-",
        help="write everything as JSON; without FILE, print it instead of the text",
    )
    inspect.set_defaults(function=_inspect, failed=_write_not_run)


def _inspect(options: argparse.Namespace, command: str) -> int:
    from parity.inspection import inspect, to_json
    from qwen35.headers import open_checkpoint

    _check_output(options)
    evidence = options.evidence
    if evidence is None:
        evidence = not is_hub_id(options.model)
    if options.repair is not None and not evidence:
        raise InputError("--repair goes by the gains' values. Drop --no-evidence.")
    found = inspect(open_checkpoint(model_folder(options.model)), options.rule, evidence)
    value = to_json(found, command)
    if options.json != "-":
        _print(_text(value))
    if options.repair is not None:
        from parity.repair import repair

        done = repair(found, Path(options.repair))
        value["repair"] = done.to_json()
        value["exit"] = EXIT_CODES["holds"]
        if options.json != "-":
            _print(str(done))
    _write(options, value)
    return value["exit"]


def _check_output(options: argparse.Namespace) -> None:
    if options.json and options.json != "-":
        model = options.model if options.model and not is_hub_id(options.model) else None
        check_outputs({"--json": options.json}, [model])


def _write(options: argparse.Namespace, value: dict[str, Any]) -> None:
    if options.json is None:
        return
    text = json.dumps(value, indent=1, ensure_ascii=False)
    if options.json == "-":
        _print(text)
    else:  # a lone surrogate becomes the JSON escape that it came from
        replace(Path(options.json), text.encode("utf-8", "backslashreplace").decode() + "\n")


def _print(text: str) -> None:
    """Print, escaping what the terminal's encoding lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:  # `| head` has seen enough; the exit code is still the verdict's
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write_not_run(options: argparse.Namespace, command: str, message: str) -> None:
    """Leave no older result behind for a bot to read."""
    if options.json:
        _check_output(options)
        value = {"schema": 1, "verdict": "not-run", "repeat": command, "error": message}
        _write(options, value)


def _text(value: dict[str, Any]) -> str:
    lines = [
        f"{value['model']}: {value['verdict']}",
        value["sentence"],
        "",
        f"  names            {value['generation']}",
        f"  conv weights     {value['conv_layout']['layout']}",
        f"  gains            {value['evidence']['says']} ({value['evidence']['because']})",
        f"  quantization     {_quantization(value['quantization'])}",
        f"  draft head       {_part(value['draft_head'])}",
        f"  vision           {_part(value['vision'])}",
        f"  size             {_size(value)}",
    ]
    for reader in value["missing"]:
        lines.append(f"  {reader:<17}{_names(value, reader)}")
    for wrong in value["wrong_shapes"][:3]:
        lines.append(
            f"  wrong shape      {shown(wrong['name'])} is {wrong['shape']}, {wrong['due']} is due"
        )
    if unread := value["unknown_config_keys"]:
        lines.append(f"  {'config.json':<17}{_unread(unread)}")
    lines += ["", f"  {'rule':<18}{'gains':<7}{'become':<8}{'loaded again':<16}because"]
    for name, rule in value["rules"].items():
        act = {True: "add 1", False: "keep", None: "?" if rule["loads"] else "-"}[rule["shift"]]
        lines.append(
            f"  {name:<18}{act:<7}{rule['gains_become'] or '-':<8}"
            f"{_again(rule['idempotent']):<16}{shown(rule['because'])}"
        )
    if not value["agree"]:
        lines += ["", "  disagreements (x)"]
        names = list(value["rules"])
        for name in names:
            row = value["disagreements"][name]
            marks = " ".join({True: "x", False: "·", None: "-"}[row[other]] for other in names)
            lines.append(f"  {name:<18}{marks}")
    return "\n".join(lines)


def _again(idempotent: dict[str, bool | None]) -> str:
    if idempotent["loaded_again"] is None:
        return "-"
    if not idempotent["loaded_again"]:
        return "DIFFERS"
    return "not with mtp.*" if idempotent["kept_draft_head"] is False else "same"


def _quantization(value: dict[str, Any]) -> str:
    if value["global"] is None and not value["modules"] and not value["quantized_modules"]:
        return "none"
    whole = ", ".join(f"{k} {v}" for k, v in (value["global"] or {}).items())
    text = f"{whole or 'no global entry'}; {value['quantized_modules']} modules"
    if value["modules"]:
        text += f", {len(value['modules'])} with an entry of their own"
    return text + (f"; {value['problem']}" if value["problem"] else "")


def _part(value: dict[str, Any]) -> str:
    if not value["tensors"]:
        return "none"
    return f"{value['tensors']} tensors, {value['bytes']:,} bytes, {shown(value['names'][0])} first"


def _size(value: dict[str, Any]) -> str:
    counts, taken = value["parameters"], value["bytes"]
    parts = ", ".join(f"{part} {count:,}" for part, count in counts.items() if part != "total")
    files = f"{value['files']} file{'s' * (value['files'] != 1)}"
    return f"{counts['total']:,} parameters, {taken['total']:,} bytes in {files} ({parts})"


def _unread(keys: list[str]) -> str:
    shown_keys = ", ".join(shown(key) for key in keys[:5])
    more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
    return f"keys that nothing here reads: {shown_keys}{more}"


def _names(value: dict[str, Any], reader: str) -> str:
    missing, unexpected = value["missing"][reader], value["unexpected"][reader]
    refused = value["refused"].get(reader)
    if missing is None:
        return shown(refused or value["untold"][reader], 160)
    if refused:
        return f"refuses it: {refused}"
    if not missing and not unexpected:
        return "all names there, none unexpected"
    return "; ".join(
        f"{len(names)} {what} ({shown(names[0])} first)"
        for what, names in (("missing", missing), ("unexpected", unexpected))
        if names
    )
