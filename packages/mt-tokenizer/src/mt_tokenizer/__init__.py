"""Tokenizers: text to token ids and back, for training and for serving."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_tokenizer.error import TokenizerError as TokenizerError
from mt_tokenizer.error import TokenizerFileError as TokenizerFileError

if TYPE_CHECKING:
    from mt_tokenizer.answer import AnswerEvent as AnswerEvent
    from mt_tokenizer.answer import CallArguments as CallArguments
    from mt_tokenizer.answer import CallBegin as CallBegin
    from mt_tokenizer.answer import CallEnd as CallEnd
    from mt_tokenizer.answer import ChatAnswer as ChatAnswer
    from mt_tokenizer.answer import Content as Content
    from mt_tokenizer.answer import Reasoning as Reasoning
    from mt_tokenizer.answer import ToolCall as ToolCall
    from mt_tokenizer.answer_parser import AnswerForm as AnswerForm
    from mt_tokenizer.answer_parser import AnswerParser as AnswerParser
    from mt_tokenizer.answer_parser import parse_answer as parse_answer
    from mt_tokenizer.chat import ChatLimits as ChatLimits
    from mt_tokenizer.chat import ChatTemplate as ChatTemplate
    from mt_tokenizer.chat import read_template as read_template
    from mt_tokenizer.chat import with_parsed_arguments as with_parsed_arguments
    from mt_tokenizer.chat_text import ChatText as ChatText
    from mt_tokenizer.encoder import Encoder as Encoder
    from mt_tokenizer.tokenizer import Tokenizer as Tokenizer
    from mt_tokenizer.tokenizer import check_text as check_text
    from mt_tokenizer.tokenizer import load_tokenizer as load_tokenizer
    from mt_tokenizer.training import DEFAULT_SPECIAL as DEFAULT_SPECIAL
    from mt_tokenizer.training import train_tokenizer as train_tokenizer
    from mt_tokenizer.turns import ChatError as ChatError
    from mt_tokenizer.turns import Rendered as Rendered
else:
    # Resolved at first use, so that an import stays light.
    __getattr__ = resolve_later(__name__)
