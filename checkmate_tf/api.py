"""The public functions: wiring only."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import keras

from checkmate_tf import solvers
from checkmate_tf.budget import Budget, parse
from checkmate_tf.device_memory import allocation_replay
from checkmate_tf.device_memory.device import is_cpu
from checkmate_tf.errors import ModelError, OptionError
from checkmate_tf.keras import advise as advising
from checkmate_tf.keras import curve, max_batch, train_step
from checkmate_tf.keras.custom_step import PlannedFunction
from checkmate_tf.keras.microbatches import AUTO
from checkmate_tf.keras.unplanned import ON_UNPLANNED, WARN
from checkmate_tf.lowering.implementations.registry import RULES
from checkmate_tf.progress import progress
from checkmate_tf.reports.advice import Advice
from checkmate_tf.reports.report import Report
from checkmate_tf.reports.tradeoff import TradeoffCurve
from checkmate_tf.step.pipeline import Settings
from checkmate_tf.studies.batch_size import MaxBatchSize


def compile(
    model: keras.Model,
    budget: Budget,
    *,
    input_spec: Any = None,
    strategy: str = "auto",
    time_limit_s: float = 60.0,
    implementations: str = "exact",
    microbatches: int | str = 1,
    cache_dir: str | os.PathLike[str] | None = None,
    on_unplanned: str = "warn",
    verbose: bool | str = "auto",
) -> keras.Model:
    """Makes a compiled Keras model train inside a memory budget, with the same gradients.

    The training step is planned at once when `input_spec` is given, else when `fit` or `train_on_batch` shows the first
    batch. Batches of other sizes share a few plans, each made when a batch comes that none of those before is for; in
    microbatches, with other implementations than "exact", and where XLA compiles the step, each shape has its own.
    Under `tf.distribute.MirroredStrategy` all replicas follow one plan, and the budget is that of each device.
    `evaluate`, `predict` and `save` are not touched. `restore` undoes it. A copy of the model (by `clone_model`,
    `copy.deepcopy`, pickling, saving and loading) trains as an ordinary model, without the budget, until it is given to
    `compile` itself.

    A fraction as the budget is one of the largest plain peak of all batches so far. A smaller batch has the bytes of
    the largest one before it. When a larger one comes, the fraction of its plain peak is the budget for it and for all
    that are planned after it; steps planned before keep their plans, which take less.

    Where there is no plan within the budget for the first batch that is trained on, or for `input_spec`, that is an
    error, and the model trains as it did before `compile`. `on_unplanned` says what happens to all else that is not
    planned: ragged and sparse batches, strategies of tf.distribute other than MirroredStrategy, a model compiled anew
    with run_eagerly=True, a later batch for which there is no plan within the budget, and whatever fails while a step
    is traced, profiled, planned, built or run for the first time. Such a failure leaves every variable as it was.

    Args:
        model: Compiled, with an optimizer.
        budget: What the device's allocator may hand out at most, everything included: bytes, a
            size such as "4GiB", a fraction in (0, 1] of the unmodified step's predicted peak, or
            "auto" (what the device has, less a reserve).
        input_spec: A batch as `fit` sees it, (x, y) or (x, y, sample_weight), as (nested) tf.TensorSpec
            with every dimension; that of all replicas. Where batches come in sizes, `largest` says how large they get.
        strategy: One of `strategies()`.
        time_limit_s: Seconds to search for a schedule.
        implementations: "exact": the ops that the model uses; only sums of more than two terms are added one by
            one, always in the same order. "split": these ops, but those with large tensors run on 2, 4 or 8 equal parts
            of the rows, one part after the other, where no plan is found without that or only a dear one; gradients of
            weights are added part by part, and differ by rounding. "fused": where TensorFlow has a leaner equivalent of
            several ops together (batch norm, ...), that, which differs by rounding as well; where two ways each have
            their price, the one with which the cheaper plan is found; and parts as with "split". "gist": a baseline for
            comparison, the lossless encodings of Gist wherever they can be: gradients of max pooling by places, of
            ReLUs by masks; with strategy="checkpoint_all", as published. `report` says where.
        microbatches: In how many equal parts each batch is cut. Gradients of the parts are added up (in accumulators
            as large as the weights), and the weights are updated once. "auto": in as many as take least time within
            the budget (1, 2, 4, ...; for each of them, `time_limit_s`), where that leaves the gradients as they are;
            that is checked on some rows of the first batch. A number is taken as it is; where it is found to change the
            gradients (batch normalization, losses that compare rows, masks), the report says so. Random numbers such
            as dropout's masks are drawn part by part.
        cache_dir: Folder for measured ops and found schedules; by default in the user's cache folder.
        on_unplanned: "warn": what is not planned trains by the model's own step, without the budget, and a UserWarning
            says why. "raise": that is an error, and the model is given its own step back.
        verbose: Whether to show progress; "auto": on a terminal.

    Returns:
        The same model.

    Raises:
        BudgetError, ModelError, OptionError: An argument means nothing; the message says what to do.
        InfeasibleBudget: No schedule meets the budget, proven.
        NoScheduleFound: None was found in time.
        PlanningError: With on_unplanned="raise", planning failed; `__cause__` says why.

    Warns:
        UserWarning: Once for each reason why something trains unplanned; and where a plan is predicted to take more
            than twice as long as the unmodified step.

    References:
        Jain et al., Checkmate, MLSys 2020; Jain et al., Gist, ISCA 2018.
    """
    train_step.attach(
        model,
        _settings(budget, strategy, time_limit_s, implementations, cache_dir, verbose, on_unplanned, microbatches),
        input_spec,
    )
    return model


def function(
    step: Callable[..., Any],
    budget: Budget,
    *,
    input_spec: Any,
    strategy: str = "auto",
    time_limit_s: float = 60.0,
    implementations: str = "exact",
    cache_dir: str | os.PathLike[str] | None = None,
    on_unplanned: str = "warn",
    verbose: bool | str = "auto",
) -> PlannedFunction:
    """Makes any training step written with tf.GradientTape run inside a memory budget.

    For custom loops, models with several optimizers, GANs. The step is planned now, for arguments as `input_spec`
    describes them; for other sizes it is planned when they come, as `compile` does. Arguments of another structure,
    dtype or number of dimensions run the unmodified step, as `on_unplanned` allows. Variables that the step makes when
    it first runs are made now.

    Called within the scope of a `MirroredStrategy` with several replicas, it plans a step in which `strategy.run` runs
    what one replica does, and which returns what that returns; `input_spec` is then of the arguments of all replicas.

    Args:
        step: Python function or tf.function. Its arguments and results are (nested) tensors; it
            updates variables, by an optimizer or by assignment.
        budget: As for `compile`.
        input_spec: Tuple with one entry per positional argument of the step: (nested) tf.TensorSpec with every
            dimension, or `largest`.
        strategy: As for `compile`; likewise all that follow.
        time_limit_s: Seconds to search for a schedule.
        implementations: "exact", "fused", "split" or "gist".
        cache_dir: Folder for measured ops and found schedules.
        on_unplanned: "warn": arguments of another kind, or of sizes for which there is no plan, and a step that could
            not be planned, run unmodified, without the budget, and a UserWarning says why. "raise": that is an
            error.
        verbose: Whether to show progress.

    Returns:
        What is called as `step` is, with a method `report()`.

    Raises:
        BudgetError, ModelError, OptionError: An argument means nothing; the message says what to do.
        InfeasibleBudget: No schedule meets the budget, proven.
        NoScheduleFound: None was found in time.
        PlanningError: With on_unplanned="raise", planning failed; `__cause__` says why.

    Example:
        >>> def step(x, y):
        ...     with tf.GradientTape() as tape:
        ...         loss = loss_fn(y, net(x, training=True))
        ...     weights = net.trainable_variables
        ...     optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        ...     return loss
        >>> step = checkmate_tf.function(step, "2GiB", input_spec=(x_spec, y_spec))
        >>> for x, y in dataset:
        ...     loss = step(x, y)
    """
    return PlannedFunction(
        step,
        _settings(budget, strategy, time_limit_s, implementations, cache_dir, verbose, on_unplanned),
        input_spec,
    )


def reserve(size: int | str, *, device: str = "CPU:0") -> None:
    """Makes a CPU's allocator take its memory as one block, as a GPU's does. Call it before building the model.

    TensorFlow's CPU allocator otherwise grows by regions that double and never merge; between them a
    tensor can count as up to twice its size, which costs planned steps several percent of their
    budget. The block is address space only until it is used.

    Args:
        size: At least what training will take: bytes, or a size such as "8GiB".
        device: Device whose allocator is meant. Does nothing on a GPU, whose memory is one
            block already if it does not grow.

    Raises:
        BudgetError: `size` is no size.
        CheckmateError: There is no room for the block.
    """
    nbytes = parse(size, plain_peak_bytes=None, device_bytes=None)
    if is_cpu(device):
        allocation_replay.reserve(nbytes, device=device)


def restore(model: keras.Model) -> keras.Model:
    """Gives a model back its own training step. Returns the same model."""
    train_step.detach(model)
    return model


def report(model: keras.Model) -> Report:
    """What was promised and measured for a model that `compile` planned.

    Raises:
        ModelError: The model was not given to `compile`.
    """
    training = train_step.planned_training(model)
    if training is None:
        raise ModelError("the model is not planned: call checkmate_tf.compile(model, budget) first.")
    return training.report()


@dataclasses.dataclass(frozen=True)
class MinimumBudget:
    """The smallest budget that some schedule was found to meet.

    Attributes:
        budget_bytes: What `compile` takes; the device's allocator stays within it.
        bottleneck: Name of the op at which the peak is reached.
        predicted_overhead: Cost of that schedule / cost of running every op once.
        phases_s: Seconds of trace, profile and solve.
    """

    budget_bytes: int
    bottleneck: str
    predicted_overhead: float
    phases_s: Mapping[str, float]


def minimum_budget(
    model: keras.Model,
    input_spec: Any,
    *,
    implementations: str = "exact",
    cache_dir: str | os.PathLike[str] | None = None,
    verbose: bool | str = "auto",
) -> MinimumBudget:
    """Finds the smallest budget that the model can train in. The model is left as it was.

    The plan that needs least is tried on zeros; should it take more than predicted, the budget is what it took. Where
    XLA compiles the step, and among several replicas, it is what it took in any case: no prediction holds there.

    Args:
        model: Compiled, with an optimizer.
        input_spec: (x, y) or (x, y, sample_weight) as (nested) tf.TensorSpec with every dimension; of several replicas,
            the batch of all.
        implementations: As for `compile`.
        cache_dir: Folder for measured ops and found schedules; by default in the user's cache folder.
        verbose: Whether to show progress; "auto": on a terminal.

    Raises:
        ModelError, OptionError: An argument means nothing; the message says what to do.
        NoScheduleFound: XLA compiles the step, or there are several replicas, and the smallest plan has no room.
    """
    settings = _settings(1, "auto", 60.0, implementations, cache_dir, verbose)
    least, phases_s = train_step.minimum(model, settings, input_spec)
    return MinimumBudget(least.peak_bytes, least.bottleneck, least.overhead, phases_s)


def tradeoff_curve(
    model: keras.Model,
    input_spec: Any,
    *,
    budgets: Sequence[Budget] = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    strategies: Sequence[str] = ("auto",),
    time_limit_s: float = 30.0,
    implementations: str = "exact",
    path: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    verbose: bool | str = "auto",
) -> TradeoffCurve:
    """Plans the model's step for several budgets, with several strategies. The model is left as it was.

    Nothing is trained: peaks are predicted on the device's own allocator and times from profiled ops.

    Args:
        model: Compiled, with an optimizer.
        input_spec: (x, y) or (x, y, sample_weight) as (nested) tf.TensorSpec with every dimension.
        budgets: Each as for `compile`; fractions are of the predicted peak of the unmodified step.
        strategies: Names in `strategies()`. A strategy has only plans of its own.
        time_limit_s: Seconds of search for each point.
        implementations: As for `compile`.
        path: JSON file that holds the curve after each point. A later call with the same model, batch and time limit
            goes on from there, after an interruption or for more budgets; points in the file that are not asked
            for stay in it.
        cache_dir: Folder for measured ops and found schedules; by default in the user's cache folder.
        verbose: Whether to show progress; "auto": on a terminal.

    Returns:
        One record per strategy and budget, with `plot()`, `to_json()`, `to_csv()` and `rows()`.

    Raises:
        BudgetError, ModelError, OptionError: An argument means nothing; the message says what to do.
        FileError: `path` holds something else; the message says what differs. It is left as it is.

    References:
        Jain et al., Checkmate, MLSys 2020, figure 4.
    """
    for name, entries in {"budgets": budgets, "strategies": strategies}.items():
        if not isinstance(entries, Sequence) or isinstance(entries, str | bytes) or not entries:
            raise OptionError(f"{name} must be a list with at least one entry; got {entries!r}.")
    if path is not None:
        path = _path("path", path)
    settings = [
        _settings(budget, strategy, time_limit_s, implementations, cache_dir, verbose)
        for budget in budgets
        for strategy in strategies
    ]
    return train_step.on_profiled(
        model,
        settings[0],
        input_spec,
        lambda profiled: curve.compute(profiled, asked=budgets, strategies=strategies, path=path),
    )


def max_batch_size(
    model: keras.Model,
    budget: Budget,
    input_spec: Any,
    *,
    max_overhead: float | None = None,
    strategy: str = "auto",
    time_limit_s: float = 30.0,
    implementations: str = "exact",
    measure: bool = False,
    path: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    verbose: bool | str = "auto",
) -> MaxBatchSize:
    """Finds the largest batch that trains inside a budget. The model is left as it was.

    The step is profiled at the batch of `input_spec`. Tensors that grow with the batch, and the times and workspace
    of the ops that touch them, are scaled to other sizes; weights, their gradients and optimizer slots stay. The
    size that is found so is confirmed by tracing, profiling and planning there, and taken down until it is. Sizes
    less than 2 % apart are not told apart, and a longer search may find plans for larger batches.

    Args:
        model: Compiled, with an optimizer.
        budget: As for `compile`; a fraction is of the unmodified step's predicted peak at the batch of `input_spec`.
        input_spec: (x, y) or (x, y, sample_weight) as (nested) tf.TensorSpec with every dimension, all with the same
            number of rows. A size whose ops take long enough to be timed well, such as 16 or 32 images.
        max_overhead: Cap on planned / plain cost; by default one extra forward pass.
        strategy: One of `strategies()`.
        time_limit_s: Seconds of search for each size that is tried.
        implementations: As for `compile`.
        measure: Also run some steps at the size that was found, on zeros; every variable gets its value back.
        path: JSON file that holds the sizes that were tried, after each of them. A later call with the same model,
            batch, budget and options goes on from there, after an interruption or to measure as well.
        cache_dir: Folder for measured ops and found schedules; by default in the user's cache folder.
        verbose: Whether to show progress; "auto": on a terminal.

    Raises:
        BudgetError, ModelError, OptionError: An argument means nothing; the message says what to do.
        FileError: `path` holds something else; the message says what differs. It is left as it is.
        NoScheduleFound: No batch was found to fit.

    References:
        Jain et al., Checkmate, MLSys 2020, section 6.4 and equation 10.
    """
    if max_overhead is not None and not (
        isinstance(max_overhead, (int, float)) and not isinstance(max_overhead, bool) and max_overhead >= 1
    ):
        raise OptionError(
            f"max_overhead must be a number of at least 1 (1.2: a fifth more time than the plain step), or None; "
            f"got {max_overhead!r}."
        )
    settings = _settings(budget, strategy, time_limit_s, implementations, cache_dir, verbose)
    return max_batch.find(model, settings, input_spec, max_overhead=max_overhead, measure=measure, path=path)


def advise(
    model: keras.Model,
    budget: Budget,
    input_spec: Any,
    *,
    time_limit_s: float = 150.0,
    cache_dir: str | os.PathLike[str] | None = None,
    verbose: bool | str = "auto",
) -> Advice:
    """Looks into what would make a model train inside a budget, and what each way costs. The model is left as it was.

    The ways: the step as it is; planned; planned with `implementations="fused"`; in 2, 4... microbatches, with both
    kinds of implementations; in 16 bits (a copy of the model under mixed_bfloat16, on older GPUs mixed_float16),
    unmodified, planned and in microbatches. Of each the peak is predicted on the device's own allocator and the time
    from profiled ops, as `compile` does; nothing is trained. `compile` may find faster plans, as it searches longer by
    default. Ways for which there is no time are named as left out. What was not computed is None.

    What a batch in parts changes is found on a few rows of random numbers; whole numbers in them are 0.

    Args:
        model: Compiled, with an optimizer.
        budget: As for `compile`; a fraction is of the unmodified step's predicted peak.
        input_spec: (x, y) or (x, y, sample_weight) as (nested) tf.TensorSpec with every dimension, all with the same
            number of rows.
        time_limit_s: Seconds for all of it. The step as it is, and planned, is looked into in any case, and a way
            that was begun is ended.
        cache_dir: Folder for measured ops and found schedules; by default in the user's cache folder.
        verbose: Whether to show progress; "auto": on a terminal.

    Returns:
        The ways, the fastest first, each with its predicted peak, what it changes in the results and what to write; and
        what makes up the least memory. Prints as a table, with `plot()`, `to_json()` and `save_html(path)`.

    Raises:
        BudgetError, ModelError, OptionError: An argument means nothing, or the model cannot be planned; the message
            says what to do.
        PlanningError: The model's own step could not be traced or profiled; `__cause__` says why.

    References:
        Jain et al., Checkmate, MLSys 2020; Tooley, The Maximum-Memory Rule; Micikevicius et al., Mixed Precision
        Training, ICLR 2018.
    """
    settings = _settings(budget, "auto", time_limit_s, "exact", cache_dir, verbose)
    return advising.compute(model, settings, input_spec)


def strategies() -> tuple[str, ...]:
    """The names that `strategy=` takes, the default first."""
    return solvers.names()


def _settings(
    budget: Budget,
    strategy: str,
    time_limit_s: float,
    implementations: str,
    cache_dir: str | os.PathLike[str] | None,
    verbose: bool | str,
    on_unplanned: str = WARN,
    microbatches: int | str = 1,
) -> Settings:
    """Checks the options.

    Raises:
        BudgetError, OptionError: Naming the option and what it takes.
    """
    if not isinstance(strategy, str) or strategy not in solvers.names():
        raise OptionError(f"strategy must be one of {', '.join(solvers.names())}; got {strategy!r}.")
    if isinstance(time_limit_s, bool) or not isinstance(time_limit_s, (int, float)) or not time_limit_s > 0:
        raise OptionError(f"time_limit_s must be a positive number of seconds; got {time_limit_s!r}.")
    if not isinstance(implementations, str) or implementations not in RULES:
        raise OptionError(f"implementations must be one of {', '.join(RULES)}; got {implementations!r}.")
    if not isinstance(on_unplanned, str) or on_unplanned not in ON_UNPLANNED:
        raise OptionError(f"on_unplanned must be one of {', '.join(ON_UNPLANNED)}; got {on_unplanned!r}.")
    is_count = isinstance(microbatches, Integral) and not isinstance(microbatches, bool) and microbatches >= 1
    if not is_count and microbatches != AUTO:
        raise OptionError(f"microbatches must be a number of at least 1, or {AUTO!r}; got {microbatches!r}.")
    parse(budget, plain_peak_bytes=1 << 60, device_bytes=1 << 60)  # only to refuse what no budget looks like
    return Settings(
        budget=budget,
        strategy=strategy,
        time_limit_s=float(min(time_limit_s, 1e9)),
        implementations=implementations,
        microbatches=int(microbatches) if is_count else AUTO,
        cache_dir=_folder(cache_dir),
        on_unplanned=on_unplanned,
        on_progress=progress(verbose),
    )


def _folder(cache_dir: object) -> str:
    if cache_dir is None:
        return default_cache_dir()
    return _path("cache_dir", cache_dir)


def _path(name: str, value: object) -> str:
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise OptionError(f"{name} must be a path; got {value!r}.")
    return path


def default_cache_dir() -> str:
    """The user's cache folder for measured ops and found schedules."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(root, "checkmate_tf")
