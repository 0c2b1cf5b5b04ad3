"""Sizes of a step's tensors as functions of its open dimensions, from those at some of them, and checked at others."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

_DEGREE = 2  # in each dimension: attention's scores are as long as the text is, squared
_MOST_DIMENSIONS = 2  # that vary on their own; more would take more samples than they save
_CHECKS = 2  # samples more than a polynomial has terms
_EXACT_BYTES = 0.5

Sizes = npt.NDArray[np.int64]


class OpenSizes:
    """Knows the sizes of a step's tensors for some batches, and between them those that follow.

    Sizes are polynomials in the dimensions of the batch, or were so for all batches so far. They are taken from these
    where they give all of that to the byte, two batches more than have to be; between the smallest and the largest
    sizes seen, in steps of which all differences were multiples (a convolution with strides rounds up).
    """

    def __init__(self) -> None:
        self._dimensions: list[tuple[int, ...]] = []
        self._sizes: list[Sizes] = []
        self._polynomial: _Polynomial | None = None

    def at(self, dimensions: tuple[int, ...], infer: Callable[[], Sizes]) -> Sizes:
        """int64 (tensors,). Bytes of each tensor.

        Args:
            dimensions: All dimensions of the batch.
            infer: Gives the sizes for this batch, in a second or so.
        """
        if self._polynomial is not None and self._polynomial.holds(dimensions):
            return self._polynomial.at(dimensions)
        sizes = infer()
        self.learn(dimensions, sizes)
        return sizes

    def learn(self, dimensions: tuple[int, ...], sizes: Sizes) -> None:
        """Remembers the sizes for a batch.

        Args:
            dimensions: As for `at`.
            sizes: What `at` is to give for it.
        """
        if dimensions not in self._dimensions:
            self._dimensions.append(dimensions)
            self._sizes.append(sizes)
            self._polynomial = _Polynomial.through(np.array(self._dimensions), np.array(self._sizes))


def grown_together(dimensions: npt.NDArray[np.int64]) -> list[list[int]]:
    """Groups of the dimensions that differ, those in proportion to each other.

    Args:
        dimensions: int64 (batches, dimensions). Proportions are those of the differences from the first batch.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for k, differences in enumerate((dimensions - dimensions[0]).T):
        if differences.any():
            groups.setdefault(tuple((differences // np.gcd.reduce(differences)).tolist()), []).append(k)
    return list(groups.values())


class _Polynomial:
    """Of each tensor's bytes in the dimensions that vary.

    Args:
        sample: int (samples, dimensions).
        groups: Those of the dimensions that vary, together those that do so alike.
        sizes: int64 (samples, tensors).
    """

    def __init__(self, sample: npt.NDArray[np.int64], groups: list[list[int]], sizes: npt.NDArray[np.int64]):
        self._first, self._least, self._most = sample[0], sample.min(axis=0), sample.max(axis=0)
        self._step = np.maximum(1, np.gcd.reduce(np.abs(sample - sample[0]), axis=0))
        self._groups = groups
        self._coefficients = np.linalg.lstsq(self._terms(sample), sizes.astype(np.float64), rcond=None)[0]
        self.error_bytes = float(np.abs(self._terms(sample) @ self._coefficients - sizes).max())

    @classmethod
    def through(cls, sample: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> _Polynomial | None:
        """One that gives all these sizes; None where there is none, or not enough to tell."""
        groups = grown_together(sample)
        if len(groups) > _MOST_DIMENSIONS or len(sample) < (1 + _DEGREE) ** len(groups) + _CHECKS:
            return None
        found = cls(sample, groups, sizes)
        return found if found.error_bytes < _EXACT_BYTES else None

    def _terms(self, dimensions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """float64 (batches, terms)."""
        leads = [group[0] for group in self._groups]
        scaled = dimensions[:, leads] / self._most[leads]
        powers = itertools.product(range(1 + _DEGREE), repeat=len(leads))
        return np.stack([np.prod(scaled ** np.array(power), axis=1) for power in powers], axis=1)

    def holds(self, dimensions: tuple[int, ...]) -> bool:
        """Whether a batch lies between those seen, and differs from them as they do from each other."""
        new = np.array(dimensions)
        count, rest = np.divmod(new - self._first, self._step)
        is_between = (self._least <= new).all() and (new <= self._most).all()
        return bool(is_between and not rest.any() and all(len(set(count[group])) == 1 for group in self._groups))

    def at(self, dimensions: tuple[int, ...]) -> Sizes:
        """int64 (tensors,). Bytes of each tensor."""
        sizes: Sizes = np.rint(self._terms(np.array([dimensions])) @ self._coefficients)[0].astype(np.int64)
        return sizes
