"""The training loop: steps, evaluation, checkpoints, and a clean stop on errors and signals."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm import collectives
from ..comm.consensus import ask_first_rank
from ..compiler.graphs import StepGraph, check_device, check_messages
from ..dispatch.arguments import map_tensors
from ..errors import ShardfieldError
from ..layout import DimSharding, Layout
from ..tensor import ShardTensor, wrap
from .buffers import check_buffers
from .checkpoint import Checkpoints
from .checkpoint_index import CheckpointError
from .complex_params import real_pairs
from .config import TrainConfig, UsageError
from .ema import ParameterEMA
from .log import Log
from .loggers import check_loggers
from .nonfinite import NonFinite, save_report
from .parallel import LocalGrads, no_sync, parallelize
from .plots import shard_boundaries
from .preemption import Preempted, catch_sigterm
from .record import ModuleRecorder
from .rollout import rollout
from .run_folder import check_writable, own_folder
from .task import Task

READ_SECONDS = 1.0  # the losses are read about that often, so that a signal is seen soon


def fit(task: Task, config: TrainConfig, mesh: DeviceMesh, log: Log | None = None) -> dict[str, float]:
    """Train, and return the final test metrics. `config.resume` selects the checkpoint to continue from."""
    if log is not None:
        return Trainer(task, config, mesh, log).run()
    log = Log(config.out, dist.get_rank() == 0, config.log_every, config.logger, config.as_json())
    try:
        return Trainer(task, config, mesh, log).run()
    finally:
        log.close()


class Trainer:
    """One run of a task on a mesh. All ranks make the same calls."""

    def __init__(self, task: Task, config: TrainConfig, mesh: DeviceMesh, log: Log):
        self.task, self.config, self.mesh, self.log = task, config, mesh, log
        config.check_ranks()
        check_writable(config.out)
        check_loggers(config.logger)
        self.device = collectives.device_of(mesh)
        # Real pairs first: a module's `to(float32)` would drop the imaginary parts of complex parameters.
        self.model: nn.Module = parallelize(
            real_pairs(task.model).to(self.device, config.dtype),
            mesh,
            domain=config.axes,
            strategy=config.strategy,
            mixed_precision=torch.bfloat16 if config.precision == "bf16" else None,
            checkpoint=config.recompute,
        )
        # Fused: one call for all parameters. Unfused, FSDP's parameters take a third of a small model's step.
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
        )
        self.rate = torch.zeros((), device=self.device)  # the learning rate, for a step without values of the host
        self.ema_average = None if config.ema is None else ParameterEMA(self.model, config.ema)
        self.recorder = ModuleRecorder(self.model, mesh, config.out) if config.record else None
        self.recorded = 0  # steps since the start
        self.checkpoints, self.settings = Checkpoints(config.out, config.keep), config.as_json()
        if max(config.rollout) > 1 and task.lead is None:
            raise UsageError(f"--rollout {config.rollout}: a sample of this recipe has one step")
        self.steps_per_epoch = len(task.train) // config.accumulate
        if not self.steps_per_epoch:
            raise UsageError(f"an epoch has {len(task.train)} batches, and a step needs {config.accumulate} of them")
        planned = config.epochs * self.steps_per_epoch
        self.steps = planned if config.max_steps is None else min(planned, config.max_steps)
        self.step = 0
        self.waited = 0.0  # seconds blocked on data
        self.last_saved_step = -1
        # 1 from the first step on whose loss or gradients are not finite: no later step changes the state.
        self.bad = torch.zeros((), device=self.device)
        self._unread: list[Tensor] = []  # loss and norm of the steps since the last `_read_steps`
        self._window = (time.monotonic(), task.train.state_dict())  # when it began, and the position of its first batch
        self._read_at = 0  # the step after which `_read_steps` is called next
        self._printed: set[str] = set()  # reasons why there is no graph, as printed
        self._run_update, self._run_score = self._use_graphs()

    # ------------------------------------------------------------------ the run

    def run(self) -> dict[str, float]:
        results: dict[str, float] = {}
        with own_folder(self.config, self.checkpoints, self.log) as path:
            self._resume(path)
            # The handler covers the last save too: a signal must not end the process before it is complete.
            with catch_sigterm() as stop_signals, self.log.progress(self.step, self.steps):
                while self.step < self.steps:
                    self._run_epoch(stop_signals)
                    self._read_steps(stop_signals)
                    epoch = self.step // self.steps_per_epoch
                    last = self.step >= self.steps
                    if last or (self.config.evaluate_every and epoch % self.config.evaluate_every == 0):
                        results = self.evaluate()
                if not results:
                    results = self.evaluate()
                self._save()
                self.checkpoints.wait()
        return results

    def _run_epoch(self, stop_signals: list[int]) -> None:
        """Run the remaining steps of this epoch."""
        self._open_window(1)
        self.model.train()
        batches = iter(self.task.train)
        parts: list[Any] = []
        while self.step < self.steps:
            begun = time.monotonic()
            batch = next(batches, None)
            self.waited += time.monotonic() - begun
            if batch is None:
                return
            parts.append(batch)
            if len(parts) == self.config.accumulate:
                self._train_step(parts, stop_signals)
                parts = []

    def _train_step(self, parts: list[Any], stop_signals: list[int]) -> None:
        self._seed(self.step)
        rate = self.config.rate(self.step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.rate.fill_(rate)
        self._unread.append(self._run_update(parts, self.config.rollout_length(self.step, self.steps)))
        self.step += 1
        saves = self.config.save_every and self.step % self.config.save_every == 0
        if self.step >= self._read_at or saves:
            self._read_steps(stop_signals)
        if saves:
            self._save()

    def _seed(self, step: int) -> None:
        """Seed the generators: the random numbers of a step depend only on its number, so a restart repeats them."""
        coord = self.mesh.get_local_rank("data")
        seed = ((self.config.seed * 1_000_003 + step) * 65_537 + coord) % (1 << 63)
        # torch.manual_seed takes 0.2 ms on CPUs: it records the stack for each device that it may have to seed later.
        (torch.default_generator if self.device.type == "cpu" else torch).manual_seed(seed)

    def _update(self, parts: list[Any], length: int = 1) -> Tensor:
        """Run one step without reading a value on the host. Return the mean loss and the norm of the gradients.

        `length`: model steps per sample.
        """
        self.optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        recorder = self.recorder if self.recorded < self.config.record else None
        if recorder is not None:
            recorder.begin(self.step + 1)
        for i, batch in enumerate(parts):
            with no_sync(self.model) if i + 1 < len(parts) else nullcontext():
                _, part = self._forward(batch, length)
                part = part / len(parts)
                part.backward()
            loss += to_full_tensor(part.detach()).double()
        if recorder is not None:
            recorder.finish()
            self.recorded += 1
        grads = LocalGrads(self.model)
        # One message for both, so that all ranks see a loss that is not finite on one of them.
        stats = torch.stack([loss / dist.get_world_size(), grads.sum_of_squares()])
        if dist.get_world_size() > 1:
            stats = collectives.all_reduce(stats, dist.group.WORLD)
        stats[1].sqrt_()
        self.bad.copy_(torch.maximum(self.bad, 1 - stats.isfinite().all().to(self.bad)))
        if self.config.clip:
            grads.clip_(stats[1], self.config.clip)
        self._step_optimizer()
        if self.ema_average is not None:
            self.ema_average.update(1 - self.bad)
        return stats

    def _step_optimizer(self) -> None:
        self.optimizer.found_inf = self.bad  # type: ignore[attr-defined]  # 1: the fused step changes nothing
        if self.device.type != "cuda":
            self.optimizer.step()
            return
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group |= {"lr": self.rate, "capturable": True}
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group |= {"lr": rate, "capturable": False}  # as in the checkpoints of any device

    def _forward(self, batch: Any, length: int) -> tuple[Any, Tensor]:
        """Return the output of the last model step, and the mean loss over the steps that have gradients."""
        task, config = self.task, self.config
        if task.lead is None:
            output = self.model(*task.inputs(batch))
            return output, task.loss(output, batch)
        forced = task.forcings
        (state,) = task.inputs(batch)
        states = rollout(
            self.model,
            state,
            length,
            forcings=None if forced is None else lambda i: forced(batch, i),
            grad_steps=config.rollout_grad_steps,
            checkpoint=config.rollout_checkpoint,
            push_forward=config.push_forward,
        )
        first = 0 if config.rollout_grad_steps is None else max(0, length - config.rollout_grad_steps)
        losses = []
        for i, output in enumerate(states):
            if i >= first:  # earlier states require no gradients
                losses.append(task.loss(output, task.lead(batch, i)))
        return output, sum(losses[1:], losses[0]) / len(losses)

    def _use_graphs(self) -> tuple[Callable[[list[Any], int], Tensor], Callable[[Any], Tensor]]:
        """Return `_update` and `_score`, as CUDA graphs if the options and the device allow it."""
        chosen = self.config.graphs
        if chosen or (chosen is None and self.device.type == "cuda" and dist.get_world_size() == 1):
            groups = [dist.group.WORLD] if dist.get_world_size() > 1 else []
            try:
                check_device(self.device)
                check_messages(groups, self.device)
            except ShardfieldError as error:
                raise UsageError(f"--graphs: {error}") from None
            return StepGraph(self._update, groups), StepGraph(self._score, groups)
        return self._update, self._score

    def _check_graphs(self) -> None:
        """Print why the step does not run as a CUDA graph; raise if the options require one."""
        for graph in (self._run_update, self._run_score):
            reason = getattr(graph, "refused", None)
            if reason is not None and self.config.graphs:
                raise ShardfieldError(f"--graphs: a CUDA graph cannot contain the step: {reason}")
            if reason is not None and reason not in self._printed:
                self._printed.add(reason)
                self.log.print_line(f"not as a CUDA graph: {reason}")

    # ------------------------------------------------------------------ reading losses

    def _open_window(self, steps: int) -> None:
        """Record the position of the next batch, and read the losses after at most `steps` steps."""
        self._window = (time.monotonic(), self.task.train.state_dict())
        every = self.config.log_every
        self._read_at = min(self.step + steps, (self.step // every + 1) * every)

    def _read_steps(self, stop_signals: list[int]) -> None:
        """Read and record the losses since the last call; all ranks stop together if one of them has to.

        Called every `log_every` steps and about once a second, before a checkpoint and at the end of an epoch. In
        between no rank waits for its device.
        """
        if not self._unread:
            return
        stats = torch.stack(self._unread).tolist()
        first, self._unread = self.step - len(stats), []
        good = next((i for i, values in enumerate(stats) if not all(map(math.isfinite, values))), len(stats))
        rates = [self.config.rate(first + i, self.steps) for i in range(good)]
        self.log.steps(first, self.steps, [loss for loss, _ in stats[:good]], rates, self.config.batch_size)
        if good < len(stats):
            raise self._nonfinite_error(first, good, *stats[good])
        self._check_graphs()
        took = (time.monotonic() - self._window[0]) / len(stats)
        stop, write_failed, seconds = self._sync_ranks(bool(stop_signals), took)
        if write_failed:
            raise ShardfieldError(f"step {self.step}: rank 0 cannot write {self.log.write_error or 'its files'}")
        if stop:
            self._save()
            self.checkpoints.wait()
            raise Preempted(f"step {self.step}: received SIGTERM; saved in {self.checkpoints.latest()}")
        self._open_window(max(1, int(READ_SECONDS / max(seconds, 1e-6))))

    def _sync_ranks(self, stop_requested: bool, seconds: float) -> tuple[bool, bool, float]:
        """Return whether any rank has to stop, whether any cannot write, and the longest time of a step."""
        flags = torch.tensor([float(stop_requested), float(self.log.write_error is not None), seconds])
        if dist.get_world_size() > 1:
            flags = collectives.all_reduce(flags.to(self.device), dist.group.WORLD, "max")
        stops, failures, longest = flags.tolist()
        return stops > 0, failures > 0, longest

    def _nonfinite_error(self, first: int, at: int, loss: float, norm: float) -> NonFinite:
        """Save the state before step `first + at` and its batch, and return the error for NaN or inf.

        `first` is the step that the window began with. The state is that before the bad step, since no step after it
        has changed it; the batch is read again and the forward repeated.
        """
        self.step = first + at
        self.task.train.load_state_dict(self._window[1])
        batches = islice(self.task.train, at * self.config.accumulate, (at + 1) * self.config.accumulate)
        self._seed(self.step)
        self.model.train()
        with torch.no_grad():
            for batch in batches:
                output, part = self._forward(batch, self.config.rollout_length(self.step, self.steps))
                value = collectives.all_reduce(to_full_tensor(part).double(), dist.group.WORLD)
                if not math.isfinite(value.item()):
                    break
        folder = self.config.out / f"nonfinite-step-{self.step}"
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the norm of the gradients is {norm}"
        try:
            kept = Checkpoints(folder, 1, self.checkpoints.run_id)
            kept.save(self.step, self.model, self.optimizer, self._scalars())
            kept.wait()
        except CheckpointError as error:
            what += f" (the state before the step could not be saved: {error})"
        return save_report(folder, self.mesh, self.step, what, batch, output)

    # ------------------------------------------------------------------ evaluation

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the mean of each metric over each test set."""
        check_buffers(self.model, self.mesh, f"evaluate at step {self.step}")
        self.model.eval()
        results: dict[str, float] = {}
        with self.ema_average.swapped_in() if self.ema_average is not None else nullcontext():
            for name, loader in self.task.tests.items():
                sums, samples = torch.zeros(len(self.task.metrics), dtype=torch.float64, device=self.device), 0
                for batch in loader.sweep():
                    # Other ranks may have samples when this one has none, and FSDP needs the call on all ranks.
                    count = len(loader.indices)
                    values = self._run_score(batch if count else map_tensors(batch, zero_sample))
                    if count:
                        sums, samples = sums + values, samples + count
                sums = torch.cat([sums, sums.new_tensor([float(samples)])])
                *values, samples = collectives.all_reduce(sums, self.mesh.get_group("data")).tolist()
                results |= {f"{name}/{m}": v / samples for m, v in zip(self.task.metrics, values, strict=True)}
        if results:
            self.log.record((self.step, results))
            self.log.print_line(f"step {self.step}  " + "  ".join(f"{n} {v:.4f}" for n, v in results.items()))
        return results

    def _score(self, batch: Any) -> Tensor:
        """Return the sum of each metric over the samples of a batch."""
        output = self.model(*self.task.inputs(batch))
        batch = batch if self.task.lead is None else self.task.lead(batch, 0)
        values = [to_full_tensor(score(output, batch)).double().sum() for score in self.task.metrics.values()]
        return torch.stack(values) if values else torch.zeros(0, dtype=torch.float64, device=self.device)

    def draw(self) -> None:
        """Plot the first test batch with the recipe's function."""
        if self.task.draw is None or not self.task.tests:
            return
        self.model.eval()
        with torch.no_grad(), self.ema_average.swapped_in() if self.ema_average is not None else nullcontext():
            batch = next(iter(next(iter(self.task.tests.values())).sweep()))
            output = self.model(*self.task.inputs(batch))
        fields = {n: (to_full_tensor(t), shard_boundaries(t)) for n, t in {**batch, "prediction": output}.items()}
        if dist.get_rank() == 0:
            self.task.draw(self.config.out, fields)

    # ------------------------------------------------------------------ checkpoints

    def _scalars(self) -> dict[str, Any]:
        return {"step": self.step, "loader": self.task.train.state_dict(), "config": self.settings}

    def _save(self) -> None:
        if self.last_saved_step != self.step:
            extra = {} if self.ema_average is None else self.ema_average.means
            self.checkpoints.save(self.step, self.model, self.optimizer, self._scalars(), extra)
            self.last_saved_step = self.step

    def _resume(self, path: Path | None) -> None:
        if path is not None:
            extra = {} if self.ema_average is None else self.ema_average.means
            state = self.checkpoints.load(path, self.model, self.optimizer, extra)
            try:
                self.task.train.load_state_dict(state["loader"])
                self.step = self.last_saved_step = state["step"]
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"{path}: cannot be continued here: {error}") from error
            self.log.print_line(f"resumed from {path}")
        ask_first_rank(lambda: self.log.resume(self.step), self.checkpoints.group)


def to_full_tensor(value: Any) -> Tensor:
    """Return the global value as a plain tensor."""
    return value.full_tensor() if isinstance(value, ShardTensor) else value


def zero_sample(empty: Tensor) -> Tensor:
    """Return one sample of zeros in place of an empty batch."""
    if not isinstance(empty, ShardTensor):
        return empty.new_zeros(1, *empty.shape[1:])
    layout = Layout.make(empty._layout.mesh, [(DimSharding(1),), *empty._layout.dims[1:]])
    return wrap(empty._local_tensor.new_zeros(layout.local_shape), layout)
