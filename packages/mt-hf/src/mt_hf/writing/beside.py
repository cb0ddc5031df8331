"""Files beside the weights, with which transformers reads and ends texts as a run does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mt_files import read_bytes, read_json
from mt_model import ImageInputConfig, ModelConfig, StackConfig

from mt_hf.reading.end_tokens import GENERATION, read_end_tokens
from mt_hf.reading.files import MAX_JSON, TOKENIZERS, infinity, root_of

if TYPE_CHECKING:
    from mt_tokenizer import Tokenizer


_OF_RUN = "chat_template.jinja", "preprocessor_config.json"
_TOKENS, _PROCESSOR = "tokenizer_config.json", "processor_config.json"


def chat_files(run: Path) -> dict[str, bytes]:
    """Return the chat template and the preprocessor of images of a run's conversations, if any.

    Args:
        run: Folder of the run.

    Raises:
        FileError: A file can't be read.
    """
    return {
        name: read_bytes(run / name, limit=MAX_JSON) for name in _OF_RUN if (run / name).is_file()
    }


def files_beside(
    tokenizer: Tokenizer, like: Path | None, run: Path, config: StackConfig
) -> dict[str, bytes]:
    """Return the files that replace or complete those of `like`, for a model with a tokenizer.

    A text ends at the tokenizer's end-of-document token and at the end tokens of `like`; both stand
    in generation_config.json. The tokenizer is written unless `like` has one, and so is the number
    of tokens that an image has, for the processor of a model that takes images.

    Args:
        tokenizer: Tokenizer of the training.
        like: Folder of the files to copy; None without such a folder.
        run: Folder of the run, which has a chat template if it learnt conversations.
        config: Config of the model.

    Returns:
        The content of the files by name.

    Raises:
        ExchangeError: `eos_token_id` of `like` holds no ids.
        FileError: A file of `like` can't be read.
    """
    files = chat_files(run)
    images = config.images if isinstance(config, ModelConfig) else None
    if images is not None and (like is None or not (like / _PROCESSOR).exists()):
        files[_PROCESSOR] = _json(_processor(images, tokenizer))
    known = frozenset[int]() if like is None else read_end_tokens(like)
    ends = known | {tokenizer.eod_id}
    if ends != known:
        path = None if like is None else like / GENERATION
        given: Any = {}
        if path is not None and path.exists():
            given = read_json(path, limit=MAX_JSON, within=root_of(path.parent), constant=infinity)
        files[GENERATION] = _json({**given, "eos_token_id": ids_of(ends)})
    if like is not None and any((like / name).exists() for name in TOKENIZERS):
        return files
    content = tokenizer.to_bytes()
    if tokenizer.suffix != ".json":
        return files | {"tokenizer.model": content}
    tokens = read_json(run / _TOKENS, limit=MAX_JSON) if (run / _TOKENS).is_file() else {}
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.eod_token}
    return files | {"tokenizer.json": content, _TOKENS: _json({**tokens, **own})}


def _processor(images: ImageInputConfig, tokenizer: Tokenizer) -> dict[str, object]:
    """Return what LlavaProcessor of transformers must know of the model."""
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    return {
        "processor_class": "LlavaProcessor",
        "image_token": names.get(images.token_id, "<image>"),
        "patch_size": images.tower.patch_size[0],
        "num_additional_image_tokens": int(images.tower.class_token),
        "vision_feature_select_strategy": "default" if images.drop_first else "full",
    }


def ids_of(ends: frozenset[int]) -> int | list[int]:
    """Return end tokens as `eos_token_id` states them: one id, or a sorted list."""
    return next(iter(ends)) if len(ends) == 1 else sorted(ends)


def _json(content: Mapping[str, object]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
