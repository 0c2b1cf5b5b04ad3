"""What one training run is given and what came of it; both travel between processes as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from checkmate_tf.budget import Budget

TRAINED = "trained"
OUT_OF_MEMORY = "out of memory"
FAILED = "failed"

DEFAULT_LEARNING_RATE = 1e-3  # at Keras's 1e-2, rounding is a tenth of MobileNet's loss after ten steps


@dataclasses.dataclass(frozen=True)
class Settings:
    """A training run.

    Attributes:
        model: Name in keras.applications.
        budget: As the user gave it.
        batch_size: Images per step.
        image_size: Pixels per side.
        steps: Steps that are measured.
        data: Name in sample_data.CLASSES.
        optimizer: Name in keras.optimizers.
        learning_rate: Of the optimizer.
        precision: "float32" or "float64", of weights and all that is computed.
        strategy: Name in checkmate_tf.strategies().
        implementations: As `checkmate_tf.compile` takes it.
        microbatches: As `checkmate_tf.compile` takes it.
        time_limit_s: For the solver.
        seed: Of weights and batches.
        warm_up: Steps that are trained before those that are measured.
        limit_mib: Hard limit of the allocator; None for what the device has.
        replicas: Devices among which each batch is divided.
    """

    model: str
    budget: Budget
    batch_size: int = 32
    image_size: int = 224
    steps: int = 10
    data: str = "photographs"
    optimizer: str = "sgd"
    learning_rate: float = DEFAULT_LEARNING_RATE
    precision: str = "float32"
    strategy: str = "auto"
    implementations: str = "exact"
    microbatches: int | str = 1
    time_limit_s: float = 60.0
    seed: int = 0
    warm_up: int = 2
    limit_mib: int | None = None
    replicas: int = 1

    def title(self) -> str:
        """One line that says what is trained."""
        size = f"{self.image_size}x{self.image_size}"
        among = f" among {self.replicas} replicas" if self.replicas > 1 else ""
        return (
            f"{self.model} in {self.precision}, {self.batch_size} {self.data} of {size} per step{among}, "
            f"{self.optimizer} at {self.learning_rate:g}: "
            f"{self.steps} steps after {self.warm_up} of warm-up"
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a training run. What was not measured is None.

    Attributes:
        outcome: TRAINED, OUT_OF_MEMORY or FAILED.
        message: Why, when it did not train.
        peak_bytes: The allocator's highest peak in the measured steps; of several replicas, what each device took.
        step_s: Median time of the measured steps.
        losses: Of each step, warm-up included.
        budget_bytes: Of a planned run.
        overhead: Of a planned run, as its report has it.
        gap: Of a planned run, as its report has it.
        report: Of a planned run, as `Report.to_json` writes it.
        update_difference: Of a planned run beside a plain one: the largest difference that any weight has after the
            first step, relative to the most that the plain step moved one.
        rounded_loss: Of a plain run beside a planned one: the last step's loss of another one, from weights that were
            moved by one unit in the last place.
    """

    outcome: str
    message: str = ""
    peak_bytes: int | None = None
    step_s: float | None = None
    losses: tuple[float, ...] = ()
    budget_bytes: int | None = None
    overhead: float | None = None
    gap: float | None = None
    report: dict[str, Any] | None = None
    update_difference: float | None = None
    rounded_loss: float | None = None

    @property
    def trained(self) -> bool:
        """All steps were run."""
        return self.outcome == TRAINED

    @property
    def within_budget(self) -> bool:
        """All steps were run, and their measured peak is at most the budget."""
        known = self.peak_bytes is not None and self.budget_bytes is not None
        return self.trained and known and self.peak_bytes <= self.budget_bytes

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return dataclasses.asdict(self)
