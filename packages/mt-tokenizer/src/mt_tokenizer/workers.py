"""Worker processes that encode text: each runs this module as a program, connected by pipes.

A message is one byte (its kind), the sizes of its parts, and the parts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from mt_tokenizer.error import TokenizerError
from mt_tokenizer.fast import FastEncoder, encode_flat
from mt_tokenizer.tokenizer import Tokenizer, from_bytes

_HEAD = struct.Struct("<BQQ")
_START, _TEXTS, _IDS, _ERROR = range(4)
_STOPPED = 5.0


class Worker:
    """One worker process. It ends with its input, so also when this process is killed."""

    def __init__(self, tokenizer: Tokenizer, *, fast: FastEncoder | None) -> None:
        # -P: do not import from the working directory.
        command = [sys.executable, "-P", "-m", "mt_tokenizer.workers"]
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter and our own module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._input = cast("BinaryIO", self._process.stdin)
        self._output = cast("BinaryIO", self._process.stdout)
        chosen = None if fast is None else [fast.library, fast.avoid]
        options = [tokenizer.eod_token, chosen]
        _send(self._input, _START, json.dumps(options).encode(), tokenizer.to_bytes())

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        """Return the concatenated ids of texts, and the count of each text.

        Raises:
            TokenizerError: The texts can't be encoded, or the process ended.
        """
        parts = [text.encode() for text in texts]
        sizes = np.fromiter(map(len, parts), np.int64, len(parts))
        try:
            _send(self._input, _TEXTS, sizes.tobytes(), b"".join(parts))
            kind, first, second = _receive(self._output)
        except (OSError, EOFError) as error:
            raise TokenizerError(
                f"a process that encodes text ended early ({error or 'it was killed'}); was "
                "there enough memory? Use fewer --workers"
            ) from None
        if kind == _ERROR:
            raise TokenizerError(second.decode())
        return np.frombuffer(second, np.int32), np.frombuffer(first, np.int64)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        with contextlib.suppress(OSError):
            self._input.close()
        self._process.wait(_STOPPED)
        self._output.close()


def _send(file: BinaryIO, kind: int, first: bytes, second: bytes) -> None:
    file.write(_HEAD.pack(kind, len(first), len(second)))
    file.write(first)
    file.write(second)
    file.flush()


def _receive(file: BinaryIO) -> tuple[int, bytes, bytes]:
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        raise EOFError
    kind, first, second = _HEAD.unpack(head)
    parts = file.read(first), file.read(second)
    if (len(parts[0]), len(parts[1])) != (first, second):
        raise EOFError
    return kind, *parts


def main() -> None:
    """Encode texts from standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    os.environ["RAYON_NUM_THREADS"] = "1"
    source, sink = cast("BinaryIO", sys.stdin.buffer), cast("BinaryIO", sys.stdout.buffer)
    _, options, content = _receive(source)
    eod, chosen = json.loads(options)
    tokenizer, fast = from_bytes(content, eod), None
    if chosen is not None:
        library, avoid = chosen
        fast = FastEncoder(tokenizer.engine, library=library, parallel=False, avoid=avoid)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            _, sizes, blob = _receive(source)
            ends = np.cumsum(np.frombuffer(sizes, np.int64)).tolist()
            starts = [0, *ends[:-1]]
            texts = [blob[a:b].decode() for a, b in zip(starts, ends, strict=True)]
            try:
                ids, counts = encode_flat(tokenizer, fast, texts)
            except TokenizerError as error:
                _send(sink, _ERROR, b"", str(error).encode())
            else:
                _send(sink, _IDS, counts.tobytes(), ids.astype(np.int32).tobytes())


if __name__ == "__main__":
    main()
