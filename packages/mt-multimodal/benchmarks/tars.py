"""Samples of a tar and their pixel values beside webdataset and plain pillow with numpy.

    OMP_NUM_THREADS=1 python tars.py [--rounds 7] [--samples 2000] [--out tars.json]

Random samples of a `TarIndex` beside webdataset's in sequence, CPU-seconds; pixel values in one
thread beside pillow and numpy, CPU-seconds; two decode threads beside one, seconds on the clock,
for which two cores have to be free; and the opening of an index of a million members. Above 1
mt-multimodal is faster.
"""

import argparse
import io
import json
import os
import platform
import tarfile
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402 - the number of threads comes first
import PIL  # noqa: E402
import webdataset  # noqa: E402
from mt_multimodal import ImagePreprocessing, TarIndex  # noqa: E402
from PIL import Image  # noqa: E402

MILLION = 1_000_000
SIDE, MEAN, STD = 336, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def photograph(draw: np.random.Generator) -> bytes:
    """A JPEG of 640 x 480 with as many details as a photograph, some 90 KB."""
    image = np.zeros((480, 640, 3))
    for size in (4, 16, 64, 240):
        coarse = draw.integers(0, 256, (size, size, 3), np.uint8)
        image += np.asarray(Image.fromarray(coarse).resize((640, 480), Image.Resampling.BICUBIC))
    file = io.BytesIO()
    Image.fromarray((image / 4).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def write_tar(path: Path, count: int) -> list[bytes]:
    """Write samples of an image and a text, with 50 different images; return the images."""
    draw = np.random.default_rng(0)
    images = [photograph(draw) for _ in range(50)]
    with tarfile.open(path, "w") as tar:
        for number in range(count):
            text = json.dumps({"prompt": "<image>\nq", "completion": f"{number}"}).encode()
            members = {"jpg": images[number % len(images)], "json": text}
            for kind, content in members.items():
                member = tarfile.TarInfo(f"{number:07}.{kind}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return images


def write_many(path: Path) -> None:
    """Write a tar of a million members of one byte."""
    head = bytearray(tarfile.TarInfo("0000000.txt").tobuf())
    head[124:136] = b"%011o\0" % 1
    rest = sum(head) - sum(head[:7]) - sum(head[148:156]) + 8 * ord(" ")
    with path.open("wb") as file:
        for number in range(MILLION):
            name = b"%07d" % number
            head[:7], head[148:156] = name, b"%06o\0 " % (rest + sum(name))
            file.write(head + b"x" + bytes(511))


def in_sequence(path: Path) -> int:
    """Read all samples with webdataset."""
    found = webdataset.WebDataset(str(path), shardshuffle=False)
    return sum(len(each["jpg"]) + len(each["json"]) for each in found)


def at_random(path: Path, order: np.ndarray) -> int:
    """Open the tar, and read all samples in an order."""
    index, total = TarIndex(path), 0
    for number in order.tolist():
        members = index.sample(number)
        total += len(index.read(members["jpg"])) + len(index.read(members["json"]))
    return total


def by_hand(content: bytes) -> np.ndarray:
    """Pixel values like CLIP's, by the usual lines of pillow and numpy."""
    image = Image.open(io.BytesIO(content)).convert("RGB")
    short = SIDE / min(image.size)
    size = [round(side * short) for side in image.size]
    image = image.resize((size[0], size[1]), Image.Resampling.BICUBIC)
    left, top = (image.width - SIDE) // 2, (image.height - SIDE) // 2
    image = image.crop((left, top, left + SIDE, top + SIDE))
    x = np.asarray(image, np.float32) / 255
    x = (x - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    return np.ascontiguousarray(x.transpose(2, 0, 1))


def measured(tar: Path, images: list[bytes], samples: int, rounds: int) -> dict[str, list]:
    """Return the seconds of each method in each round."""
    size = {"height": SIDE, "width": SIDE}
    clip = ImagePreprocessing(
        size={"shortest_edge": SIDE},
        crop_size=size,
        do_center_crop=True,
        image_mean=MEAN,
        image_std=STD,
    )
    assert np.abs(clip.pixels_of(images[0], "x") - by_hand(images[0])).max() < 0.02
    draw, many = np.random.default_rng(1), images * 4
    pools = {count: ThreadPoolExecutor(count) for count in (1, 2)}

    def decode(count: int) -> None:
        list(pools[count].map(lambda each: clip.pixels_of(each, "x"), many))

    order = draw.permutation(samples)
    assert in_sequence(tar) == at_random(tar, order)
    clock, cpu = time.perf_counter, time.process_time
    ways: dict[str, tuple[Callable[[], float], Callable[[], object]]] = {
        "webdataset in sequence": (cpu, lambda: in_sequence(tar)),
        "TarIndex at random": (cpu, lambda: at_random(tar, order)),
        "pillow and numpy": (cpu, lambda: [by_hand(each) for each in images]),
        "pixels_of": (cpu, lambda: [clip.pixels_of(each, "x") for each in images]),
        "one thread": (clock, lambda: decode(1)),
        "two threads": (clock, lambda: decode(2)),
    }
    found: dict[str, list] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, (now, run) in ways.items():
            begin = now()
            run()
            if turn:  # the first warms up
                found[name].append(now() - begin)
    return found


def main() -> None:
    """Compare, round by round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    pairs = {
        "random samples / webdataset in sequence": ("webdataset in sequence", "TarIndex at random"),
        "one thread / pillow and numpy": ("pillow and numpy", "pixels_of"),
        "two threads / one": ("one thread", "two threads"),
    }
    with tempfile.TemporaryDirectory() as folder:
        tar, many = Path(folder) / "samples.tar", Path(folder) / "many.tar"
        images = write_tar(tar, options.samples)
        found = measured(tar, images, options.samples, options.rounds)
        write_many(many)
        TarIndex(many)
        for _ in range(options.rounds):
            begin = time.process_time()
            assert len(TarIndex(many)) == MILLION
            found.setdefault("index of a million members", []).append(time.process_time() - begin)
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "pillow": PIL.__version__,
        "webdataset": webdataset.__version__,
        "samples": options.samples,
        "bytes of an image": round(sum(map(len, images)) / len(images)),
        "seconds": found,
        "ratios": {},
    }
    for name, (theirs, ours) in pairs.items():
        ratios = sorted(a / b for a, b in zip(found[theirs], found[ours], strict=True))
        middle = ratios[len(ratios) // 2]
        report["ratios"][name] = {"median": middle, "low": ratios[0], "high": ratios[-1]}
        print(f"{name}: {middle:.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    opened = sorted(found["index of a million members"])
    print(f"index of a million members: {opened[len(opened) // 2]:.3f} s")
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
