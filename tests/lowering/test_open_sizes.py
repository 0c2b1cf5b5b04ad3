"""Sizes at open dimensions are those that were inferred, or follow from them to the byte."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate_tf.lowering.open_sizes import OpenSizes


def of_text(rows, length):
    """Of activations, attention's scores, weights and a scalar."""
    return np.array([4 * rows * length * 256, 4 * rows * 8 * length**2, 4 * 256 * 1024, 4], np.int64)


def of_image(rows, height, width):
    """Of an image and of what a convolution with strides makes of it, twice."""
    half, quarter = [-(-height // 2), -(-width // 2)], [-(-height // 4), -(-width // 4)]
    return np.array([4 * rows * np.prod(size) for size in ([height, width, 3], [*half, 64], [*quarter, 128])], np.int64)


class Inferred:
    """Counts how often sizes are inferred."""

    def __init__(self, sizes_of):
        self.sizes_of, self.count, self.known = sizes_of, 0, OpenSizes()

    def at(self, *dimensions):
        def infer():
            self.count += 1
            return self.sizes_of(*dimensions)

        found = self.known.at(dimensions, infer)
        np.testing.assert_array_equal(found, self.sizes_of(*dimensions))
        return found


@pytest.mark.parametrize(
    ("sizes_of", "batches", "most"),
    [
        (of_text, [(8, n) for n in (512, 32, 100, 300, 77)], 5),
        (of_text, [(r, n) for r in (8, 5, 2, 1) for n in (512, 32, 100)], 12),
        (of_image, [(2, 16 * h, 16 * w) for h in (4, 16, 9, 7) for w in (4, 16, 9)], 12),
    ],
    ids=["lengths", "rows and lengths", "images"],
)
def test_what_lies_between_is_known_without_being_inferred(sizes_of, batches, most):
    inferred = Inferred(sizes_of)
    for batch in batches:
        inferred.at(*batch)
    assert inferred.count <= most
    least, largest = np.min(batches, axis=0), np.max(batches, axis=0)
    step = np.gcd.reduce(np.abs(np.array(batches) - batches[0]), axis=0)
    random = np.random.default_rng(0)
    for _ in range(50):
        count = [random.integers(0, (b - a) // s + 1) if s else 0 for a, b, s in zip(least, largest, step, strict=True)]
        inferred.at(*(least + step * count).tolist())
    assert inferred.count <= most


def test_a_size_outside_or_between_the_steps_is_inferred():
    inferred = Inferred(of_image)
    for height in (4, 16, 9, 7, 12, 13):
        for width in (4, 16, 9, 7):
            inferred.at(2, 16 * height, 16 * width)
    count = inferred.count
    for batch in [(2, 16 * 17, 64), (2, 64, 63), (3, 64, 64)]:
        inferred.at(*batch)
    assert inferred.count == count + 3


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(1, 40)), max_size=40))
def test_sizes_are_always_those_that_would_be_inferred_where_nothing_rounds(batches):
    inferred = Inferred(
        lambda rows, height, width: np.array([4 * rows * height, 8 * height * width, 7 * rows], np.int64)
    )
    for batch in batches:
        inferred.at(*batch)
