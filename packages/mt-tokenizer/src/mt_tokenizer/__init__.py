"""Tokenizers: text to token ids and back, for training and for serving."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_tokenizer.error import TokenizerError as TokenizerError
from mt_tokenizer.error import TokenizerFileError as TokenizerFileError

if TYPE_CHECKING:
    from mt_tokenizer.chat import ChatError as ChatError
    from mt_tokenizer.chat import ChatLimits as ChatLimits
    from mt_tokenizer.chat import ChatTemplate as ChatTemplate
    from mt_tokenizer.encoder import Encoder as Encoder
    from mt_tokenizer.tokenizer import Tokenizer as Tokenizer
    from mt_tokenizer.tokenizer import check_text as check_text
    from mt_tokenizer.tokenizer import load_tokenizer as load_tokenizer
    from mt_tokenizer.training import DEFAULT_SPECIAL as DEFAULT_SPECIAL
    from mt_tokenizer.training import train_tokenizer as train_tokenizer
else:
    # Resolved at first use, so that an import stays light.
    __getattr__ = resolve_later(__name__)
