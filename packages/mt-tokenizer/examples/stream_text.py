"""A text token by token, as a stream shows it: whole characters, though tokens cut them.

Run: python stream_text.py
"""

import codecs

import mt_tokenizer


def main() -> None:
    text = "naïve café, 日本語 and 🎉"
    tokenizer = mt_tokenizer.train_tokenizer([text], vocab_size=260)
    decoder = codecs.getincrementaldecoder("utf-8")()
    shown = ""
    for token in tokenizer.encode(text):
        new = decoder.decode(tokenizer.decode_bytes([token]))
        print(f"{token:4d} {new!r}")
        shown += new
    assert shown == text


if __name__ == "__main__":
    main()
