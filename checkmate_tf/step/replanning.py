"""Why a step is planned again once training has begun, and what is said where no plan is found."""

from __future__ import annotations

import enum
import logging

from checkmate_tf.budget import format_bytes

_log = logging.getLogger(__name__)

_MOST = 3  # times that a step is planned again for what steps take or others hold, as each search takes seconds
_TRIES = "a smaller batch, or a larger budget"
_LEFT_BY_ANOTHER = "another step has left memory in which it cannot be divided as it was"


class Where(enum.Enum):
    """Where no plan keeps a budget, and what to try then."""

    AS_MEASURED = (
        "with what steps were measured to take, which may differ from batch to batch where sizes depend on the data",
        _TRIES,
    )
    BESIDE_OTHERS = (
        "beside what others hold on the device by now, such as data for validation",
        f"data that is read batch by batch, {_TRIES}",
    )
    IN_TURNS = ("in memory as steps for other batches have left it", f"batches of one size, {_TRIES}")


class Replanning:
    """Counts how often a step is planned again, and tells of it.

    Args:
        budget_bytes: Of the step.

    Attributes:
        notes: What was told, in order.
        warning: That steps may take more than the budget; None as long as there may be a plan that keeps it.
        has_begun: The step was planned again.
    """

    def __init__(self, budget_bytes: int):
        self._budget_bytes = budget_bytes
        self._times = 0  # that count
        self._why = ""  # another plan is sought: a sentence without its end
        self._where = Where.AS_MEASURED
        self._gave_up_bytes = 0  # in use when no plan was found
        self.notes: list[str] = []
        self.warning: str | None = None
        self.has_begun = False

    @property
    def may_go_on(self) -> bool:
        """Whether it may be once more."""
        return self._times < _MOST

    def begin(self, why: str, where: Where, in_use_bytes: int, *, counts: bool) -> bool:
        """Another plan is needed; whether one is sought.

        Args:
            why: A sentence without its end.
            where: No plan may keep the budget.
            in_use_bytes: On the device.
            counts: It is not to be done for ever.
        """
        self._why, self._where, self.warning = why, where, None
        if counts and not self.may_go_on:
            self.give_up(in_use_bytes)
            return False
        self._times += counts
        self.has_begun = True
        return True

    def look_again(self) -> None:
        """Whether the plan still does is seen anew, as steps for other batches have run."""
        self._where = Where.IN_TURNS

    def found(self, *, is_another: bool) -> None:
        """There is a plan: the one that there was, or another."""
        if self._why or is_another:
            self.note(f"{self._why or _LEFT_BY_ANOTHER}; planned again.")
        self._why = ""

    def give_up(self, in_use_bytes: int) -> None:
        """No plan was found, and none is sought any longer, as long as others hold as much as now.

        Args:
            in_use_bytes: On the device.
        """
        if self._why:
            self.note(f"{self._why}.")
        where, tries = self._where.value
        budget = format_bytes(self._budget_bytes)
        self.warning = (
            f"steps may take more than their budget of {budget}: no plan was found that keeps it {where}. Try: {tries}."
        )
        self.note(self.warning)
        self._why, self._gave_up_bytes = "", in_use_bytes

    def relieved_bytes(self, in_use_bytes: int) -> int:
        """How much less is in use than when no plan was found."""
        return self._gave_up_bytes - in_use_bytes

    def note(self, text: str) -> None:
        """Tells the reader of the report, and of the log."""
        self.notes.append(text)
        _log.warning("%s", text)
