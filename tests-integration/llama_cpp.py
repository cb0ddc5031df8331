"""Send requests to llama.cpp, which the wheel xllamacpp brings into this process.

The standard input is JSON: a list of files, each with its requests, pairs of a route of llama.cpp's
server and a body. The last line of the standard output is JSON: the answers.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from importlib import import_module
from typing import Any


def server_of(path: str) -> Any:
    """Start llama.cpp's server of a model in full precision, on loopback."""
    xllamacpp = import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = path, 512, 1
    params.warmup, params.fit_params, params.no_extra_bufts = False, False, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.verbosity, params.use_jinja = 0, True
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return xllamacpp.Server(params)


def answer(address: str, route: str, body: object) -> Any:
    """Send a request and return the answer."""
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(address + route, json.dumps(body).encode(), kind)  # noqa: S310 - loopback
    with urllib.request.urlopen(request) as response:  # noqa: S310
        return json.load(response)


def main() -> None:
    """Answer the requests of the standard input."""
    answers = []
    for path, requests in json.load(sys.stdin):
        server = server_of(path)
        answers.append([answer(server.listening_address, *each) for each in requests])
        del server
    sys.stdout.write(f"{json.dumps(answers)}\n")


if __name__ == "__main__":
    main()
