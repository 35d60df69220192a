"""Where a model given on the command line lies: a local folder first, then the hub."""

from pathlib import Path

from qwen35.errors import CannotRunError


def is_hub_id(name: str) -> bool:
    """Return whether a name is a hub id and no local folder."""
    path = Path(name)
    return not (path.exists() or path.is_absolute() or name.startswith(".") or name.count("/") != 1)


def model_folder(name: str) -> Path:
    """Return the folder of a local checkpoint, or of a hub id, fetched if it is not there yet."""
    if not is_hub_id(name):
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "model*.safetensors"]))
    except Exception as error:
        raise CannotRunError(
            f"{name}: no such folder, and the hub did not give it ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no reason given'}). Give a local "
            "folder, or check the network, HF_HUB_OFFLINE and the name."
        ) from None
