"""Images of requests: `data:` URLs, decoded in a separate process with limits.

Image decoders are large programs in C, and the bytes come from anybody. `python -m` with this
module reads one image from standard input and writes its size and its pixels.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import resource
import struct
import sys
import warnings
from contextlib import suppress

from mt_files import UserError

from mt_infer.backends.backend import Picture
from mt_infer.forms.refusal import FormError

_MOST_BYTES = 4 << 20
_MOST_PIXELS = 1 << 24
_MEMORY_BYTES = 1 << 30
_SECONDS = 5
_SIZE = struct.Struct("<II")
_NO_LIBRARY = 3


async def picture_of(url: str, param: str) -> Picture:
    """Return the image of a `data:` URL.

    Args:
        url: The URL.
        param: Path of its field.

    Raises:
        FormError: The URL is no `data:` URL, or its content is no image within the limits.
    """
    head, comma, text = url.partition(",")
    kind, _, encoding = head.partition(";")
    if not kind.startswith("data:") or not comma:
        raise _refusal(param, "nothing is fetched; send the image as data:image/png;base64,...")
    if not kind.startswith("data:image/") or encoding != "base64":
        raise _refusal(param, f"{head[:60]!r} is not served; use data:image/png;base64,...")
    if len(text) > _MOST_BYTES * 4 // 3 + 4:
        raise _refusal(param, f"the image has more than {_MOST_BYTES} bytes; make it smaller")
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refusal(param, f"the image is not base64: {error}") from None
    # -P: do not import from the working directory.
    command = sys.executable, "-P", "-m", "mt_infer.prompts.pictures"
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
    process = await asyncio.create_subprocess_exec(*command, **pipes)
    try:
        answer, said = await asyncio.wait_for(process.communicate(content), 2 * _SECONDS)
    except TimeoutError:
        raise _refusal(param, f"the image takes more than {_SECONDS} s; make it smaller") from None
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    if process.returncode == _NO_LIBRARY:
        raise _refusal(param, "images need: pip install 'mt-infer[images]'")
    if process.returncode != 0:
        reason = said.decode(errors="replace")[:200].strip() or "it goes beyond its limits"
        raise _refusal(param, f"the image can't be read: {reason}")
    width, height = _SIZE.unpack_from(answer)
    return Picture(width=width, height=height, rgb=answer[_SIZE.size :])


def main() -> None:
    """Decode the image on standard input."""
    try:
        import PIL.Image  # noqa: F401 - before the limits
        from mt_multimodal import ImageLimits, decode_image
    except ImportError:
        sys.exit(_NO_LIBRARY)
    for kind, most in ((resource.RLIMIT_AS, _MEMORY_BYTES), (resource.RLIMIT_CPU, _SECONDS)):
        resource.setrlimit(kind, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    warnings.simplefilter("ignore")
    limits = ImageLimits(pixels=_MOST_PIXELS, bytes=_MOST_BYTES)
    try:
        image = decode_image(sys.stdin.buffer.read(), "image", limits)
    except UserError as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(_SIZE.pack(*image.size) + image.tobytes())


def _refusal(param: str, text: str) -> FormError:
    return FormError(param, text, code="invalid_image_url")


if __name__ == "__main__":
    main()
