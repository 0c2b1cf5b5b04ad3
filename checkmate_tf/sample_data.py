"""Small labelled sets of real images that ship inside scikit-learn, as endless batches of any size.

They let a model train on something real without a download. They are far too small to judge a model by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np

Batch = tuple[np.ndarray, np.ndarray]
"""Images, float32 (batch, image_size, image_size, 3) in [-1, 1], and labels, int32 (batch,)."""

CLASSES = {"photographs": 2, "digits": 10}
"""Number of classes of each set."""

_SMALLEST_CROP = 0.5  # of the photograph's shorter side


def batches(name: str, batch_size: int, image_size: int, *, seed: int = 0) -> Iterator[Batch]:
    """Endless batches: the same ones for the same arguments.

    Args:
        name: "photographs": random crops, some of them mirrored, of scikit-learn's two sample photographs (427x640),
            labelled with the photograph that they come from. "digits": scikit-learn's 1,797 handwritten digits (8x8),
            enlarged.
        batch_size: Images per batch.
        image_size: Pixels per side.
        seed: Of the random choices.

    Raises:
        ValueError: There is no such set.
        ImportError: The extra `examples` (scikit-learn and Pillow) is not installed.
    """
    if name not in CLASSES:
        raise ValueError(f"data must be one of {', '.join(CLASSES)}; got {name!r}.")
    draw = _photographs(image_size) if name == "photographs" else _digits(image_size)
    return _endless(draw, batch_size, np.random.default_rng(seed))


def _endless(
    draw: Callable[[np.random.Generator], tuple[np.ndarray, int]], batch_size: int, rng: np.random.Generator
) -> Iterator[Batch]:
    while True:
        images, labels = zip(*(draw(rng) for _ in range(batch_size)), strict=True)
        yield np.stack(images).astype(np.float32) / 127.5 - 1, np.array(labels, dtype=np.int32)


def _photographs(image_size: int) -> Callable[[np.random.Generator], tuple[np.ndarray, int]]:
    image, datasets = _libraries()
    photographs = [image.fromarray(pixels) for pixels in datasets.load_sample_images().images]

    def draw(rng: np.random.Generator) -> tuple[np.ndarray, int]:
        label = int(rng.integers(len(photographs)))
        width, height = photographs[label].size
        side = int(min(width, height) * rng.uniform(_SMALLEST_CROP, 1))
        left, top = rng.integers(width - side + 1), rng.integers(height - side + 1)
        crop = photographs[label].resize((image_size, image_size), box=(left, top, left + side, top + side))
        pixels = np.asarray(crop)
        return (pixels[:, ::-1] if rng.random() < 0.5 else pixels), label

    return draw


def _digits(image_size: int) -> Callable[[np.random.Generator], tuple[np.ndarray, int]]:
    image, datasets = _libraries()
    digits = datasets.load_digits()

    def draw(rng: np.random.Generator) -> tuple[np.ndarray, int]:
        index = int(rng.integers(len(digits.target)))
        small = image.fromarray((digits.images[index] * (255 / 16)).astype(np.uint8))
        pixels = np.asarray(small.resize((image_size, image_size)))
        return np.repeat(pixels[:, :, None], 3, axis=2), int(digits.target[index])

    return draw


def _libraries() -> tuple[ModuleType, ModuleType]:
    """Pillow's Image and scikit-learn's datasets, which only the sample images need."""
    try:
        from PIL import Image
        from sklearn import datasets
    except ImportError as error:
        raise ImportError(
            "the sample images need scikit-learn and Pillow: pip install 'checkmate_tf[examples]'"
        ) from error
    return Image, datasets
