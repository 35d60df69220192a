"""The Qwen3.5 dense text model in MLX, written for checking.

Importing this package imports no framework: `config`, `headers` and `plan` work from text and
safetensors headers alone, the modules that compute import MLX.
"""

__version__ = "0.1.0"
