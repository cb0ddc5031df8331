"""The command `mt-infer chat`."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from mt_files import quick_imports

from mt_infer.console import say

if TYPE_CHECKING:
    from mt_tokenizer import ChatTemplate

    from mt_infer.chat.speaker import Speaker
    from mt_infer.loading import Run


@dataclass(kw_only=True)
class Chat:
    """Talk with a model in the terminal; /help lists what you can say besides."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR|URL")]
    """The --out folder of an mt-train run, a folder of Hugging Face, a model of the hub in the
    local cache; or the address of a server with OpenAI's interface, such as http://127.0.0.1:8000,
    whose key is in the environment as MT_INFER_API_KEY."""
    system: str = ""
    """What the system says before the conversation."""
    name: str | None = None
    """Name of the model at a server; by default the first that the server lists."""
    step: int | None = None
    """The checkpoint of this step; by default the latest."""
    download: bool = False
    """Download a model of the hub that is not in the cache."""
    dtype: Literal["fp64", "fp32", "bf16", "fp16"] | None = None
    """Dtype of the computation; by default fp32 on a CPU and bf16 on a GPU."""
    context: int = 8192
    """Room for this many tokens of a conversation, up to the model's context."""

    def run_command(self) -> int:
        """Talk until the standard input ends."""
        with quick_imports():
            from mt_infer.chat.terminal import Terminal
            from mt_infer.client import is_url

        with ExitStack() as stack:
            speaker = self._remote() if is_url(self.model) else self._local(stack)
            Terminal(speaker, self.system).run()
        return 0

    def _remote(self) -> Speaker:
        from mt_infer.chat.speaker import RemoteSpeaker
        from mt_infer.client import KEY_VARIABLE, Client, ServerError

        local = {"step": self.step, "dtype": self.dtype, "download": self.download or None}
        for name, value in local.items():
            if value is not None:
                raise ValueError(f"--{name} is for a folder, and {self.model} is a server's")
        client = Client(url=self.model, key=os.environ.get(KEY_VARIABLE))
        served = client.models()
        if self.name is None and not served:
            raise ServerError(f"{self.model} lists no models; give one with --name")
        return RemoteSpeaker(client, self.name or served[0])

    def _local(self, stack: ExitStack) -> Speaker:
        from mt_parallel_state import ParallelLayout, ParallelState, detect_env, joined

        from mt_infer.chat.speaker import LocalSpeaker
        from mt_infer.engine.engine import Engine
        from mt_infer.engine.options import EngineOptions
        from mt_infer.loading import open_run
        from mt_infer.threads import use_threads

        if self.name is not None:
            raise ValueError(f"--name is for a server, and {self.model} is a folder")
        if self.context < 1:
            raise ValueError(f"--context {self.context}: use 1 or more")
        run = stack.enter_context(open_run(Path(self.model), self.step, download=self.download))
        template = self._template(run, stack)
        device = stack.enter_context(joined(detect_env()))
        state = stack.enter_context(ParallelState(ParallelLayout(), device=device))
        size = EngineOptions.block_size
        tokens = min(self.context, run.config.max_sequence_length)
        blocks = (2 if run.config.encoder_layers else 1) * -(-tokens // size)
        options = EngineOptions(blocks=blocks, max_batch=1, batch_invariant=False)
        engine = stack.enter_context(Engine.from_run(run, state, options, dtype=self.dtype))
        use_threads(engine.model)
        return LocalSpeaker(engine, run.tokenizer, template, room=tokens)

    def _template(self, run: Run, stack: ExitStack) -> ChatTemplate | None:
        """Return the model's chat template; None, and a message, without one."""
        from mt_tokenizer import ChatError, ChatTemplate

        try:
            return stack.enter_context(ChatTemplate.from_folder(run.chat_folder, run.tokenizer))
        except ChatError as error:
            say(f"{error}. Here the prompt is the conversation as plain text: User: ..., ...")
            return None
