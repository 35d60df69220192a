"""All faults: the FAULTS of every file beside this one, named `file: fault`."""

from importlib import import_module
from pathlib import Path

from faults.fault import Fault

FAULTS: dict[str, Fault] = {
    f"{path.stem}: {name}": fault
    for path in sorted(Path(__file__).parent.glob("*.py"))
    if not path.stem.startswith(("fault", "registry", "test_"))
    for name, fault in import_module(f"faults.{path.stem}").FAULTS.items()
}
