"""Forwards of several batches that wait for each other before every stage of a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mt_quant.error import CalibrationError


class _CancelledError(BaseException):
    """Ends the forward of a batch from inside; a BaseException, so that no model catches it."""


class _Forward(threading.Thread):
    """The forward of one batch, in a thread that takes turns with the walk."""

    def __init__(self, run: Callable[[], object], settings: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.at: str | None = None
        self.error: BaseException | None = None
        self.cancelled = False
        self._run, self._settings = run, settings
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)

    def run(self) -> None:
        self._go.acquire()
        try:
            # Devices and grad mode are set by thread.
            self._settings()
            with torch.no_grad():
                if not self.cancelled:
                    self._run()
        except _CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again in `resume`
            self.error = error
        self.at = None
        self._stopped.release()

    def stop_at(self, name: str) -> None:
        """Wait, in the forward's thread, for the next `resume`."""
        self.at = name
        self._stopped.release()
        self._go.acquire()
        if self.cancelled:
            raise _CancelledError

    def resume(self) -> None:
        """Let the forward run, from the walk's thread, until it stops again or ends."""
        self._go.release()
        self._stopped.acquire()
        if self.error is not None:
            raise self.error


class Walk:
    """Runs all batches through a model stage by stage, in the order of the model's calls.

    Each batch's forward has a thread that stops before each stage, so the walk assumes nothing
    about the connections between stages. One thread runs at a time. Between stages, memory holds
    only what the forwards hold: the activations at one place of the model.

    Args:
        model: The model to call with each batch.
        stages: Modules by name; their forwards are wrapped during the walk.
        batches: Each a tensor, positional arguments (tuple, list) or named ones (mapping).
    """

    def __init__(
        self, model: nn.Module, stages: Mapping[str, nn.Module], batches: Sequence[Any]
    ) -> None:
        self._model, self._stages = model, stages
        self._made: dict[str, nn.Module] = {}
        self._before: dict[str, Any] = {}
        self._looking = False
        self._observe: Callable[[Tensor], None] | None = None
        settings = _thread_settings()
        self._forwards = [_Forward(call_of(model, batch), settings) for batch in batches]

    @contextmanager
    def running(self) -> Iterator[Iterator[str]]:
        """Yield the names of stages in order; every batch waits before the named stage.

        Raises:
            CalibrationError: Batches call stages in different orders.
        """
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        for name, module in self._stages.items():
            if "forward" in vars(module):
                self._before[name] = module.forward
            module.forward = self._stopping(name, module, module.forward)
        for forward in self._forwards:
            forward.start()
        try:
            yield self._steps()
        finally:
            # A thread that still waits is woken to raise inside its forward, so that it ends.
            for forward in self._forwards:
                if forward.is_alive():
                    forward.cancelled, forward.error = True, None
                    forward.resume()
                forward.join()
            for name in self._stages:
                self._release(name)
            for module, training in modes.items():
                module.training = training

    def look(self, observe: Callable[[Tensor], None] | None = None) -> None:
        """Run the current stage for every batch; all batches still wait before it afterwards.

        Args:
            observe: Called with the stage's first input and its output. Hooks of modules inside
                the stage are called as usual.
        """
        # Each forward runs the stage on copies and stops at the same stage a second time.
        self._looking, self._observe = True, observe
        for forward in self._forwards:
            forward.resume()
        self._looking = False

    def put(self, name: str, module: nn.Module) -> None:
        """Let the waiting batches call `module` instead of a stage."""
        self._made[name] = module

    def _steps(self) -> Iterator[str]:
        while True:
            for forward in self._forwards:
                forward.resume()
            places = {forward.at for forward in self._forwards}
            if len(places) > 1:
                listed = ", ".join(sorted(str(place) for place in places))
                raise CalibrationError(
                    f"batches call the layers of the model in different orders ({listed}); "
                    "calibrate with batches of one kind"
                )
            (place,) = places
            if place is None:
                return
            yield place
            # All batches have passed this place once; later calls of the stage don't stop.
            self._release(place)

    def _stopping(
        self, name: str, module: nn.Module, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        def stop(*args: Any, **kwargs: Any) -> Any:
            thread = threading.current_thread()
            if not isinstance(thread, _Forward):  # a call from outside the walk
                return forward(*args, **kwargs)
            thread.stop_at(name)
            if self._looking:
                # A stage may change its arguments in place, so it gets copies.
                copies = tree_map_only(Tensor, Tensor.clone, (args, kwargs))
                forward(*copies[0], **copies[1])  # for its hooks; no later stage reads it
                if self._observe is not None:
                    self._observe(copies[0][0])
                thread.stop_at(name)
            made = self._made.get(name)
            return (forward if made is None else made)(*args, **kwargs)

        return stop

    def _release(self, name: str) -> None:
        """Restore the forward of a stage."""
        module = self._stages[name]
        vars(module).pop("forward", None)
        if name in self._before:
            module.forward = self._before[name]


def call_of(model: nn.Module, batch: Any) -> Callable[[], object]:
    """Return a call of the model with a batch: a mapping of arguments, a list of them, or one."""
    if isinstance(batch, Mapping):
        return lambda: model(**batch)
    if isinstance(batch, tuple | list):
        return lambda: model(*batch)
    return lambda: model(batch)


def _thread_settings() -> Callable[[], None]:
    """Return a function that sets this thread's device in a new thread."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return lambda: None
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)
