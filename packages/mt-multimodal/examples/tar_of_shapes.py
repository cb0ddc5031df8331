"""Index a tar of drawn images, and read its samples in a random order."""

import io
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from mt_multimodal import ImagePreprocessing, TarIndex
from PIL import Image, ImageDraw

COLOURS = ("red", "green", "blue")


def write_samples(path: Path, count: int) -> None:
    """Write images of discs, each beside its colour."""
    with tarfile.open(path, "w") as tar:
        for number in range(count):
            colour, file = COLOURS[number % len(COLOURS)], io.BytesIO()
            image = Image.new("RGB", (48, 32), "white")
            ImageDraw.Draw(image).ellipse((12, 4, 36, 28), fill=colour)
            image.save(file, "PNG")
            members = (f"{number:03}.png", file.getvalue()), (f"{number:03}.txt", colour.encode())
            for name, content in members:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def main() -> None:
    """Print the mean pixel values of a few samples."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "discs.tar"
        write_samples(path, 60)
        tar, images = TarIndex(path), ImagePreprocessing(size={"height": 16, "width": 16})
        for number in np.random.default_rng(0).permutation(tar.num_samples)[:5].tolist():
            members = tar.sample(number)
            colour = tar.read(members["txt"]).decode()
            pixels = images.pixels_of(tar.read(members["png"]), tar.where(members["png"]))
            red, green, blue = pixels.mean(axis=(1, 2))
            print(f"{tar.key(number)} {colour:5}: {red:+.2f} {green:+.2f} {blue:+.2f}")


if __name__ == "__main__":
    main()
