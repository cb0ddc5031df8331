"""Image tokens: one for each feature of an image, without labels, never cut."""

from __future__ import annotations

from mt_tokenizer import Rendered


def expanded(found: Rendered, image_token: int, count: int) -> Rendered:
    """Return a conversation that repeats each image token `count` times, without a loss.

    Args:
        found: The conversation with one image token for each image.
        image_token: Id of the image token.
        count: Number of tokens of an image.
    """
    ids: list[int] = []
    trained: list[float] = []
    for token, weight in zip(found.ids, found.trained, strict=True):
        times = count if token == image_token else 1
        ids += [token] * times
        trained += [0.0 if token == image_token else weight] * times
    return Rendered(ids, trained)


def fitted(found: Rendered, image_token: int, count: int, size: int | None) -> Rendered:
    """Return a conversation cut to a row, with whole images, and without images at its end.

    The last token of a conversation is no input, so an image at the end would lose one token. No
    label follows such an image either.

    Args:
        found: The expanded conversation.
        image_token: Id of the image token.
        count: Number of tokens of an image.
        size: Number of tokens in a row; with None only images at the end are removed.
    """
    end = len(found.ids)
    if size is not None:
        end = min(end, size + 1)
    images = found.ids[:end].count(image_token)
    while end and found.ids[end - 1] == image_token:
        taken = images % count or count  # the last one may have been cut
        end, images = end - taken, images - taken
    return Rendered(found.ids[:end], found.trained[:end])
