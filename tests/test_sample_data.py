"""Sample images: real, labelled, and the same for the same seed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from checkmate_tf import sample_data


@pytest.mark.parametrize("name", sample_data.CLASSES)
@pytest.mark.parametrize("image_size", [32, 224])
def test_batches_are_labelled_images(name, image_size):
    images, labels = next(sample_data.batches(name, 24, image_size))
    assert images.shape == (24, image_size, image_size, 3)
    assert images.dtype == np.float32
    assert labels.dtype == np.int32
    assert images.min() >= -1
    assert images.max() <= 1
    assert images.std() > 0.3
    assert set(labels) <= set(range(sample_data.CLASSES[name]))
    assert len(set(labels)) >= 2


@pytest.mark.parametrize("name", sample_data.CLASSES)
def test_the_seed_decides(name):
    def first_three(seed):
        return list(itertools.islice(sample_data.batches(name, 4, 32, seed=seed), 3))

    for (images, labels), (again, labels_again) in zip(first_three(1), first_three(1), strict=True):
        np.testing.assert_array_equal(images, again)
        np.testing.assert_array_equal(labels, labels_again)
    assert not np.array_equal(first_three(1)[0][0], first_three(2)[0][0])
    assert not np.array_equal(first_three(1)[0][0], first_three(1)[1][0])


def test_the_photographs_can_be_told_apart_by_their_blue_sky():
    images, labels = next(sample_data.batches("photographs", 64, 32))
    blue = images[..., 2].mean(axis=(1, 2)) - images[..., 0].mean(axis=(1, 2))
    assert blue[labels == 0].mean() > blue[labels == 1].mean() + 0.1


def test_an_unknown_set_is_refused():
    with pytest.raises(ValueError, match="photographs, digits; got 'cats'"):
        sample_data.batches("cats", 1, 32)
