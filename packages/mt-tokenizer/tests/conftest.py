"""Small tokenizers of every kind."""

import io
import sys
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parent))  # test_turns has the templates of chat_templates

TEXTS = ["the quick brown fox jumps over the lazy dog"] * 20 + ["naïve café, 日本語 and 🎉!"] * 5
SIGN = "\u2581"


def word_piece():
    engine = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    engine.normalizer = normalizers.BertNormalizer(lowercase=True)
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    engine.train_from_iterator(
        TEXTS,
        trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False),
    )
    return engine


def unigram():
    engine = tokenizers.Tokenizer(models.Unigram())
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=100, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    engine.train_from_iterator(TEXTS, trainer)
    return engine


def llama():
    """BPE with byte fallback and no pre-tokenizer, as converted from sentencepiece."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{value:02X}>": 3 + value for value in range(256)}
    merges = []
    for word in ("the", "fox", "dog"):
        for character in SIGN + word:
            vocabulary.setdefault(character, len(vocabulary))
        joined = SIGN
        for character in word:
            merges.append((joined, character))
            joined += character
            vocabulary.setdefault(joined, len(vocabulary))
    model = models.BPE(
        vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    engine = tokenizers.Tokenizer(model)
    engine.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SIGN), normalizers.Replace(" ", SIGN)]
    )
    engine.decoder = decoders.Sequence(
        [
            decoders.Replace(SIGN, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    engine.add_special_tokens(["<unk>", "<s>", "</s>"])
    return engine


def sentencepiece_model(**options):
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=content,
        minloglevel=9,
        **{"vocab_size": 340, "byte_fallback": True, "hard_vocab_limit": False, **options},
    )
    return content.getvalue()


KINDS = {"wordpiece": word_piece, "unigram": unigram, "llama": llama}


@pytest.fixture(scope="session")
def texts():
    """What the tokenizers are trained on."""
    return TEXTS


@pytest.fixture(scope="session")
def make_engine():
    """Gives a `tokenizers.Tokenizer` of a kind: wordpiece, unigram or llama."""
    return lambda kind: KINDS[kind]()


@pytest.fixture(scope="session")
def make_model():
    """Gives the content of a sentencepiece `.model`."""
    return sentencepiece_model
