"""The process of a rank other than 0: loads its part of the model, and makes the calls that rank 0 makes.

It holds no request, no law and no random number: what is decided is decided by rank 0 alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparkchat.collector import look_between_steps, take_over
from sparkchat.engine.captured.build import StepShape, open_step
from sparkchat.engine.captured.shared import FollowedSteps, own_stages
from sparkchat.engine.pair import LoadedPair
from sparkchat.engine.ranks import join_group, one_line, out_of_memory, use_device
from sparkchat.engine.worker import Channel
from sparkchat.errors import EngineCrash, SparkchatError
from sparkchat.models.base import ForwardBatch
from sparkchat.models.deepseek_v4.cache import StateCache
from sparkchat.models.deepseek_v4.loading import load_part
from sparkchat.models.parallel import ProcessGroup

_DEATH_SIGNAL = 1
"""prctl's number for the signal that comes when the process that started this one ends."""
_GRACE_SECONDS = 10.0
"""When one rank ends, collectives of all others fail: the first to be heard of should be the one that did."""

Command = dict[str, Any]


class Follower:
    """This rank's part of the model and of its caches."""

    def __init__(self, group: ProcessGroup, device: torch.device, load: Command) -> None:
        """``load``: the command that says what to load."""
        self._group, self._device = group, device
        if device.type == "cpu":
            torch.set_num_threads(load["threads"])
        model, drafter = (None if path is None else Path(path) for path in load["paths"])
        assert model is not None
        dtype = None if load["dtype"] is None else getattr(torch, load["dtype"])
        self._target, self._drafter = load_part(
            model, drafter, device=device, dtype=dtype, group=group, is_dummy=load["dummy"]
        )
        self._caches: dict[int, StateCache] = {}
        self._states: dict[int, Any] = {}
        self._steps: FollowedSteps | None = None

    def obey(self, command: Command) -> None:
        """Carry out one command with the tensors that come with it."""
        tensors = [
            self._group.receive(shape, getattr(torch, dtype), self._device) for dtype, shape in command["tensors"]
        ]
        getattr(self, f"_{command['op']}")(command, *tensors)

    def close(self) -> None:
        """Let go of what holds on to the group."""
        if self._steps is not None:
            self._steps.close()

    def _new_cache(self, command: Command) -> None:
        model = self._target if command["of"] == "target" else self._drafter
        assert model is not None
        self._caches[command["cache"]] = model.new_cache(*command["sizes"])

    def _drop_caches(self, command: Command) -> None:
        for number in command["caches"]:
            del self._caches[number]

    def _change_row(self, command: Command) -> None:
        getattr(self._caches[command["cache"]], command["change"])(*command["args"])

    def _count_rows(self, command: Command) -> None:
        cache = self._caches[command["cache"]]
        for row, end in command["written"]:
            cache.mark_written(row, end)
        for row, end in command["lengths"]:
            cache.advance(row, end)

    def _open_steps(self, command: Command) -> None:
        cache, draft_cache = (None if n is None else self._caches[n] for n in command["caches"])
        parts: Any = {"target": self._target, "cache": cache, "drafter": self._drafter, "draft_cache": draft_cache}
        step = open_step(LoadedPair(device=self._device, **parts), StepShape(**command["shape"]))
        self._steps = FollowedSteps(step, own_stages(self._device, command["overlaps"]))

    def _prepare_stage(self, command: Command) -> None:
        assert self._steps is not None
        self._steps.prepare(command["number"], command["stage"])

    def _run_stage(self, command: Command) -> None:
        assert self._steps is not None
        self._steps.run(command["number"])

    def _renew_stages(self, command: Command) -> None:
        assert self._steps is not None
        self._steps.renew(command["plans"])

    def _forward(self, command: Command, token_ids: Tensor) -> None:
        cache = self._caches[command["cache"]]
        self._target.forward(_batch(command, token_ids, cache), cache, tuple(command["taps"]))

    def _logits(self, command: Command, hidden: Tensor) -> None:
        self._target.logits(hidden)

    def _extend_context(self, command: Command, features: Tensor) -> None:
        cache = self._caches[command["cache"]]
        ids = torch.zeros(features.shape[0], dtype=torch.int64, device=self._device)
        self._drafter.extend_context(features, _batch(command, ids, cache), cache)

    def _backbone(self, command: Command, token_ids: Tensor) -> None:
        cache = self._caches[command["cache"]]
        self._states.clear()
        self._drafter.backbone(_batch(command, token_ids, cache), cache)

    def _base_logits(self, command: Command, hidden: Tensor) -> None:
        self._drafter.base_logits(hidden)

    def _initial_state(self, command: Command) -> None:
        self._states[command["state"]] = self._drafter.initial_state(command["count"])

    def _select_state(self, command: Command) -> None:
        keep = torch.tensor(command["keep"], device=self._device)
        self._states[command["state"]] = self._states[command["of"]][keep]

    def _markov_step(self, command: Command, previous_ids: Tensor) -> None:
        # No drafter of this family looks at the hidden rows here.
        nothing = torch.empty((previous_ids.shape[0], 0), device=self._device)
        _, state = self._drafter.markov_step(previous_ids, nothing, self._states[command["of"]])
        self._states[command["state"]] = state

    def _markov_rows(self, command: Command, columns: Tensor) -> None:
        self._drafter.markov_rows(columns)


def _batch(command: Command, token_ids: Tensor, cache: StateCache) -> ForwardBatch:
    """The rows of every span begin where its cache row ends."""
    rows, starts = tuple(command["cache_rows"]), tuple(command["row_starts"])
    positions = [
        torch.arange(cache.length(row), cache.length(row) + stop - start)
        for row, start, stop in zip(rows, starts, starts[1:], strict=False)
    ]
    return ForwardBatch(token_ids, torch.cat(positions).to(token_ids.device), rows, starts)


@torch.inference_mode()
def _follow(channel: Channel) -> None:
    join = channel.commands.get()
    device = torch.device(join["device"])
    use_device(device)
    channel.send({"event": "started"})
    group = join_group(join["meeting"], join["rank"], join["size"], device)
    follower = Follower(group, device, channel.commands.get())
    take_over()
    channel.send({"event": "loaded"})
    while (command := channel.next_command())["op"] != "leave":
        follower.obey(command)
        look_between_steps()
    follower.close()
    dist.destroy_process_group()


def main() -> None:
    """Entry of the process: ``argv`` holds the descriptors of the command and the event pipe. Never returns."""
    channel = Channel(int(sys.argv[1]), int(sys.argv[2]))
    # The end of the command pipe ends this process, but not where it is stopped, or holds on in a library's call.
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    try:
        _follow(channel)
    except SparkchatError as error:
        _report(channel, error)
    except Exception as error:  # noqa: BLE001  (the boundary of this process: rank 0 tells the user)
        traceback.print_exc()
        sys.stderr.flush()
        if _is_of_partner(error):
            time.sleep(_GRACE_SECONDS)
        _report(channel, out_of_memory(error, "the engine") or EngineCrash(one_line(error)))
    # Leaving Python the usual way would wait for collectives.
    os._exit(0)


def _is_of_partner(error: Exception) -> bool:
    """Whether it says that another rank has gone."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _report(channel: Channel, error: SparkchatError) -> None:
    channel.send({"event": "error", "error": type(error).__name__, "message": error.message})
