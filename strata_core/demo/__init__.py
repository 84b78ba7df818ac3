"""The built-in model: a small trained mixture-of-experts model that ships with the package.

Qwen3-MoE, 6 layers of 32 experts of which 4 are asked per token, 21 million parameters in Q4_0,
trained on the King James Bible (see NOTICE).
"""

from __future__ import annotations

from pathlib import Path

NAME = "demo"
"""What stands for the built-in model where a model is named."""

PATH = Path(__file__).with_name("kjv-Q4_0.gguf")
"""Its file. The package must be installed as files (the usual way), not inside a zip archive."""
